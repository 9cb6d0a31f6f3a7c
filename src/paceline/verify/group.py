"""A group of processes that proves many plans, one after the other: started once for all plans of one world size."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.plan.plan import Plan
from paceline.run.handover import hand_over
from paceline.run.recovery.supervisor import Outcome, supervise
from paceline.spec import Spec

STOPPED = (129, 130, 143)  # ended by SIGHUP, SIGINT or SIGTERM: somebody wants the whole proof to end


@dataclass(frozen=True)
class Job:
    """One plan to compare with one device, and the spec of the twin that it runs."""

    spec: Spec
    plan: Plan


def run_jobs(jobs: Sequence[Job], steps: int) -> list[dict[str, Any] | PacelineError]:
    """Return one result of `compare` for each job, or the error that ended it. All plans have as many ranks.

    After an error the jobs that are left run in a new group: one layout that fails says nothing of the next.
    """
    results: list[dict[str, Any] | PacelineError] = []
    while len(results) < len(jobs):
        left = jobs[len(results) :]
        found, outcome = _run(left, steps)
        results += found
        if len(found) < len(left):
            results.append(_failure(outcome))
    return results


def _run(jobs: Sequence[Job], steps: int) -> tuple[list[dict[str, Any]], Outcome]:
    """Run jobs in one group of processes until the end or the first error; return the results and how it ended."""
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as name:
        folder, rows, at, before = Path(name), [], "", None
        for index, job in enumerate(jobs):
            if job.spec != before:
                part = folder / str(index)
                part.mkdir()
                at, before = str(hand_over(job.spec, part)), job.spec
            rows.append({"spec": at, "plan": dataclasses.asdict(job.plan)})
        (folder / "request.json").write_text(json.dumps({"jobs": rows, "steps": steps}))
        result = folder / "result.jsonl"
        command = [sys.executable, "-m", "paceline.verify.worker", str(folder / "request.json"), str(result)]
        # The proof needs no speed and no GPU; one thread a rank keeps it light and repeatable.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        outcome = supervise(command, jobs[0].plan.layout.devices, environ)
        if outcome.exit_code in STOPPED:
            raise _failure(outcome)
        lines = result.read_text().splitlines() if result.exists() else []
        return [json.loads(line) for line in lines], outcome


def _failure(outcome: Outcome) -> PacelineError:
    details = outcome.error or {"what": "a process of the proof ended", "because": "", "try": ""}
    failure = PacelineError(str(details["what"]), str(details["because"]), str(details["try"]))
    failure.exit_code = outcome.exit_code
    return failure
