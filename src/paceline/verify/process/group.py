"""Proves many plans, one after the other, in ranks that are forked from one process, whatever the plans' ranks.

That process (`worker.py`) imports everything once; a rank that dies takes one proof with it and no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import NeedsWholeWeights, PacelineError, Requeue
from paceline.launch.here import without_place
from paceline.run.process.handover import hand_over
from paceline.scratch import Scratch
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.proof.plain import from_plain
from paceline.spec.proof.records import CheckName, CheckProof
from paceline.supervise.groups import Process
from paceline.supervise.standby import NO_THREADS, PROOF, StartsApart
from paceline.supervise.supervisor import Outcome, StartsRank, starter, supervise_as_asked
from paceline.verify.process.worker import STOPPED

# Signals by which native code ends its own process; others come from somebody else, such as a system without memory.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
FOLLOW_SECONDS = 0.2  # between two looks for new results, for those who watch

Result = CheckProof | PacelineError
TellsResult = Callable[[int, Result], None]


class RankTraceback(PacelineError):
    """A rank of a proof ended with an error that nobody wrote for users; a note of it has the traceback, if any."""


@dataclass(frozen=True)
class Job:
    """One plan to hold against one device, the spec of the twin that it runs, and by which check (`checks.py`)."""

    spec: Spec
    plan: Plan
    check: CheckName = "steps"
    part: str = ""  # of the proof that this is (`proof_parts.py`), for those who read it
    masked: bool = False  # whether a random part of the labels of built-in data is masked
    steps: int = 0  # updates to compare; 0 is the proof's own number


def run_jobs(
    jobs: Sequence[Job],
    steps: int,
    told: TellsResult | None = None,
    standby: StartsApart | None = None,
    until_failed: bool = False,
) -> list[Result]:
    """Return one result for each job, or the error that ended it, in the order of the jobs.

    `told` hears of each (index of the job, result) as soon as it is known. After an error, a rank that died included,
    the jobs that are left run all the same: one layout that fails says nothing of the next. Where all are parts of one
    proof, `until_failed`, those after the first that fails or is not equal have its error or result, and do not run. A
    story that goes on where weights are in parts, and meets a model that needs them whole, is told again on copies. The
    process that forks their ranks is itself forked from `standby`, where there is one, and imports nothing then.
    """
    jobs = list(jobs)
    results: dict[int, Result] = {}
    again: set[int] = set()

    def take(index: int, result: Result) -> None:
        job = jobs[index]
        if isinstance(result, NeedsWholeWeights) and job.check == "story" and job.plan.layout.dp_shard == 1:
            jobs[index] = dataclasses.replace(job, check="story on copies")
            again.add(index)
            return
        results[index] = result
        if told is not None:
            told(index, result)

    while left := [index for index in _order(jobs) if index not in results]:
        again.clear()
        outcome = _run({index: jobs[index] for index in left}, steps, take, standby, until_failed)
        if lost := [index for index in left if index not in results and index not in again]:
            take(lost[0], _failure(outcome))
    return [results[index] for index in range(len(jobs))]


def _order(jobs: Sequence[Job]) -> list[int]:
    """Return the places of the jobs, most ranks first, those of one spec and precision next to each other."""
    specs: list[Spec] = []
    keys = []
    for job in jobs:
        if job.spec not in specs:
            specs.append(job.spec)
        keys.append((-job.plan.layout.devices, specs.index(job.spec), job.plan.precision))
    return sorted(range(len(jobs)), key=keys.__getitem__)


def _run(
    jobs: Mapping[int, Job], steps: int, take: TellsResult, standby: StartsApart | None, until_failed: bool
) -> Outcome:
    """Run jobs to the end, or until the process that forks their ranks dies; give each result to `take` as it comes."""
    with Scratch("verify") as name:
        folder, rows = Path(name), []
        handed: list[tuple[Spec, str]] = []
        for number, job in jobs.items():
            at = next((at for spec, at in handed if spec == job.spec), "")
            if not at:
                part = folder / str(len(handed))
                part.mkdir()
                at = str(hand_over(job.spec, part))
                handed.append((job.spec, at))
            row = {"check": job.check, "masked": job.masked, "steps": job.steps or steps, "number": number}
            rows.append({"spec": at, "plan": dataclasses.asdict(job.plan), **row})
        (folder / "request.json").write_text(json.dumps({"jobs": rows, "until_failed": until_failed}))
        result = folder / "result.jsonl"
        words = [str(folder / "request.json"), str(result)]
        # The proof needs no speed and no GPU; one thread a rank keeps it light and repeatable. Its process forks them,
        # and so must have no thread beside.
        environ = {**without_place(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **NO_THREADS}
        with _followed(result, list(jobs), take):
            outcome = supervise_as_asked(_starter(words, environ, standby), 1, environ)
        if outcome.exit_code == Requeue.exit_code:
            raise Requeue("the process of the proof was asked to stop")
        if outcome.exit_code in STOPPED:
            raise _failure(outcome)
        return outcome


def cold_words(words: Sequence[str]) -> list[str]:
    """Return the command of a process of a proof of these words, where it is not forked."""
    return [sys.executable, "-m", "paceline.verify.process.worker", *words]


def _starter(words: Sequence[str], environ: dict[str, str], standby: StartsApart | None) -> StartsRank:
    """Return what starts the process of a proof of these words (worker.py)."""
    cold = starter(cold_words(words), environ)

    def start(place: dict[str, str]) -> Process:
        if standby is not None and standby.is_ready():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                return standby.start_apart([PROOF, *words], {**environ, **place})
        return cold(place)

    return start


@contextlib.contextmanager
def _followed(result: Path, indices: Sequence[int], take: TellsResult) -> Iterator[None]:
    """Give `take` every line of a file of results as it is written; all of them have been given at the end.

    `indices` are those of the jobs by their places in the request.
    """
    ended = threading.Event()

    def follow() -> None:
        given, last = 0, False
        while not last:
            last = ended.wait(FOLLOW_SECONDS)
            whole = result.read_text().split("\n")[:-1] if result.exists() else []
            for line in whole[given:]:
                told = json.loads(line)
                take(indices[told["job"]], _result_of(told))
            given = len(whole)

    follower = threading.Thread(target=follow, name="verify-results", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


def _result_of(told: dict[str, Any]) -> Result:
    """Return what a line of a file of results says (worker.py)."""
    return _failure(Outcome(**told["failed"])) if "failed" in told else from_plain(CheckProof, told["result"])


def _crash(what: str, exit_code: int) -> PacelineError:
    """Return the error of a rank whose native code ended it: not a run's, which would go on from a checkpoint."""
    because = "native code ended the process, as gloo does where what ranks send each other does not fit together"
    failure = RankTraceback(f"{what}: {because}", "", "the process's own last words, above, say where")
    failure.exit_code = exit_code
    return failure


def _failure(outcome: Outcome) -> PacelineError:
    """Return the error of a group that ended before its jobs did; a rank's traceback, if it left one, is a note."""
    details = outcome.error or {"what": "a process of the proof ended", "because": "", "try": ""}
    if outcome.exit_code - 128 in CRASHES and not details.get("traceback"):
        return _crash(str(details["what"]), outcome.exit_code)
    named = NeedsWholeWeights if details.get("error") == NeedsWholeWeights.__name__ else PacelineError
    kind = RankTraceback if details.get("traceback") else named
    failure = kind(str(details["what"]), str(details["because"]), str(details["try"]))
    failure.exit_code = outcome.exit_code
    if details.get("traceback"):
        failure.add_note(f"rank {details.get('rank')}:\n{details['traceback']}")
    return failure
