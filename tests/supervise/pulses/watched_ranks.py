"""Pulses of ranks that a test writes, and a watch over them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.run.loop.resume import Progress
from paceline.run.loop.training import Training
from paceline.run.survive.points import Points
from paceline.spec.survive.health import HealthSpec
from paceline.spec.survive.phases import PHASES
from paceline.supervise.nodes.far import FarSight
from paceline.supervise.nodes.lookout import Lookout
from paceline.supervise.pulses import watch as watching
from paceline.supervise.pulses.pulse import BEAT, HEAD, SIZE, STEP, pulse_path
from paceline.supervise.pulses.sight import NearSight
from paceline.supervise.pulses.silences import HangLimits
from paceline.supervise.pulses.watch import PulseWatch

HEALTH = HealthSpec(hang_factor=5.0, hang_minimum="2.0 s", hang_elsewhere="60.0 s")
PATIENT = HealthSpec(hang_factor=5.0, hang_minimum="30.0 s", hang_elsewhere="60.0 s")  # and hang_still as it is
STEP_SECONDS = 0.1
LATE = 20.0
MakeRanks = Callable[..., "Ranks"]


class Ranks:
    """Pulses of ranks that this test writes, all of one process that sleeps, and a clock that this test moves.

    With `nodes` so many supervisors look at them, and tell a coordinator what they see.
    """

    def __init__(
        self, folder: Path, process: int, ranks: int = 3, load: float = 1.0, nodes: int = 0, health: HealthSpec = HEALTH
    ) -> None:
        self.folder, self.process, self.ranks, self.now = folder, process, ranks, 100.0
        self.beats, self.nodes = 0, list[Lookout]()
        self.stands_in: dict[int, str] = {}  # by rank, the file of which its main thread is in a function
        self.collectives: dict[int, str] = {}  # and the function's name
        self.told: list[str] = []  # by nodes to their coordinator
        self.early: dict[int, int] = {}  # processes of ranks that have no pulse yet
        if not nodes:
            self.watch = PulseWatch(folder, ranks, health, folder / "run", lambda: load, None, self.early.get)
            return
        limits = HangLimits.of(health)
        self.blocks = [range(ranks)[at::nodes] for at in range(nodes)]  # neighbours stand apart, which must not matter
        self.nodes = [Lookout(NearSight(folder, block, limits, self.early.get), block) for block in self.blocks]
        self.sight = FarSight(self.hear, self.ask)
        self.watch = PulseWatch(folder, ranks, health, folder / "run", self.sight.load, self.sight)

    def hear(self, message: Mapping[str, Any]) -> None:
        for node in self.nodes:
            node.attend(**message)

    def ask(self, ranks: Collection[int], by_signal: bool) -> None:
        for block, node in zip(self.blocks, self.nodes, strict=True):
            node.ask([rank for rank in ranks if rank in block], by_signal)

    def look(self, ended: Collection[int] = (), has_failed: bool = False) -> watching.Suspect | None:
        for number, node in enumerate(self.nodes):
            for message in node.news(ended, self.now):
                self.told.append(json.dumps(message))
                self.sight.told(number, json.loads(self.told[-1]), self.now)
        return self.watch.look(self.now, ended, has_failed)

    def beat(self, rank: int, phase: str, step: int) -> None:
        self.beats += 1
        content = bytearray(SIZE)
        HEAD.pack_into(content, 0, self.process, 0)
        BEAT.pack_into(content, HEAD.size, self.beats, step, PHASES.index(phase), int(self.now * 1e9))
        STEP.pack_into(content, HEAD.size + BEAT.size, step, int(STEP_SECONDS * 1e9))
        pulse_path(self.folder, rank).write_bytes(content)

    def steps(self, count: int = 4) -> None:
        """Take all ranks through some whole steps."""
        for step in range(1, count + 1):
            for rank in range(self.ranks):
                self.beat(rank, "data", step)
            self.pass_by(STEP_SECONDS * 3)

    def pass_by(self, seconds: float, ended: Collection[int] = ()) -> watching.Suspect | None:
        """Let time pass in which the watch looks often; return its first suspect. Ranks that have `ended` did well."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            if (found := self.look(ended)) is not None:
                return found
        return None


class StillWaits(Exception):
    """Nobody has come to the roll call so far."""


def comes_to_step(ranks: Ranks, rank: int) -> None:
    """Have a rank wait for its peers before step 5."""

    def wait(step: int, joins: object, tell_wait: Callable[[], None]) -> None:
        tell_wait()
        raise StillWaits

    points = Points(SimpleNamespace(beat=functools.partial(ranks.beat, rank)), None)  # type: ignore[arg-type]
    calls = SimpleNamespace(come_to_step=wait)
    own = SimpleNamespace(progress=Progress(4, 64), _meets_until=6, _points=points, _roll=calls, evaluate=0, save=0)
    with pytest.raises(StillWaits):
        Training._join_peers(own)  # type: ignore[arg-type]
