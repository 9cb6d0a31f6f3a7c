"""The process of one rank of a proof: `python -m paceline.verify.worker REQUEST RESULT`.

REQUEST is a JSON file of {jobs: [{spec: file of the twin's spec, plan}], steps}; rank 0 adds a line of JSON to RESULT
for each job when it is done. The jobs share one world, so that processes are started once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

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
    world = join_world("cpu", threads=1)
    at, task, source = "", None, None
    for job in request["jobs"]:
        if job["spec"] != at:
            at, task = job["spec"], take_over(Path(job["spec"])).task
            source, _ = open_sources(task.data, task.seed)
        assert task is not None and source is not None
        plan = plan_from_dict(job["plan"])
        result = compare(task, plan, world, source, source.items_per_sample, request["steps"])
        if world.is_first:
            with result_path.open("a") as file:
                file.write(json.dumps(result) + "\n")
    world.wait()
    leave_world()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
