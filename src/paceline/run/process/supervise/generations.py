"""Generations: a run's worlds one after the other, each with what the one before has left, until one ends for good.

Each has a number that only grows, a rendezvous and a folder of its own, and the fence of the run's directory: whatever
is left of an older one can neither meet the newer one's ranks nor publish anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import Requeue, RunInUse
from paceline.lock import RunLock
from paceline.patience import Patience
from paceline.run.process.generation import FIRST, RESTARTED, Generation
from paceline.run.process.supervise import supervisor
from paceline.run.process.supervise.blame import Ending, Outcome, cause_is_known, outcome_of
from paceline.run.process.supervise.crew import Crew, watch
from paceline.run.process.supervise.groups import collect
from paceline.run.process.supervise.judge import Judge, reached_by
from paceline.run.process.supervise.memory_kills import memory_kills
from paceline.run.process.supervise.signals import forward_signals
from paceline.run.process.supervise.starting import Starter
from paceline.run.process.supervise.supervisor import places
from paceline.run.record.journal import mark_fault
from paceline.run.survive.health.watch import PulseWatch
from paceline.spec.journal.redact import Redactor
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.recovery import RecoverySpec

PEERS_SECONDS = 1.0  # that the peers of a rank have whose failure is known: what they would tell is an echo of it


@dataclasses.dataclass(frozen=True)
class Fallen:
    """A world that has failed: how it ended, and between which moments its first rank did."""

    outcome: Outcome
    moments: Mapping[str, float]
    out_of_memory: bool


class Generations:
    """The worlds of one run, on this machine."""

    def __init__(
        self,
        starter: Starter,
        ranks: int,
        lock: RunLock,
        environ: Mapping[str, str],
        policy: RecoverySpec,
        say: Callable[[str], None] = print,
        redactor: Redactor | None = None,
        health: HealthSpec | None = None,
    ) -> None:
        self._starter, self._ranks, self._lock, self._environ = starter, ranks, lock, environ
        self._policy, self._say, self._redactor = policy, say, redactor
        self._health, self._crew = health, Crew()

    def run(self) -> Outcome:
        """Run one generation after the other and return how the last one ended."""
        judge = Judge(self._policy, reached_by(self._lock.run_dir))
        generation = Generation(to_world=self._ranks, rung=FIRST)
        flag = forward_signals(lambda number: self._crew.send(number))
        try:
            with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
                while True:
                    rung = self._starter.rung()
                    if generation.rung != FIRST:
                        generation = dataclasses.replace(generation, rung=rung)
                    if flag.because:  # while no rank was there that could be told
                        return Outcome(Requeue.exit_code)
                    fallen = self._one(generation, Path(folder) / f"generation-{generation.number}")
                    outcome = fallen.outcome
                    if outcome.error is None or flag.because or self._lock.is_lost:
                        return outcome
                    reached = reached_by(self._lock.run_dir)
                    verdict = judge.judge(outcome, reached, fallen.out_of_memory)
                    if not verdict.goes_on:
                        return _and(outcome, verdict.because)
                    following = self._after(generation, fallen, reached.step)
                    if following is None:
                        return outcome
                    generation = following
                    self._say(f"recover  {_told(outcome.error)}")
                    self._say(f"recover  generation {generation.number} starts ({verdict.because})")
        finally:
            self._starter.close()
            flag.release()

    def _one(self, generation: Generation, folder: Path) -> Fallen:
        """Run one world in new processes and return how it ended. None of them runs afterwards."""
        folder.mkdir()
        kills = memory_kills()
        self._crew = crew = Crew()
        decisions = self._starter.decisions()
        pulses = PulseWatch.of(self._health, folder, self._ranks, self._lock.run_dir)
        told = dataclasses.replace(generation, decisions=(*generation.decisions, *decisions)).write(folder)
        try:
            for place in places(folder, self._ranks, self._environ):
                crew.processes.append(self._starter({**place, **told, **(pulses.for_ranks() if pulses else {})}))
            watch(crew, Patience(float("inf")), supervisor.GRACE_SECONDS, self._is_known(folder), pulses)
            noticed = time.time()
            while not crew.is_over:
                crew.kill()
                crew.look()
            outcome = outcome_of(crew.ended(), crew.killed, folder, kills)
        finally:
            collect(crew.processes)
        moments = {"fault": _fault_moment(crew.ended()), "noticed": noticed, "ended": time.time()}
        return Fallen(outcome, moments, kills is not None and (memory_kills() or 0) > kills)

    def _is_known(self, folder: Path) -> Callable[[], bool]:
        """Return what says whether it is known which rank failed first, and its peers have had a moment."""
        if not self._policy.may_go_on:
            return lambda: False
        crew, since = self._crew, Patience(float("inf"))

        def known() -> bool:
            nonlocal since
            if since.left_seconds() == float("inf") and cause_is_known(crew.ended(), folder):
                since = Patience(PEERS_SECONDS)
            return since.is_over

        return known

    def _after(self, before: Generation, fallen: Fallen, step: int) -> Generation | None:
        """Return the generation that follows a fallen one, its fault on record; None where the run is another's."""
        error: dict[str, Any] = dict(fallen.outcome.error or {})
        with contextlib.suppress(OSError):  # a full disk is told by whoever writes next
            mark_fault(self._lock.run_dir, error, self._redactor)
        try:
            number = self._lock.next_generation()
        except RunInUse:
            return None
        return Generation(
            number=number,
            rung=RESTARTED,
            from_world=before.to_world,
            to_world=self._ranks,
            reached=step,
            fault={name: error.get(name) for name in ("what", "because", "rank")},
            moments=fallen.moments,
        )


def _fault_moment(endings: list[Ending]) -> float:
    """Return when the first of the processes that ended badly was last seen to be well."""
    return min((ending.after for ending in endings if ending.code), default=time.time())


def _and(outcome: Outcome, because: str) -> Outcome:
    """Return an outcome that also says why the run does not go on."""
    if not because or outcome.error is None:
        return outcome
    known = str(outcome.error["because"])
    error = {**outcome.error, "because": f"{known}; {because}" if known else because}
    return Outcome(outcome.exit_code, error)


def _told(error: Mapping[str, object]) -> str:
    """Return a fault that is survived in one line."""
    rank = f" (rank {error['rank']})" if "rank" in error and f"rank {error['rank']}" not in str(error["what"]) else ""
    return f"{error['what']}{rank}" + (f": {error['because']}" if error["because"] else "")
