"""The process of one rank of a proof: `python -m paceline.verify.worker REQUEST RESULT`.

REQUEST is a JSON file of {spec: file of the twin's spec, plans, steps}; rank 0 writes the list of results, one per
plan, to RESULT. The plans share one world, so that processes are started once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from paceline.run.brief import plan_from_dict
from paceline.run.handover import take_over
from paceline.run.worker import end_with_parent, guarded


def main() -> int:
    """Compare all plans of the request and return the exit code."""
    end_with_parent()
    return guarded(lambda: _compare_all(Path(sys.argv[1]), Path(sys.argv[2])))


def _compare_all(request_path: Path, result_path: Path) -> None:
    import torch

    from paceline.run.world import join_world, leave_world
    from paceline.task.data.source import open_sources
    from paceline.verify.compare import compare

    torch.use_deterministic_algorithms(True, warn_only=True)
    request = json.loads(request_path.read_text())
    task = take_over(Path(request["spec"])).task
    world = join_world("cpu", threads=1)
    source, _ = open_sources(task.data, task.seed)
    results: list[dict[str, Any]] = []
    for plan in map(plan_from_dict, request["plans"]):
        results.append(compare(task, plan, world, source, source.items_per_sample, request["steps"]))
    if world.is_first:
        result_path.write_text(json.dumps(results))
    world.wait()
    leave_world()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
