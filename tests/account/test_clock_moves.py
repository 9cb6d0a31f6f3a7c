"""What a run cost does not depend on its machines' clocks: set forward or back, in a start or between two."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.account.ledger import ledger_of
from paceline.observe.live.run import LiveRun
from paceline.observe.live.spent import spent_so_far
from paceline.report.summary import summarise
from paceline.run.record import journal as journal_writer
from paceline.run.record.journal import Journal
from paceline.run.survive.recovered import Recovered
from paceline.spec.journal.kinds import ClockRecord, DecisionRecord
from paceline.spec.journal.reading import read_journal, read_kind
from paceline.spec.journal.record import read
from paceline.spec.journal.timing.clock import MovedClock, RunMoments, clock_here, passed_here, passed_seconds
from paceline.spec.journal.timing.held_devices import held_in
from paceline.supervise.again.mark_journal import mark_fault
from paceline.supervise.crew import Crew
from paceline.supervise.ranks_lost import RanksLost
from paceline.supervise.told.generation import Generation

START = 1_772_323_200.0
Record = dict[str, Any]
CLUSTER = {"device": {"name": "h100-sxm"}, "price_usd_per_device_hour": {"value": 3.6}}


class Storm:
    """Writes a run on machines whose clock is set now and then: the same run, whatever the clock shows."""

    def __init__(self, seed: int, has_moves: bool, has_boot: bool = False) -> None:
        self.has_boot = has_boot
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
        told = {"boot": "3f1c", "clock_apart": self.shown - self.now} if self.has_boot else {}
        self.add("run_started", world_size=self.devices, step=self.step, cluster=CLUSTER, spec={}, forecast={}, **told)

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


def stormy(seed: int, has_moves: bool, steps: int = 60, has_boot: bool = False) -> list[Record]:
    storm = Storm(seed, has_moves, has_boot)
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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_goodput_is_the_same_where_starts_tell_how_the_clock_stood(seed: int) -> None:
    """Between two starts nobody notes that the clock is set, since who notes it has died: forward it was idle time."""
    true = summarise(stormy(seed, has_moves=False, has_boot=True)).goodput
    told = summarise(stormy(seed, has_moves=True, has_boot=True)).goodput
    for kind in ("wall", "useful", "lost", "recovery", "stall", "other"):
        seconds = getattr(true, f"{kind}_seconds")
        assert getattr(told, f"{kind}_seconds") == pytest.approx(seconds, abs=0.01 * true.wall_seconds), kind


def test_starts_of_two_boots_are_not_compared_by_their_clocks() -> None:
    first = {"kind": "run_started", "attempt": 1, "time": START, "boot": "one", "clock_apart": 100.0}
    second = {**first, "attempt": 2, "time": START + 500.0, "boot": "two", "clock_apart": 5000.0}
    steps = [{"kind": "step", "attempt": 1, "step": 1, "time": START + 10.0, "seconds": {"total": 10.0}}]
    assert summarise([first, *steps, second]).goodput.wall_seconds == pytest.approx(500.0)
    second["boot"] = "one"  # then the clock was set forward by 4,900 s, which is more than what lies between them
    assert summarise([first, *steps, second]).goodput.wall_seconds < 20.0


def test_what_a_recovery_took_is_what_passed_though_the_clock_is_set_as_the_first_rank_dies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Set forward by three days in the death of rank 0, the run had recovered for three days, at its devices' price."""
    real, moved = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + moved[0])
    for at_death, later in ((259_200.0, 0.0), (-259_200.0, 0.0), (0.0, 7200.0), (259_200.0, -90_000.0)):
        left = passed_seconds()
        clock, moments = clock_here(), {"fault": left - 2.0, "noticed": left - 1.5, "ended": left - 1.0}
        moved[0] += at_death
        recovered = Recovered(
            Generation(2, "restart", 2, 2, 7, fault={"what": "rank 0 was killed"}, moments=moments, clock=clock)
        )
        moved[0] += later
        recovered.built(None)
        record = recovered.stepped()
        assert record is not None
        parts = [record.seconds[part] for part in ("detect", "end", "start", "restore", "step")]
        assert parts[:2] == pytest.approx([0.5, 0.5]) and 1.0 <= parts[2] < 60.0 and max(parts[3:]) < 60.0
        assert record.seconds["total"] == pytest.approx(sum(parts))


def test_moments_of_another_machine_are_told_by_the_clocks_of_both() -> None:
    here = clock_here()
    assert passed_here({"fault": 7.0}, here | {"apart": here["apart"] + 500.0}) == {"fault": 7.0}, "it was set here"
    there = {"boot": "another", "apart": here["apart"] + 500.0}  # a machine that has run for 500 s less
    assert passed_here({"fault": 7.0}, there)["fault"] == pytest.approx(507.0, abs=1.0)
    assert passed_here({}, {}) == {}


class Process:
    """One that ends when a test says so."""

    code: int | None = None
    returncode, is_child = None, False

    def poll(self) -> int | None:
        return self.code


def test_when_a_rank_ended_is_told_by_the_clock_that_holds_then(monkeypatch: pytest.MonkeyPatch) -> None:
    real, moved = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + moved[0])
    processes: Any = [Process(), Process()]
    lost: list[RanksLost] = []
    crew = Crew(processes, lost.append)
    processes[0].code = 1
    crew.look()
    moved[0] = 86_400.0
    processes[1].code = 1
    crew.look()
    first, second = crew.ended()
    assert first.after <= first.by <= second.by and second.by - first.after < 60.0
    assert abs(second.by - passed_seconds()) < 60.0
    assert 86_340.0 < lost[1].time - lost[0].time < 86_460.0 and abs(lost[1].time - time.time()) < 60.0


