"""Plants every mistake and writes docs/planted-bugs.md: what was planted, what caught it and what it named.

`python tests/mutations/write_table.py` writes the page, and with a pattern the rows of the mistakes that it matches;
other rows stay as they are, where the page has them. A test compares the rows with the catalogue.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "plants"))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:4], os.environ.get("PYTHONPATH", "")])

from catalogue import CONTROLS, PROOFS
from commands import Proven, prove_all
from distributed import run_ranks
from planted import Planted
from resumed import PLANS as RESUME_PLANS
from resumed import RESUMES, Lost, resume_all

PAGE = Path(__file__).parents[2] / "docs" / "planted-bugs.md"
HEAD = """<!-- Written by tests/mutations/write_table.py; run it again instead of editing. -->

# Planted bugs

Distributed training goes wrong without an error: the run goes on and the numbers are not those of the experiment. Each
row is such a mistake, of a family that has happened in a well-known framework, planted into the running system in real
processes. Either the proof or the comparison of a resumed run with an undisturbed one must catch it and name the
quantity and the tensor. The proof is `paceline verify SPEC --layout LAYOUT` and must end with exit code 4: what runs is
the [twin](guide/plan/inside-a-proof.md#the-twin) that it makes of the spec, and the mistake is planted by the import
path of the spec's objective.
A proof has parts, and names the first that is not equal: what only the `story` names (a whole run
with evaluations, a checkpoint and resumes), or only `low precision`, no update in fp64 shows. Where the run of a part
ends with an error, the command does so too. `make test` plants one of each kind again, `make test-deep` all.

Unplanted controls, {controls} of them, are never flagged. The reference that a proof compares with is
[written plainly](guide/plan/verifying.md), so a mistake in the run is not in it too. Mistakes in loops of other people,
which [`verify_loop`](guide/plan/proving-a-loop.md) must tell, are changes of one
right loop in `tests/verify/loops/wrong_loops.py`; right ones that it must not flag are in `right_loops.py` beside it.

| family | planted | caught by | names | likely cause that is given |
|---|---|---|---|---|
"""
FOOT = """
## What it cannot see

| mistake | why | what sees it |
|---|---|---|
| from the fifth data rank or the fourth stage on | twins have fewer | `train`: copies that drift apart |
| from the fourth micro-batch or the fifth step of a start on | twins have fewer | nothing before the run |
| in files of weights, or drawing more than four million values | twins draw few | the first losses in the journal |
| in batches by length, or a schedule of one's own | twins have fixed batches and a linear one | the journal has both |
| of sequences longer than 4,096 tokens | the longest row of a twin | nothing before the run |
| of one size of a kernel: widths, depths and batches of the real model | twins are narrow | nothing before the run |
| of a GPU's kernels, of NCCL, of compiled code | proofs run eagerly, on CPUs | `train`: copies that drift apart |
| of bf16 and fp16 kernels | layout and reference share them | `train`: copies that drift apart |
| in a loss scale that a restart loses | the story runs in fp32 or fp64 | a resumed run against an unbroken one, above |
| in the objective, the model or the data themselves | layout and reference share them | the reader of the loss |
| of random numbers that belong to no sample | every cut draws others | told as not compared |
| in what a save beside training copies | the story leaves after its save | a resume is held against the journal |
| in further sets of held-out samples | the story evaluates one set | nothing before the run |
| in a new plan between two steps of one process | the story resumes instead | `train`: copies that drift apart |
"""


def row_of(bug: Planted | Lost) -> str:
    """Return the cells that do not depend on a measurement."""
    by = "proof" if isinstance(bug, Planted) else "resumed run"
    return f"| {bug.family} | {bug.what} | {by} |"


def because_of(error: str) -> str:
    """Return the line of an error that says why, without folders that are other ones every time."""
    because = next(line for line in error.splitlines() if line.startswith("  because"))
    return re.sub(r"/\S*/checkpoints/", "checkpoints/", because.removeprefix("  because").strip())


def proof_row(bug: Planted, proven: Proven) -> str:
    """Return the row of a mistake for what its command said."""
    record = proven.record
    first = record.get("first_difference")
    if "error" in record and bug.quantity == "error":
        return f"{row_of(bug)} {', '.join(filter(None, ['the run ends', bug.part]))} | {because_of(record['error'])} |"
    if first is None:
        return f"{row_of(bug)} **not caught** | |"
    name = f" of `{first['name']}`" if first["name"] != first["quantity"] else ""
    return f"{row_of(bug)} {first['quantity']}{name}, step {first['step']}, {first['part']} | {first['likely']} |"


def resumed_row(lost: Lost, found: tuple[str, int] | None) -> str:
    """Return the row of what a resume loses for where a resumed run departs."""
    return f"{row_of(lost)} {f'{found[0]}, step {found[1]}' if found else '**not caught**'} | |"


def page(rows: list[str]) -> str:
    """Return the page with these rows."""
    return HEAD.format(controls=len(CONTROLS) + len(RESUME_PLANS)) + "\n".join(rows) + "\n" + FOOT


def known_row(bug: Planted | Lost) -> str:
    """Return the row that the page has of a mistake, one that says so where it has none."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith(row_of(bug))), f"{row_of(bug)} **not run** | |")


def main() -> None:
    """Plant everything, or what matches a pattern, and write the page."""
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    planted = [bug for bug in PROOFS if re.search(pattern, bug.what)]
    with tempfile.TemporaryDirectory() as folder:
        proofs = prove_all(planted, Path(folder))
    rows = [proof_row(bug, proofs[bug.what]) if bug.what in proofs else known_row(bug) for bug in PROOFS]
    if pattern:
        rows += [known_row(lost) for lost in RESUMES]
    else:
        found = run_ranks(resume_all, 2)[0][0]
        rows += [resumed_row(lost, found[lost.what]) for lost in RESUMES]
    PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
