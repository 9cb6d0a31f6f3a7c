"""The process of a rank that is started anew: what it imports, and that no time goes into garbage meanwhile."""

from __future__ import annotations

import sys

from runs import as_json, environment, run_patiently

COUNTS = """
import gc, json, sys
from paceline.launch.worker import import_all
looks = []
gc.callbacks.append(lambda phase, about: looks.append(about["generation"]) if phase == "start" else None)
import_all()
made = len(looks)
known = [name in sys.modules for name in ("torch._dynamo", "paceline.run.loop.training")]
import_all()
print(json.dumps([made, known, gc.isenabled()]))
"""


def test_a_rank_looks_for_no_garbage_while_it_imports() -> None:
    """Where no standby forks ranks each of them imports torch: a sixth of that went into collections."""
    ended = run_patiently([sys.executable, "-c", COUNTS], is_cold=True, env=environment())
    assert ended.returncode == 0, ended.stderr
    assert as_json(ended.stdout) == [0, [True, True], True]
