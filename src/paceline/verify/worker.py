"""The process of one rank of a proof: `python -m paceline.verify.worker REQUEST RESULT`.

REQUEST is a JSON file of {jobs: [{spec: file of the twin's spec, plan}], steps}, plans of the most ranks first; rank 0
adds a line of JSON to RESULT for each job when it is done. Jobs of one number of ranks share one world.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.plan.plan import plan_from_dict
from paceline.run.handover import take_over
from paceline.run.worker import end_with_parent, guarded

if TYPE_CHECKING:
    from paceline.run.world import World


def main() -> int:
    """Compare all plans of the request and return the exit code."""
    end_with_parent()
    return guarded(lambda: _compare_all(Path(sys.argv[1]), Path(sys.argv[2])))


def _compare_all(request_path: Path, result_path: Path) -> None:
    import torch

    from paceline.run.world import leave_world
    from paceline.task.data.source import open_sources
    from paceline.verify.compare import compare

    torch.use_deterministic_algorithms(True, warn_only=True)
    request = json.loads(request_path.read_text())
    jobs = [(job["spec"], plan_from_dict(job["plan"])) for job in request["jobs"]]

    @functools.cache
    def opened(spec: str) -> tuple[Any, Any, dict[Any, Any]]:
        """Return the spec's task, its data and what is kept of its references."""
        task = take_over(Path(spec)).task
        return task, open_sources(task.data, task.seed)[0], {}

    for ranks, group in itertools.groupby(jobs, key=lambda job: job[1].layout.devices):
        world = _world_of(ranks, request_path)
        if world is None:
            return
        for spec, plan in group:
            task, source, kept = opened(spec)
            result = compare(task, plan, world, source, source.items_per_sample, request["steps"], kept)
            if world.is_first:
                with result_path.open("a") as file:
                    file.write(json.dumps(result) + "\n")
        world.wait()
        leave_world()


def _world_of(ranks: int, request_path: Path) -> World | None:
    """Join a world of the first so many ranks; None where this process is not among them."""
    from paceline.run.world import join_world

    if int(os.environ["RANK"]) >= ranks:
        return None
    os.environ["WORLD_SIZE"] = str(ranks)  # what torchrun would have put there
    return join_world("cpu", threads=1, rendezvous=f"file://{request_path.parent}/rendezvous-{ranks}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
