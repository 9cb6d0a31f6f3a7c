"""In a notebook: a loop on one device, fit on several with what cells define, an interrupt that saves, the report."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import environment, records_of, run_patiently

from paceline.report.notebook.table import inline_html
from paceline.said import end_line, say_line, say_over

KERNEL = ("nbclient", "ipykernel", "cloudpickle")
MISSING = [name for name in KERNEL if importlib.util.find_spec(name) is None]
needs_kernel = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (extra 'test')")

PAGE = Path(__file__).parents[2] / "docs/tutorials/bring/notebook.md"
# What a notebook's stop button does: the signal reaches the kernel's whole process group.
STOPPED = """
import dataclasses, os, signal, threading, time
from pathlib import Path

def stop_at(step, run_dir):
    while not any(f'"step":{step},' in path.read_text() for path in Path(run_dir).glob("journal/*")):
        time.sleep(0.02)
    os.killpg(os.getpgid(0), signal.SIGINT)

threading.Thread(target=stop_at, args=(3, "stopped")).start()
endless = dataclasses.replace(task, stop="1000000 steps")
paceline.fit(endless, cluster={**here, "devices": 2}, run={"dir": "stopped"}, verify=False)
"""
STILL_HERE = 'print("still here", len(losses))'


@needs_kernel
def test_a_notebook_trains_stops_shows_and_goes_on(tmp_path: Path) -> None:
    cells, out = tmp_path / "cells.json", tmp_path / "out.json"
    page = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    cells.write_text(json.dumps([*page, STOPPED, STILL_HERE]))
    script = Path(__file__).parent / "notebook.py"
    # Under pytest a kernel would not show what processes of its own write.
    env = {name: value for name, value in environment().items() if name != "PYTEST_CURRENT_TEST"}
    ended = run_patiently([sys.executable, script, cells, out], env=env)
    assert ended.returncode == 0, ended.stderr
    told: list[dict[str, Any]] = json.loads(out.read_text())
    defined, loop, again, fitted, stopped, still = told
    assert defined["error"] is None and loop["error"] is None, told
    first, *others = [part for part in loop["text"].replace("\n", "\r").split("\r") if part.startswith("step")]
    assert len(others) == 39 and "loss" in first
    assert loop["text"].count("\nstep") == 1, "all steps in one line, which is printed over"
    assert again["error"] is None and "steps made: 0" in again["text"] and "has all its 40 steps" in again["text"], (
        again
    )
    assert stopped["error"] == "HandedBack", stopped
    assert still["text"].strip() == "still here 40", "the kernel lives on"
    (end,) = records_of(tmp_path / "stopped", "run_ended")
    assert end["status"] == "requeue" and end["step"] >= 3
    saved = records_of(tmp_path / "stopped", "checkpoint")
    assert saved[-1]["step"] == end["step"], "what was done is saved"
    assert fitted["error"] is None and "40/40  loss" in fitted["text"], fitted
    assert "<table" in fitted["html"] and "step time" in fitted["html"] and "Finished" in fitted["html"]


class Shown:
    """A stream that keeps what is written, as a notebook's cell does."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""


def test_a_line_is_printed_over_until_another_one_is_said() -> None:
    shown: Any = Shown()
    say_line("begin", shown)
    say_over("step 1 of 10", shown)
    say_over("step 2", shown)
    say_line("a note", shown)
    say_over("step 3", shown)
    end_line(shown)
    end_line(shown)
    assert shown.text == "begin\nstep 1 of 10\rstep 2      \na note\nstep 3\n"


def test_what_a_table_shows_is_text_and_never_markup() -> None:
    page = inline_html("<b>", ["a & b"], ("x",), [("<script>",)])
    assert "<script>" not in page and "&lt;script&gt;" in page and "a &amp; b" in page and page.startswith("<div")
