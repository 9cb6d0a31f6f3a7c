"""Processes that import torch while a run, or a proof, is still being planned: what they fork begins at once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from paceline.launch.here import without_place
from paceline.lock import RunLock
from paceline.spec.load import Spec
from paceline.spec.watch.when import WhenSpec
from paceline.supervise.standby import PROOF, WORKER, Standby

STANDBY = "paceline.session.standby"


@contextlib.contextmanager
def standby_ahead(spec: Spec, lock: RunLock) -> Iterator[Standby | None]:
    """Give the standby of a run that is to have ranks of its own, before the run is planned; None for others.

    The proof's ranks are forked from it too, where the run is to be proven.
    """
    is_wanted = spec.run.recovery.standby and spec.cluster.devices > 1 and sys.platform == "linux"
    if not is_wanted or spec.run.when != WhenSpec():
        yield None
        return
    with contextlib.closing(Standby(STANDBY, PROOF if spec.run.verify else WORKER, os.environ, lock)) as standby:
        yield standby


@contextlib.contextmanager
def proof_ahead() -> Iterator[Standby | None]:
    """Give a process that forks those of a proof, before it is known what is to be proven; None where none may fork."""
    if sys.platform != "linux":
        yield None
        return
    with contextlib.closing(Standby(STANDBY, PROOF, without_place(os.environ))) as standby:
        yield standby
