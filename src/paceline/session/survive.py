"""A run in processes of its own, which survives what happens to them: `train`, `fit` and `Run` have it in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.lock import RunLock
from paceline.run.process.brief import Brief
from paceline.run.process.supervise.blame import Outcome
from paceline.run.process.supervise.generations import Generations
from paceline.run.process.supervise.supervisor import starter
from paceline.spec.journal.redact import Redactor
from paceline.spec.load import Spec

Say = Callable[[str], None]


def survive(
    command: Sequence[str], spec: Spec, brief: Brief, environ: Mapping[str, str], lock: RunLock, say: Say = print
) -> Outcome:
    """Run `command` once per device of the brief's plan, again after a fault that may pass, and return how it ended."""
    generations = Generations(
        starter(command, environ, lock),
        brief.plan.layout.devices,
        lock,
        environ,
        spec.run.recovery,
        say,
        Redactor(spec.run.redact),
    )
    return generations.run()
