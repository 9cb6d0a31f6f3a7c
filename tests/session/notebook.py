"""Runs a notebook's cells in a kernel and writes what they showed as JSON: `python notebook.py CELLS OUT`.

The kernel is made by the command of docs/tutorials/bring/notebook.md, in a folder of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat

KERNEL = "paceline"


def execute(cells: list[str], folder: Path) -> list[dict[str, object]]:
    """Return for each cell its `text` (streams together), its `html`, and its `error`, `because` of what."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made = [sys.executable, "-m", "ipykernel", "install", "--prefix", str(folder), "--name", KERNEL]
    subprocess.run(made, check=True, capture_output=True)
    os.environ["JUPYTER_PATH"] = str(folder / "share" / "jupyter")
    client = nbclient.NotebookClient(book, timeout=None, kernel_name=KERNEL, allow_errors=True)
    client.execute(cwd=str(folder))
    return [_told(cell["outputs"]) for cell in book.cells]


def _told(outputs: list[dict[str, object]]) -> dict[str, object]:
    shown = [output["data"] for output in outputs if output["output_type"] in ("execute_result", "display_data")]
    return {
        "text": "".join(str(output["text"]) for output in outputs if output["output_type"] == "stream"),
        "html": "".join(str(data.get("text/html", "")) for data in shown),
        "error": next((output["ename"] for output in outputs if output["output_type"] == "error"), None),
        "because": next((output["evalue"] for output in outputs if output["output_type"] == "error"), None),
    }


if __name__ == "__main__":
    cells, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(execute(json.loads(cells.read_text()), out.parent)))
