"""Trains every foreign model and writes docs/foreign-models.md: what is open, what is proven, what twenty steps give.

`python tests/foreign/write_foreign.py` makes all rows anew, with names of rows those alone. The rows are kept in
docs/proofs/foreign.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])

import distributed
from foreign_catalogue import ODD_PROGRAMS, ROWS
from foreign_held import BATCH, SAME, SAME_IN_FP32, STEPS, look

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RECORD = DOCS / "foreign-models.md", DOCS / "proofs" / "foreign.json"
HEAD = """<!-- Written by tests/foreign/write_foreign.py; run it again instead of editing. -->

# Foreign models

Models and programs that were not written for Paceline: {families} families of Hugging Face with tiny random configs,
and {own} programs with something in them that distributed training gets wrong. Each is planned, proven and trained.
A row says

- which **axes** are open; why the others are closed follows below the tables;
- the **proof**: what `paceline verify` finds for every open axis alone and for a composition of up to four ranks (for
  that alone where a row names no other), and the largest relative difference of losses and weights from one device in
  fp64;
- **{steps} steps** of AdamW on {batch} samples each, in fp64 and in micro-batches of two rows, by Paceline's own
  training loop in real processes: how far the losses (largest relative difference) and the weights (norm of the
  difference over the norm) are from those of a loop written with torch alone on whole batches, on one device and on
  the best layout.

{counts} Numbers around 1e-7 are of models that compute in fp32 whatever dtype they are asked for; where the proof needs
to know, it names such a part, and holds the layout to what a unit in the last place of fp32 moves. A plain loop draws
other random numbers than Paceline, so the best layout of rows with dropout or noise is compared with Paceline's one
device. `make test-deep` makes the tables again.
"""
PRELOADED = ["paceline.run.loop.training", "paceline.verify.process.checks", "transformers.modeling_utils"]
ALL = (*ROWS, *ODD_PROGRAMS)
COLUMNS = "| model | axes open | proof | one device | best layout |\n|---|---|---|---|---|\n"
VERDICTS = {"same": "the same", "random": "the same as on one device", "refused": "refused, with the reason",
            "failed": "ends in an error that says so", "told": "not equal, and the proof says so",
            "silent": "SILENTLY DIFFERENT"}  # fmt: skip


def verdict(record: dict[str, Any]) -> str:
    """Return the row's outcome, a key of VERDICTS: the worst of its parts."""
    if "refused" in record:
        return "refused"
    steps, proofs = record["steps"].values(), record["proofs"].values()
    if any("failed" in part for part in (*steps, *proofs)):
        return "failed"
    told = any(not proof.get("equal", True) for proof in proofs)
    compared = list(steps)[1:] if record["random"] else steps
    limit = SAME_IN_FP32 if record["kind"] == "Hugging Face" else SAME
    if not all(max(part["loss"], part["weights"]) <= limit and not part["missing"] for part in compared):
        return "told" if told else "silent"
    return "told" if told else "random" if record["random"] else "same"


def _proof(record: dict[str, Any]) -> str:
    proofs = record["proofs"]
    if not proofs:
        return "no layout"
    wrong = [f"{name}: **{_cell(proof)}**" for name, proof in proofs.items() if not proof.get("equal")]
    right = [proof["worst"] for proof in proofs.values() if proof.get("equal")]
    names = ", ".join(name for name, proof in proofs.items() if proof.get("equal"))
    inside = next((f"; {proof['inside']}" for proof in proofs.values() if proof.get("inside")), "")
    return "; ".join([*([f"equal: {names} ({max(right):.0e}{inside})"] if right else []), *wrong])


def _cell(proof: dict[str, Any]) -> str:
    return _plain(proof.get("refused") or proof.get("failed") or proof["why"])


def _steps(part: dict[str, Any]) -> str:
    if "failed" in part:
        return f"**{_plain(part['failed'])}**"
    if "loss" not in part:
        return "draws its own numbers"
    text = f"{part['loss']:.0e}, {part['weights']:.0e}"
    return text if max(part["loss"], part["weights"]) <= SAME_IN_FP32 else f"**{text}**"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def row_of(record: dict[str, Any]) -> str:
    """Return a model's row of the table."""
    name = f"{record['name']}: {record['what']}"
    if "refused" in record:
        return f"| {name} | none | refused: {_plain(record['refused'])} | | |"
    one, *others = record["steps"].items()
    best = f"{others[0][0]}: {_steps(others[0][1])}" if others else "no other"
    opened = ", ".join(f"`{axis}`" for axis in record["open"]) or "none"
    if "accumulation" in record["closed"]:
        opened += ", no accumulation"
    return f"| {name} | {opened} | {_proof(record)} | {_steps(one[1])} | {best} |"


def reasons(records: list[dict[str, Any]]) -> str:
    """Return every reason for which an axis is closed, with the models that it holds of."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for axis, because in record.get("closed", {}).items():
            found.setdefault((axis, because), []).append(record["name"])
    lines = []
    for (axis, because), names in sorted(found.items(), key=lambda entry: (entry[0][0], -len(entry[1]))):
        listed = ", ".join(names) if len(names) <= 12 else f"{len(names)} models, {', '.join(names[:3])} among them"
        lines.append(f"| `{axis}` | {_plain(because)} | {listed} |")
    return "\n".join(lines)


def page(records: list[dict[str, Any]]) -> str:
    """Return the page for what was found."""
    families = [record for record in records if record["kind"] == "Hugging Face"]
    own = [record for record in records if record["kind"] == "own"]
    found = [verdict(record) for record in records]
    counts = ", ".join(f"{found.count(key)} {text}" for key, text in VERDICTS.items() if key in found)
    head = HEAD.format(
        families=len(families), own=len(own), steps=STEPS, batch=BATCH, counts=f"Of {len(records)} rows: {counts}."
    )
    later = ", ".join(row.name for row in ALL if row.name not in {record["name"] for record in records})
    head += f"\nNot held yet: {later}.\n" if later else ""
    tables = [f"\n## {title}\n\n{COLUMNS}" + "\n".join(map(row_of, part)) + "\n"
              for title, part in (("Hugging Face", families), ("Programs", own))]  # fmt: skip
    closed = f"\n## Why axes are closed\n\n| axis | because | models |\n|---|---|---|\n{reasons(records)}\n"
    return head + "".join(tables) + closed


def main() -> None:
    """Make the rows that are asked for and write the page."""
    distributed.PRELOADED.extend(PRELOADED)  # once, for all ranks
    asked = sys.argv[1:]
    for row in ALL:
        if asked and row.name not in asked:
            continue
        began = time.perf_counter()
        record = look(row)
        print(f"{verdict(record):8} {row.name} ({time.perf_counter() - began:.0f} s)", flush=True)
        _write({row.name: record})
    _write({})


def _write(made: dict[str, dict[str, Any]]) -> None:
    """Write record and page with the rows that were made in place of those of the same names."""
    before = json.loads(RECORD.read_text()) if RECORD.exists() else []
    kept = {record["name"]: record for record in before} | made
    records = [kept[row.name] for row in ALL if row.name in kept]
    RECORD.write_text(json.dumps(records, indent=1) + "\n")
    PAGE.write_text(page(records))


if __name__ == "__main__":
    main()
