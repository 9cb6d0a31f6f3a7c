"""A machine's clock may be set at any moment, between any two looks at it: what a run took stays what passed."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.account.ledger import ledger_of
from paceline.observe.live.run import LiveRun
from paceline.report.summary import summarise
from paceline.run.loop.resume import Progress
from paceline.run.loop.step import StepStats
from paceline.run.observe.node import SamplesOfFirst
from paceline.run.record.journal import Journal
from paceline.run.record.recorder import Recorder
from paceline.spec.arguments import make_spec
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import DecisionRecord, RecoveryRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.record import now, read
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.journal.timing.held_devices import held_in
from paceline.spec.journal.watching import NodeSample
from paceline.spec.layout import Layout
from paceline.supervise.again.mark_journal import mark_end, mark_fault
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

KILLED = {"what": "rank 0 was killed", "because": "by somebody"}
DECISIONS = [DecisionRecord("plan", None, "a", "because", None, time=1.0)]
# No few of them come to nothing: set there and back between two looks, a clock leaves a record that seems old.
DAYS = (86_400.0, -259_300.0, 3_600.0, -50.0, 40.0, 172_700.0)


class SetClock:
    """`time.time`, set by so many seconds just before certain looks at it, which are counted from 0."""

    def __init__(self, moves: Mapping[int, float]) -> None:
        self._moves, self._real, self.apart, self.looks = moves, time.time, 0.0, 0

    def __call__(self) -> float:
        self.apart += self._moves.get(self.looks, 0.0)
        self.looks += 1
        return self._real() + self.apart


@pytest.fixture(scope="module")
def spec() -> Any:
    made = make_spec(decoder_task(stop=Amount(9, "steps")), cluster=ClusterSpec(learn=False), run={"verify": False})
    return dataclasses.replace(made, path=None)


def recorder(run_dir: Path, spec: Any) -> Recorder:
    plan = plan_of(Layout(dp_replicate=2), 8)
    known = PlannedRecord(decisions=tuple(DECISIONS))
    brief = Brief(plan, 9, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, known)
    journal = Journal(run_dir)
    world: Any = SimpleNamespace(size=2, rank=0, switched=(), is_first=True)
    meter: Any = SimpleNamespace(peak_bytes=lambda: 1)
    return Recorder(run_dir, journal.attempt, spec, brief, world, meter, [journal])


def start(record: Recorder, step: int) -> None:
    record.started(Progress(step, 4 * step), None, None, passed_seconds() - 0.001, goes_on=step > 0)


def make_step(record: Recorder, step: int) -> None:
    record.step(StepStats(step, 4 * step - 4, 4 * step, 1.0, 4.0, 1.0, 0.1, {"total": 1e-4}, True, False), None, None)


def told_run(run_dir: Path, spec: Any) -> None:
    """Write a run of four starts: two worlds whose first rank dies, one that is killed at its end, and a whole one."""
    samples = SamplesOfFirst()
    first = recorder(run_dir, spec)
    start(first, 0)
    samples(read(NodeSample, {"node": "one"}))
    for step in (1, 2):
        make_step(first, step)
    first.nodes(samples.taken())
    first.decided_before([now(each) for each in (DECISIONS[0], DECISIONS[0])])  # made first, and written then
    mark_fault(run_dir, dict(KILLED))
    second = recorder(run_dir, spec)
    start(second, 2)
    make_step(second, 3)
    second.recovered(read(RecoveryRecord, {"seconds": {"total": 1e-3, "step": 1e-4}, "time": time.time()}))
    mark_fault(run_dir, dict(KILLED))
    recorder(run_dir, spec)  # killed before its first record, which a supervisor puts the fault of on record
    mark_end(run_dir, 5, dict(KILLED))
    last = recorder(run_dir, spec)
    start(last, 3)
    make_step(last, 4)
    last.ended("complete", 4, 0.1)


def readings(run_dir: Path) -> dict[str, float]:
    """Return what each reader of a journal says that the run took, in seconds or device-seconds."""
    lines = list(read_journal(run_dir))
    summary, live = summarise(lines), LiveRun(run_dir)
    live.refresh()
    held = held_in(run_dir)
    return {
        "wall": summary.goodput.wall_seconds,
        "from the first to the last": summary.wall_seconds,
        "held": sum(each.seconds for each in held),
        "ledger": sum(each.device_seconds for each in ledger_of(lines, "run")),
        "live": sum(phase.seconds for phase in live.phases()),
    }


def holds(run_dir: Path, spec: Any, monkeypatch: pytest.MonkeyPatch, moves: Mapping[int, float]) -> None:
    """Hold what a run says that it took, which is a moment, where its clock was set in it."""
    clock = SetClock(moves)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", clock)
        began = time.monotonic()
        told_run(run_dir, spec)
        most = 2 * (time.monotonic() - began) + 5.0
    wrong = {what: seconds for what, seconds in readings(run_dir).items() if not 0.0 <= seconds < most}
    assert not wrong, f"the clock was set by {dict(moves)} at these of {clock.looks} looks"


@pytest.fixture
def looks(tmp_path: Path, spec: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a run looks at the clock."""
    clock = SetClock({})
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", clock)
        told_run(tmp_path / "counted", spec)
    assert clock.looks > 30
    return clock.looks


@pytest.mark.parametrize("by", [86_400.0, -86_400.0, 40.0])
def test_a_clock_that_is_set_before_any_one_look_at_it(
    tmp_path: Path, spec: Any, monkeypatch: pytest.MonkeyPatch, looks: int, by: float
) -> None:
    holds(tmp_path / "calm", spec, monkeypatch, {})
    for at in range(1, looks):
        holds(tmp_path / str(at), spec, monkeypatch, {at: by})


@pytest.mark.parametrize("tried", [40, pytest.param(1000, marks=pytest.mark.deep)])
def test_a_clock_that_is_set_twice_or_more(
    tmp_path: Path, spec: Any, monkeypatch: pytest.MonkeyPatch, looks: int, tried: int
) -> None:
    """Twice within a few looks, there and back too, so that one record is made by a clock that no other knew."""
    drawn = random.Random(7)
    near = [{at: 86_400.0, at + after: by} for at in range(1, looks) for after in (1, 2) for by in (3_600.0, -86_400.0)]
    often = [{at: drawn.choice(DAYS) for at in drawn.sample(range(1, looks), count)} for count in (2, 5, 12) * 25]
    every = [*near, *often]
    for number, moves in enumerate(drawn.sample(every, min(tried, len(every)))):
        holds(tmp_path / str(number), spec, monkeypatch, moves)
