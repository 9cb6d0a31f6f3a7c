"""Write docs/reference/proof.md from the declaration of a proof's records.

python docs/scripts/write_proof.py
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from paceline.spec.journal.record import Told
from paceline.spec.proof.records import RECORDS

PAGE = Path(__file__).parents[1] / "reference" / "proof.md"
HEAD = """<!-- Written by docs/scripts/write_proof.py from spec/proof/records.py; run it instead of editing. -->

# A proof's records

What `paceline verify --json` prints and `paceline.verify` returns are proofs, one for each layout, as frozen records:
`{equal, layouts: [Proof]}`. `paceline.verify_loop` returns a `LoopProof`. What they mean stands in
[Verifying](../guide/plan/verifying.md); differences are relative, by the names of its table of tolerances.
"""


def section(kind: type[Any]) -> str:
    """Return a record's part of the page: what it is, and its fields."""
    rows = "".join(
        f"| `{name}` | {told.unit} | {told.meaning} |\n"
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
        for told in hint.__metadata__
        if isinstance(told, Told)
    )
    about = (kind.__doc__ or "").partition(" (verify/")[0].rstrip(".")
    return f"\n## {kind.__name__}\n\n{about}.\n\n| field | unit | meaning |\n|---|---|---|\n{rows}".replace(
        "|  |", "| |"
    )


def page() -> str:
    """Return the page."""
    return HEAD + "".join(map(section, RECORDS))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
