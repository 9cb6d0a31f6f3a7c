"""Proves all correct set-ups and writes docs/proofs/no-false-alarm.json: how many are equal, which are ill-conditioned.

`python tests/verify/write_no_false_alarm.py`; the table is in set_ups.py. `--new` proves those that the file lacks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:3], os.environ.get("PYTHONPATH", "")])

from proving import verdicts
from set_ups import set_ups

RECORD = Path(__file__).parents[2] / "docs" / "proofs" / "no-false-alarm.json"
SHOWN = ("dtype", "quantity", "name", "step", "relative", "tolerance", "moved", "chaos")


def record_of(found: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of all set-ups: counts by verdict, and what rounding hides of each that is ill-conditioned.

    `rows` are those of set-ups that were not proven again.
    """
    for name, (verdict, records) in found.items():
        rounding = next((record.ill_conditioned for record in records if record.ill_conditioned), None)
        rows[name] = {"verdict": verdict, **({key: getattr(rounding, key) for key in SHOWN} if rounding else {})}
    rows = {one.name: rows[one.name] for one in set_ups()}
    said = [row["verdict"] for row in rows.values()]
    return {"counts": {verdict: said.count(verdict) for verdict in sorted(set(said))}, "set_ups": rows}


if __name__ == "__main__":
    known = json.loads(RECORD.read_text(encoding="utf-8"))["set_ups"] if "--new" in sys.argv else {}
    proven = verdicts([one for one in set_ups() if one.name not in known])
    RECORD.write_text(json.dumps(record_of(proven, known), indent=1) + "\n", encoding="utf-8")