@pytest.mark.parametrize("moved", [86_400.0, -86_400.0])
def test_a_start_without_a_first_record_breaks_no_chain_of_clocks(tmp_path: Path, moved: float) -> None:
    """Its ranks died before the record; a supervisor has told of that, by a clock that was set before or after."""
    first: Record = {"kind": "run_started", "attempt": 1, "time": START, "boot": "one", "clock_apart": 100.0,
                     "began": START - 1.0, "world_size": 2, "cluster": CLUSTER, "spec": {}}  # fmt: skip
    step: Record = {"kind": "step", "attempt": 1, "step": 1, "time": START + 10.0, "seconds": {"total": 10.0}}
    for set_before in (True, False):
        by = moved if set_before else 0.0
        fault = {"kind": "fault", "attempt": 2, "time": START + 12.0 + by, "what": "rank 0 was killed"}
        third = {**first, "attempt": 3, "time": START + 20.0 + moved, "began": START + 19.0 + moved,
                 "clock_apart": 100.0 + moved}  # fmt: skip
        lines = [first, step, fault, third, {**step, "attempt": 3, "step": 2, "time": START + 30.0 + moved}]
        assert summarise(lines).goodput.wall_seconds == pytest.approx(30.0, abs=3.0)
        held = held_in(written(tmp_path / str(set_before), lines))
        assert sum(each.seconds for each in held) == pytest.approx(22.0, abs=3.0)


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


def test_a_clock_that_is_set_before_a_start_is_on_record_is_not_taken_out_twice(tmp_path: Path) -> None:
    """A decision about memory may come before that record: what the start says of its clock is of after the move."""
    first = [
        {"kind": "decision", "attempt": 1, "time": START},
        {"kind": "clock", "attempt": 1, "time": START + 86_400.0, "moved": 86_400.0},
        {"kind": "run_started", "attempt": 1, "time": START + 86_402.0, "began": START + 86_399.0, "boot": "one",
         "clock_apart": 86_500.0, "world_size": 2, "cluster": CLUSTER, "spec": {}},
        {"kind": "step", "attempt": 1, "step": 1, "time": START + 86_412.0, "seconds": {"total": 10.0}},
    ]  # fmt: skip
    second = {**first[2], "attempt": 2, "time": START + 86_420.0, "began": START + 86_415.0}
    lines = [*first, second, {**first[3], "attempt": 2, "step": 2, "time": START + 86_430.0}]
    assert summarise(lines).goodput.wall_seconds == pytest.approx(30.0, abs=0.01)
    held = held_in(written(tmp_path / "run", lines))
    assert sum(each.seconds for each in held) == pytest.approx(28.0, abs=0.01)
    assert all(each.ended - each.began < 60 for each in held)


def test_the_journal_notes_when_its_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [START]
    monkeypatch.setattr(journal_writer, "MovedClock", lambda: MovedClock(lambda: shown[0], lambda: 0.0))
    journal = Journal(tmp_path)
    for moved in (0.5, 3600.0, 0.0, -7200.0):
        shown[0] += moved
        journal.write(read(DecisionRecord, {"what": "x", "time": shown[0]}))
    journal.close()
    assert [each.moved for each in read_kind(tmp_path, ClockRecord)] == [3600.5, -7200.0]


@pytest.mark.parametrize("moved", [86_400.0, -86_400.0])
def test_a_record_that_was_made_before_the_clock_was_set_stands_before_the_note_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: float
) -> None:
    """A record has its moment when it is made, and is written a little later."""
    shown = [START]
    monkeypatch.setattr(journal_writer.time, "time", lambda: shown[0])
    monkeypatch.setattr(journal_writer, "MovedClock", lambda: MovedClock(lambda: shown[0], lambda: 0.0))
    journal = Journal(tmp_path)
    records = [read(DecisionRecord, {"what": what, "time": START + at}) for what, at in (("one", 0.0), ("two", moved))]
    shown[0] += moved
    for record in records:
        journal.write(record)
    journal.close()
    clock = RunMoments()
    lines = list(read_journal(tmp_path))
    assert [line["kind"] for line in lines] == ["decision", "clock", "decision"]
    assert [clock.of(1, line) for line in lines] == [START, START, START]


@pytest.mark.parametrize("moved", [0.0, 172_800.0, -172_800.0])
def test_a_fault_that_a_supervisor_puts_on_record_follows_a_note_of_how_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: float
) -> None:
    """Who would have noted it has died, and what it wrote is told by the clock as it was."""
    real, now, here = time.time, [0.0], clock_here()
    monkeypatch.setattr(time, "time", lambda: real() + now[0])
    lines = [{"kind": "run_started", "attempt": 1, "time": real(), "boot": here["boot"], "clock_apart": here["apart"]}]
    run_dir = written(tmp_path / "run", lines)
    now[0] = moved
    for _ in range(2):
        mark_fault(run_dir, {"what": "rank 0 was killed", "because": "by somebody"})
    kinds = [line["kind"] for line in read_journal(run_dir)]
    assert kinds == ["run_started", *["clock"] * bool(moved), "fault", "fault"]
    clock = RunMoments()
    moments = [clock.of(1, line) for line in read_journal(run_dir)]
    assert all(moment is not None and abs(moment - real()) < 60 for moment in moments)
