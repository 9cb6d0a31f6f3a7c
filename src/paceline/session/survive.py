"""A run in processes of its own, which goes on when a process is lost: `train`, `fit` and `Run` all start runs here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from paceline.errors import ConfigError
from paceline.lock import RunLock
from paceline.said import say_line
from paceline.session.ahead import STANDBY
from paceline.session.replanner import Replanner
from paceline.session.watch.alerting import alerts_beside
from paceline.spec.arguments import run_directory
from paceline.spec.journal.redact import Redactor
from paceline.spec.load import Spec
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.machines import OneMachine
from paceline.supervise.blame import Outcome
from paceline.supervise.logs.aside import printed_aside
from paceline.supervise.logs.pump import pump_of
from paceline.supervise.parent import end_with_step
from paceline.supervise.standby import Standby
from paceline.supervise.starting import Starter
from paceline.supervise.supervisor import starter
from paceline.supervise.told.brief import Brief

Say = Callable[[str], None]
WORKER = "paceline.launch.worker"


@printed_aside()
def survive(
    words: Sequence[str],
    spec: Spec,
    brief: Brief,
    environ: Mapping[str, str],
    lock: RunLock,
    say: Say = say_line,
    standby: Standby | None = None,
) -> Outcome:
    """Run `python WORDS` for each device of the plan, again after a fault that may pass, and return how it ended.

    Ranks are forked from `standby`, where there is one already.
    """
    if spec.run.nodes.count > 1:
        raise ConfigError(
            f"run.nodes.count = {spec.run.nodes.count} for a loop of your own, or `fit`",
            "only `paceline train` has a supervisor on each of several nodes",
            "paceline train, or torchrun or srun around the script",
        )
    end_with_step(os.environ)
    policy = spec.run.recovery
    with (
        alerts_beside(spec, say, supervises=True) as alerts,
        contextlib.closing(Replanner(spec, say)) as replanner,
    ):
        generations = Generations(
            OneMachine(starter_of(words, environ, spec, say, lock, standby), environ),
            brief,
            lock,
            policy,
            say,
            Redactor(spec.run.redact),
            replanner,
            spec.run.health,
            alerts.tell,
            spec.run,
        )
        alerts.outcome = generations.run()
    return alerts.outcome


def starter_of(
    words: Sequence[str],
    environ: Mapping[str, str],
    spec: Spec,
    say: Say,
    lock: RunLock | None = None,
    standby: Standby | None = None,
) -> Starter:
    """Return what starts `python WORDS` as a rank: forked from a standby where the policy wants one and one can be."""
    because, policy = "", spec.run.recovery
    again: Callable[[], Standby] | None = None
    if policy.standby:
        work, because = forkable(words)
        unbuffered = {"PYTHONUNBUFFERED": "1"} if words[:1] == ["-u"] else {}
        if work:

            def another() -> Standby:
                made = Standby(STANDBY, work[0], {**environ, **unbuffered}, lock)
                made.forks(work, environ)
                return made

            again = another
            standby = standby or another()
            standby.forks(work, environ)
    logs = pump_of(run_directory(spec), spec.run)
    return Starter(starter([sys.executable, *words], environ, lock), standby, say, because, logs, again)


def forkable(words: Sequence[str]) -> tuple[list[str], str]:
    """Return what a standby's ranks do in the place of `python WORDS`, and why none can, one of them empty."""
    if list(words[:2]) == ["-m", WORKER]:
        return ["worker", *words[2:]], ""
    if sys.platform != "linux":
        return [], "forking a process that has imported torch is tried on Linux alone"
    if list(words[:1]) == ["-u"]:  # as torchrun says it
        return forkable(words[1:])
    if not words or words[0].startswith("-"):
        return [], f"the script was started with options of the interpreter ({' '.join(words[:2])})"
    return ["script", *words], ""
