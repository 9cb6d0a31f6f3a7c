"""Ranks that are watched: on one machine, or on nodes that tell a coordinator of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import wait_until
from supervise.pulses.watched_ranks import HEALTH, PATIENT, MakeRanks, Ranks

from paceline.spec.survive.health import HealthSpec
from paceline.supervise.nodes import far, lookout
from paceline.supervise.pulses.pulse import Pulse, stack_path
from paceline.supervise.pulses.sight import NearSight
from paceline.supervise.pulses.system import waits_in_kernel


@pytest.fixture
def sleeper() -> Iterator[int]:
    """Return a process that does nothing, and would for ever."""
    with subprocess.Popen([sys.executable, "-ISc", "import signal; signal.pause()"]) as process:
        wait_until(lambda: "pause" in waits_in_kernel(process.pid))
        yield process.pid
        process.kill()


@pytest.fixture(params=[0, 2], ids=["one machine", "two nodes"])
def make(request: pytest.FixtureRequest, tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch) -> MakeRanks:
    """Return what makes ranks, on one machine or on nodes that tell a coordinator of them."""

    def made(load: float = 1.0, health: HealthSpec = HEALTH) -> Ranks:
        for module in (lookout, far):
            monkeypatch.setattr(module, "programs_per_core", lambda: load)
        return Ranks(tmp_path, sleeper, load=load, nodes=request.param, health=health)

    return made


@pytest.fixture
def patient(make: MakeRanks, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Return ranks of which one that tells nothing counts as hung after half a minute, or after hang_still."""
    ranks = make(health=PATIENT)

    def answer(seen: NearSight, pulse: Pulse, by_signal: bool) -> None:
        if where := ranks.stands_in.get(pulse.rank):
            with stack_path(ranks.folder, pulse.rank).open("a") as file:
                name = ranks.collectives.get(pulse.rank, "all_gather")
                file.write(f'Current thread 0x7f01 (most recent call first):\n  File "{where}", line 3 in {name}\n')

    monkeypatch.setattr(NearSight, "_ask", answer)
    return ranks
