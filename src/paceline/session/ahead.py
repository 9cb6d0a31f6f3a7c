"""Processes that import torch while a run, or a proof, is still being planned: what they fork begins at once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from paceline.launch.here import place_here, without_place
from paceline.lock import RunLock
from paceline.spec.load import Spec
from paceline.spec.watch.when import WhenSpec
from paceline.supervise.standby import PROOF, WORKER, Standby

STANDBY = "paceline.session.standby"


@contextlib.contextmanager
def standby_first(spec: Spec) -> Iterator[Standby | None]:
    """Give the standby of a run that this process begins alone, before anything else is done; None for others.

    Its imports take longest of all that a start does. The lock of the run's directory is handed to it (`Standby.hold`).
    """
    if spec.run.nodes.count > 1 or place_here(os.environ) is not None or not _is_wanted(spec):
        yield None
        return
    with contextlib.closing(_standby_of(spec)) as standby:
        yield standby


@contextlib.contextmanager
def standby_ahead(spec: Spec, lock: RunLock, first: Standby | None = None) -> Iterator[Standby | None]:
    """Give the standby of a run that is to have ranks of its own, before the run is planned; None for others.

    The proof's ranks are forked from it too, where the run is to be proven. `first` is one that has begun by now.
    """
    if first is None and not _is_wanted(spec):
        yield None
        return
    with contextlib.closing(first or _standby_of(spec, lock)) as standby:
        if first is not None:
            first.hold(lock)
        yield standby


def _is_wanted(spec: Spec) -> bool:
    policy = spec.run.recovery
    return policy.standby and spec.cluster.devices > 1 and sys.platform == "linux" and spec.run.when == WhenSpec()


def _standby_of(spec: Spec, lock: RunLock | None = None) -> Standby:
    return Standby(STANDBY, PROOF if spec.run.verify else WORKER, os.environ, lock)


@contextlib.contextmanager
def proof_ahead() -> Iterator[Standby | None]:
    """Give a process that forks those of a proof, before it is known what is to be proven; None where none may fork."""
    if sys.platform != "linux":
        yield None
        return
    with contextlib.closing(Standby(STANDBY, PROOF, without_place(os.environ))) as standby:
        yield standby
