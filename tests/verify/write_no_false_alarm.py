"""Proves all correct set-ups and writes docs/proofs/no-false-alarm.json: how many are equal, which are ill-conditioned.

`python tests/verify/write_no_false_alarm.py`; the table is in set_ups.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])

from proving import verdicts
from set_ups import set_ups

RECORD = Path(__file__).parents[2] / "docs" / "proofs" / "no-false-alarm.json"
SHOWN = ("dtype", "quantity", "name", "step", "relative", "tolerance", "moved", "chaos")


def record_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of all set-ups: counts by verdict, and what rounding hides of each that is ill-conditioned."""
    said = [verdict for verdict, _ in found.values()]
    rows = {}
    for name, (verdict, records) in found.items():
        rounding = next((record.ill_conditioned for record in records if record.ill_conditioned), None)
        rows[name] = {"verdict": verdict, **({key: getattr(rounding, key) for key in SHOWN} if rounding else {})}
    return {"counts": {verdict: said.count(verdict) for verdict in sorted(set(said))}, "set_ups": rows}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record_of(verdicts(set_ups())), indent=1) + "\n", encoding="utf-8")
