"""Whether a run whose processes have failed goes on: which failures are tried again, how often, and what ends it.

A rank that was killed or stopped from outside, or whose machine was lost, says nothing of the program: that has a
budget of its own. A failure of the program has another, and the same one in the same step is not met a third time. What
would fail again for certain is never tried again: a wrong spec, wrong data, memory that is too small, a proof that
failed, numbers that are none, storage that cannot be written, a stop that was asked for. Nor is an error before the
first step of a call: whoever has changed the program, and waits to see it train, is told at once. What a network, a
disk or a lost peer brings about there says nothing of the program either, nor does a hang where earlier calls of the
run have made steps: that is tried again.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import (
    ConfigError,
    DataError,
    DoesNotFit,
    NumericalStop,
    RankHung,
    RankReplaced,
    Requeue,
    StorageError,
    VerificationFailed,
    WorkerDied,
)
from paceline.spec.journal.kinds import RunStarted, StepRecord
from paceline.spec.journal.reading import last_record, starts_of
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.blame import Outcome
from paceline.supervise.told.generation import JudgedSoFar

INTERRUPTED = 128 + signal.SIGINT
FINAL = {
    *(kind.exit_code for kind in (ConfigError, DoesNotFit, VerificationFailed, DataError, NumericalStop, StorageError)),
    Requeue.exit_code,
    INTERRUPTED,
}
OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
STOPPED = "Tt"  # states of /proc: by a signal, or by a debugger
# Kinds of Python's errors of a network, and the system's numbers of those and of devices that have no kind.
OF_NETWORKS = {"ConnectionError", *(kind.__name__ for kind in ConnectionError.__subclasses__()), "TimeoutError"}
OF_DEVICES = {errno.EIO, errno.ESTALE, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTUNREACH}
TAIL_BYTES = 4 << 20  # of a start's journal: many records, whatever they hold
FRUITLESS = 10  # generations in a row that train no further than those before: kills alone do not do that


@dataclass(frozen=True)
class Reached:
    """How far a run has come, as its journal says: its starts, the last step, and whether the last start made one."""

    starts: int = 0
    step: int = 0
    made: bool = False


@dataclass(frozen=True)
class Ruling:
    """Whether a run goes on after a failure, and why, or why not."""

    goes_on: bool
    because: str


class Judge:
    """Counts the failures of one call against its budgets."""

    def __init__(self, policy: RecoverySpec, reached: Reached, so_far: JudgedSoFar | None = None) -> None:
        """`so_far` is what the coordinator before this one had counted, where that was lost, or has gone."""
        self._policy = policy
        self.so_far = so_far or JudgedSoFar(reached.starts, furthest=reached.step)

    def judge(self, outcome: Outcome, reached: Reached, out_of_memory: bool = False) -> Ruling:
        """Return whether the run goes on after a world ended with `outcome`, having come as far as `reached`."""
        error = outcome.error
        if outcome.exit_code in FINAL or error is None:
            return Ruling(False, "")
        if not (ruling := self.came_further(reached)).goes_on:
            return ruling
        if is_lost(outcome) and not out_of_memory:
            self.so_far = replace(self.so_far, lost=self.so_far.lost + 1)
            return _within(self.so_far.lost, self._policy.preemption_retries, "run.recovery.preemption_retries")
        failure = (place_of(error), reached.step)
        again = failure == self.so_far.last_failure
        self.so_far = replace(self.so_far, last_failure=failure)
        if not self._policy.retries:
            return Ruling(False, "")
        if again:
            return Ruling(False, f"it has failed twice in the step after {reached.step}, at the same place")
        if not self.so_far.has_made_steps and not self._may_pass(error):
            return Ruling(False, "no step was made before it, so the next start would meet it too")
        self.so_far = replace(self.so_far, failed=self.so_far.failed + 1)
        return _within(self.so_far.failed, self._policy.retries, "run.recovery.retries")

    def note_steps(self, reached: Reached) -> None:
        """Note whether this call has made steps: a first rank that begins a journal of its own tells of none there."""
        made = reached.made and reached.starts > self.so_far.starts
        self.so_far = replace(self.so_far, has_made_steps=self.so_far.has_made_steps or made)

    def came_further(self, reached: Reached) -> Ruling:
        """Return whether the run goes on after a world, or a coordinator, was lost: it does while it comes further."""
        self.note_steps(reached)
        so_far = self.so_far
        fruitless = 0 if reached.step > so_far.furthest else so_far.fruitless + 1
        self.so_far = replace(so_far, furthest=max(so_far.furthest, reached.step), fruitless=fruitless)
        if fruitless < FRUITLESS:
            return Ruling(True, "")
        return Ruling(False, f"{FRUITLESS} generations in a row have not come beyond step {self.so_far.furthest}")

    def _may_pass(self, error: Mapping[str, object]) -> bool:
        """Return whether a failure before the first step of this call may be none of the next start."""
        made_before = self.so_far.furthest > 0 and error.get("error") == RankHung.__name__
        return made_before or is_of_surroundings(error)


def _within(count: int, budget: int, option: str) -> Ruling:
    if count > budget:
        return Ruling(False, f"{option} = {budget} is used up" if budget else "")
    return Ruling(True, f"{count} of {option} = {budget}")


def is_lost(outcome: Outcome) -> bool:
    """Return whether a process was ended from outside, as by a scheduler, or replaced: no failure of the program.

    So it is where a signal has stopped it, and its supervisor had to end it.
    """
    error = outcome.error or {}
    if error.get("error") == RankHung.__name__:
        return _state_of(error) in STOPPED
    died = error.get("error") in (WorkerDied.__name__, RankReplaced.__name__)
    return died and outcome.exit_code - 128 not in OWN_SIGNALS


def is_of_surroundings(error: Mapping[str, object]) -> bool:
    """Return whether an error tells of a network, a device, or a peer that nobody has seen to fail."""
    if error.get("cause") is False or error.get("error") in OF_NETWORKS:
        return True
    number = re.match(r"OSError: \[Errno (\d+)\]", str(error.get("what", "")))
    return number is not None and int(number[1]) in OF_DEVICES


def _state_of(hung: Mapping[str, object]) -> str:
    """Return the state of a rank's process that hung, as its watch has seen it; "-" where that is not told."""
    evidence = hung.get("evidence")
    ranks = evidence.get("ranks", ()) if isinstance(evidence, Mapping) else ()
    return next((str(each["state"]) for each in ranks if each["rank"] == hung.get("rank")), "-")


def place_of(error: Mapping[str, object]) -> str:
    """Return where an error struck: the innermost line of its traceback, or what it says."""
    lines = re.findall(r'File "[^"]+", line \d+', str(error.get("traceback", "")))
    return f"{error.get('error', '')} {lines[-1] if lines else error['what']}"


def reached_by(run_dir: Path) -> Reached:
    """Return how far a run has come, from the end of its journal."""
    starts = starts_of(run_dir)
    if not starts:
        return Reached()
    number, path = starts[-1]
    made = last_record(path, StepRecord, TAIL_BYTES)
    known = made or last_record(path, RunStarted, TAIL_BYTES)
    return Reached(number, (known.step or 0) if known is not None else 0, made is not None)
