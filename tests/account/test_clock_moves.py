"""What a run cost does not depend on its machines' clocks: set forward or back, in a start or between two."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.account.ledger import ledger_of
from paceline.observe.live.run import LiveRun
from paceline.observe.live.spent import spent_so_far
from paceline.run.record import journal as journal_writer
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import ClockRecord, DecisionRecord
from paceline.spec.journal.reading import read_journal, read_kind
from paceline.spec.journal.record import read
from paceline.spec.journal.timing.clock import MovedClock
from paceline.spec.journal.timing.held_devices import held_in

START = 1_772_323_200.0
Record = dict[str, Any]
CLUSTER = {"device": {"name": "h100-sxm"}, "price_usd_per_device_hour": {"value": 3.6}}


class Storm:
    """Writes a run on machines whose clock is set now and then: the same run, whatever the clock shows."""

    def __init__(self, seed: int, has_moves: bool) -> None:
        self.draw, self.moves = random.Random(seed), random.Random(seed + 1)
        self.has_moves, self.now, self.apart = has_moves, START, 0.0
        self.lines: list[Record] = []
        self.attempt, self.step, self.devices = 0, 0, 2
        self.begin()

    @property
    def shown(self) -> float:
        return self.now + self.apart

    def move(self) -> None:
        """Perhaps set the clock."""
        if self.has_moves and self.moves.random() < 0.15:
            self.apart += self.moves.choice((-1, 1)) * 10 ** self.moves.uniform(0.7, 6)

    def begin(self) -> None:
        self.attempt, self.devices = self.attempt + 1, self.draw.choice((1, 2, 3, 8))
        self.clock = MovedClock(lambda: self.shown, lambda: self.now)
        self.add("run_started", world_size=self.devices, step=self.step, cluster=CLUSTER, spec={}, forecast={})

    def add(self, kind: str, **fields: Any) -> None:
        if moved := self.clock.moved():
            self.lines.append({"kind": "clock", "attempt": self.attempt, "time": self.shown, "moved": moved})
        self.lines.append({"kind": kind, "attempt": self.attempt, "time": self.shown, **fields})

    def go_on(self) -> None:
        """Make a step, and perhaps a save, a fault that the run survives, or a new start."""
        self.move()
        seconds = self.draw.uniform(5.0, 60.0)
        self.now, self.step = self.now + seconds, self.step + 1
        self.add("step", step=self.step, seconds={"total": seconds, "data": 0.1 * seconds}, loss=1.0, weight=1.0)
        chance = self.draw.random()
        if chance < 0.2:
            self.now += 3.0
            self.add("checkpoint", step=self.step, seconds=3.0, stall_seconds=2.0, path="x", bytes=1)
        elif chance < 0.3:
            before, self.devices = self.devices, self.draw.choice((1, 2, 3, 8))
            self.move()
            self.now += 50.0
            self.add("recovery", rung="reform", because="killed", from_world=before, to_world=self.devices,
                     step=self.step, steps_lost=0, seconds={"total": 50.0, "step": 9.0})  # fmt: skip
        elif chance < 0.36:
            if self.draw.random() < 0.5:
                self.lines.pop()  # killed before it was written
                while self.lines[-1]["kind"] == "clock":
                    self.lines.pop()
            self.now += 100.0
            self.move()
            self.begin()


def stormy(seed: int, has_moves: bool, steps: int = 60) -> list[Record]:
    storm = Storm(seed, has_moves)
    for _ in range(steps):
        storm.go_on()
    return storm.lines


def totals(lines: list[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for entry in ledger_of(lines, "run"):
        found[entry.kind] = found.get(entry.kind, 0.0) + entry.device_seconds
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
@example(84908)
def test_device_time_is_what_passed_whatever_the_clock_showed(seed: int) -> None:
    true, told = totals(stormy(seed, has_moves=False)), totals(stormy(seed, has_moves=True))
    assert sum(told.values()) == pytest.approx(sum(true.values()), rel=0.01)
    for kind in true:
        assert told[kind] == pytest.approx(true[kind], rel=0.01, abs=0.01 * sum(true.values())), kind


def written(folder: Path, lines: list[Record]) -> Path:
    (folder / "journal").mkdir(parents=True)
    for attempt in {line["attempt"] for line in lines}:
        own = [line for line in lines if line["attempt"] == attempt]
        (folder / "journal" / f"{attempt:04d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in own))
    return folder


@pytest.mark.parametrize("seed", range(6))
def test_budgets_and_the_live_page_count_as_the_ledger_does(tmp_path: Path, seed: int) -> None:
    true = sum(totals(stormy(seed, has_moves=False)).values())
    run_dir = written(tmp_path / "run", stormy(seed, has_moves=True))
    assert sum(each.seconds * each.devices for each in held_in(run_dir)) == pytest.approx(true, rel=0.01)
    live = LiveRun(run_dir)
    live.refresh()
    hours = {each.name: each.spent for each in spent_so_far(live)}["device_hours"]
    assert hours * 3600 == pytest.approx(true, rel=0.01)


def test_a_journal_that_notes_no_moves_is_mended_where_steps_show_that_the_clock_was_set_back() -> None:
    lines = [{"kind": "run_started", "attempt": 1, "time": START, "world_size": 2, "cluster": CLUSTER, "spec": {}}]
    lines += [{"kind": "step", "attempt": 1, "step": step, "seconds": {"total": 10.0},
               "time": START + 10.0 * step - (7200.0 if step > 5 else 0.0)} for step in range(1, 11)]  # fmt: skip
    assert sum(totals(lines).values()) == pytest.approx(2 * 100.0)


def test_the_journal_notes_when_its_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [START]
    monkeypatch.setattr(journal_writer, "MovedClock", lambda: MovedClock(lambda: shown[0], lambda: 0.0))
    journal = Journal(tmp_path)
    for moved in (0.5, 3600.0, 0.0, -7200.0):
        shown[0] += moved
        journal.write(read(DecisionRecord, {"what": "x", "time": shown[0]}))
    journal.close()
    assert [each.moved for each in read_kind(tmp_path, ClockRecord)] == [3600.5, -7200.0]
    assert [line["kind"] for line in read_journal(tmp_path)] == [
        "decision", "clock", "decision", "decision", "clock", "decision",
    ]  # fmt: skip
