"""Each rule of alerts: fired once by what it is for, over when that is over, and silent on a healthy run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from observe.alerts.alert_journals import BEGAN, STEP_SECONDS, Watched, healthy, ranks, started, steady, step

from paceline.errors import ConfigError
from paceline.observe.alerts import watch as watches
from paceline.observe.alerts.rules.rule import AlertRule
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.run.record import journal as journals
from paceline.run.record.journal import Journal
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    FaultRecord,
    RanksRecord,
    RecoveryRecord,
    RunEnded,
    RunStarted,
)
from paceline.spec.journal.record import Record
from paceline.spec.journal.timing.clock import MovedClock, clock_here
from paceline.spec.journal.watching import AlertRecord, NodeSample
from paceline.spec.survive.budget import BUDGETS
from paceline.spec.watch.alerts import RULES, AlertsSpec
from paceline.spec.watch.traced import requested_trace
from paceline.supervise.ranks_lost import RanksLost


def told(records: Sequence[AlertRecord]) -> list[tuple[str, str]]:
    return [(record.rule, record.state) for record in records]


def test_every_rule_that_is_told_of_is_looked_at(tmp_path: Path) -> None:
    assert sorted(rule.name for rule in Watched(tmp_path).rules) == sorted(RULES)
    kinds = {kind.name for kind in AlertRule.__subclasses__()}
    assert kinds == set(RULES)


def test_a_healthy_run_of_1000_steps_wakes_nobody(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert told(watched.through(healthy())) == [("finished", "firing")]
    assert watched.said == [], "an end as planned is on record, and not shouted"


def test_a_rule_that_fails_is_said_and_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that ends with one rule's error wakes nobody any more, and nobody is told."""
    watched = Watched(tmp_path)
    broken = {rule.name: rule for rule in watched.rules}

    def fails(*given: object) -> None:
        raise OverflowError("intermediate overflow in fsum")

    monkeypatch.setattr(broken["plateau"], "add", fails)
    monkeypatch.setattr(broken["spike"], "look", fails)
    assert told(watched.through(healthy())) == [("finished", "firing")]
    assert len(watched.said) == 2, "each once"
    assert all("fails and is looked at no more: OverflowError" in line for line in watched.said)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_noise_of_the_loss_is_no_trouble(tmp_path: Path, noise: float) -> None:
    records = [record for record in healthy(noise=noise) if not isinstance(record, RunEnded)]
    assert told(Watched(tmp_path).through(iter(records))) == []


def test_no_step_for_three_medians(tmp_path: Path) -> None:
    watched = Watched(tmp_path, AlertsSpec(no_step_minimum="1 s"))
    records = steady(20)
    assert watched.take(*records, after=2.9 * STEP_SECONDS) == []
    (fired,) = watched.take(after=(20 + 3.1) * STEP_SECONDS)
    assert (fired.rule, fired.severity, fired.state, fired.step) == ("no_step", "critical", "firing", 20)
    assert fired.evidence["limit_seconds"] == pytest.approx(3 * STEP_SECONDS)
    assert told(watched.take(step(21, BEGAN + 100.0))) == [("no_step", "resolved")]


def test_a_short_step_has_a_minimum_and_an_evaluation_a_limit_of_its_own(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.take(*steady(20), after=9.9) == [], "the default minimum, of a run that has made few steps"
    assert told(watched.take(after=20 * STEP_SECONDS + 10.1)) == [("no_step", "firing")]
    other = Watched(tmp_path)
    records = [started(), *(step(each, BEGAN + each) for each in range(1, 51))]
    assert other.take(*records, after=500.0) == [], "an evaluation is due after step 50"
    assert told(other.take(after=50 + 601.0)) == [("no_step", "firing")]


@pytest.mark.parametrize("seconds", [0.4, 1.0, 3.0])
def test_a_run_that_has_shown_its_pauses_warns_within_three_steps_and_is_critical_later(
    tmp_path: Path, seconds: float
) -> None:
    watched = Watched(tmp_path, AlertsSpec(off=("checkpoint_old", "slow")))
    draw = random.Random(3)
    moments = list(itertools.accumulate(seconds * draw.uniform(0.85, 1.15) for _ in range(150)))
    records = [started(evaluate_every="none"), *(step(each, BEGAN + at, seconds=seconds)
                                                 for each, at in enumerate(moments, 1))]  # fmt: skip
    assert watched.take(*records, after=2.5 * seconds) == []
    (warning,) = watched.take(after=moments[-1] + 3.2 * seconds)
    assert (warning.rule, warning.severity, warning.state) == ("no_step", "warning", "firing")
    assert warning.evidence["limit_seconds"] == pytest.approx(3 * seconds, rel=0.05)
    (critical,) = watched.take(after=moments[-1] + 10.1)
    assert (critical.rule, critical.severity) == ("no_step", "critical")
    assert told(watched.take(step(151, BEGAN + moments[-1] + 12.0))) == [("no_step", "resolved")]


def test_pauses_that_scatter_make_the_warning_wait_as_a_loaded_machine_does(tmp_path: Path) -> None:
    """One pause of two steps, among 150 of one: the limit is beyond it by four times what it was above the others."""
    watched = Watched(tmp_path, AlertsSpec(off=("checkpoint_old", "slow")))
    moments = list(itertools.accumulate(0.8 if each == 40 else 0.4 for each in range(150)))
    records = [started(evaluate_every="none"), *(step(each, BEGAN + at) for each, at in enumerate(moments, 1))]
    assert watched.take(*records, after=2.3) == []
    assert [each.severity for each in watched.take(after=moments[-1] + 2.5)] == ["warning"]
    loaded = Watched(tmp_path, AlertsSpec(off=("checkpoint_old", "slow")), load=4.0)
    assert loaded.take(*records, after=9.5) == []
    assert [each.severity for each in loaded.take(after=moments[-1] + 9.7)] == ["warning"]


def test_a_loaded_machine_with_evaluations_and_saves_wakes_nobody(tmp_path: Path) -> None:
    """Pauses with a long tail: each hundredth step takes three times as long, and the load comes and goes."""
    for seed in range(3):
        draw, now, records = random.Random(seed), BEGAN, [started()]
        for number in range(1, 1001):
            now += STEP_SECONDS * draw.lognormvariate(0.0, 0.25) * (3.0 if draw.random() < 0.01 else 1.0)
            records.append(step(number, now, 2.0 + 5.0 * number**-0.4 + draw.gauss(0.0, 0.05)))
            now += draw.uniform(10, 25) if number % 50 == 0 else 0.0
            if number % 100 == 0:
                now += draw.uniform(2, 8)
                records.append(CheckpointRecord(number, f"step-{number}", 10**6, 4.0, 4.0, None, time=now))
        watched = Watched(tmp_path, AlertsSpec(off=("spike", "slow")), load=1.0)
        assert told(watched.through(iter(records))) == [], seed


def test_the_first_save_is_not_held_against_evaluations(tmp_path: Path) -> None:
    """After step 50 an evaluation of 5 s, after step 100 the same and the first save, which nobody knows yet."""
    watched = Watched(tmp_path)
    records = [started(), *(step(each, BEGAN + each / 2 + (5.0 if each > 50 else 0.0)) for each in range(1, 101))]
    assert watched.take(*records, after=500.0) == []
    assert told(watched.take(after=55.0 + 601.0)) == [("no_step", "firing")]


def test_a_building_run_has_longer(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.take(started(), after=590.0) == []
    assert told(watched.take(after=610.0)) == [("no_step", "firing")]


def test_a_dead_rank_until_the_run_goes_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.take(*steady(5))
    watched.watch.tell(RanksLost((2,), "rank 2 of 4 was ended by SIGKILL", "", BEGAN))
    (fired,) = watched.take(after=3.0)
    assert (fired.rule, fired.severity, fired.evidence["ranks"]) == ("rank_down", "critical", [2])
    fault = FaultRecord("rank 2 was lost", "SIGKILL", 2, time=BEGAN + 4)
    assert watched.take(fault) == [], "the same loss, on record"
    recovery = RecoveryRecord(2, "reform", "", 2, 4, 4, None, 5, 1, {"total": 1.0}, time=BEGAN + 5)
    assert told(watched.take(recovery)) == [("rank_down", "resolved")]


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.take(*steady(20), step(21, BEGAN + 10.5, grad_norm=math.inf)) == [], "fp16 looks for its scale"
    (fired,) = watched.take(step(22, BEGAN + 11.0, math.nan))
    assert (fired.rule, fired.severity) == ("not_finite", "critical") and "step 22" in fired.title
    calm = [step(each, BEGAN + each / 2) for each in range(23, 33)]
    assert told(watched.take(*calm)) == [("not_finite", "resolved")]


def test_an_alert_takes_a_trace_where_it_is_asked_for_and_only_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path, AlertsSpec(trace=("not_finite",), again="1 s"))
    watched.take(*steady(20), step(21, BEGAN + 11.0, 1e6))
    assert requested_trace(tmp_path) is None, "a spike was not asked for"
    watched.take(step(22, BEGAN + 11.5, math.nan))
    first = requested_trace(tmp_path)
    assert first is not None and (first.by, first.first, first.last, first.memory) == ("alert", None, 3, False)
    watched.take(*[step(each, BEGAN + each / 2) for each in range(23, 40)])
    fired = watched.take(step(40, BEGAN + 20.0, math.nan))
    assert ("not_finite", "firing") in told(fired) and requested_trace(tmp_path) == first
    with pytest.raises(ConfigError, match=r"run.alerts.trace has 'sloow'"):
        AlertsSpec(trace=("sloow",))


def test_a_spike_until_it_has_fallen_halfway(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    records = [started(evaluate_every="none")]
    records += [step(each, BEGAN + each / 2, 3.0 + 0.1 * (each % 3)) for each in range(1, 65)]
    assert watched.take(*records) == []
    (fired,) = watched.take(step(65, BEGAN + 32.5, 6.0))
    assert (fired.rule, fired.severity) == ("spike", "warning") and fired.evidence["loss"] == 6.0
    assert watched.take(step(66, BEGAN + 33, 4.5)) == [], "lower, and not yet over"
    assert told(watched.take(step(67, BEGAN + 33.5, 3.1))) == [("spike", "resolved")]


def test_a_plateau(tmp_path: Path) -> None:
    watched = Watched(tmp_path, AlertsSpec(off=("checkpoint_old",)))
    flat = [step(each, BEGAN + each / 2, 3.0 + 0.001 * (each % 2)) for each in range(1, 301)]
    found = watched.take(started(evaluate_every="none"), *flat)
    assert told(found) == [("plateau", "firing")] and found[0].evidence["steps"] == 250
    falling = [step(each, BEGAN + each / 2, 3.0 - 0.001 * (each - 300)) for each in range(301, 501)]
    assert told(watched.take(*falling)) == [("plateau", "resolved")]


def test_steps_that_are_slower_than_forecast(tmp_path: Path) -> None:
    watched = Watched(tmp_path, AlertsSpec(off=("no_step", "checkpoint_old")))
    assert watched.take(*steady(40, seconds=0.62)) == [], "19 % below"
    (fired,) = watched.take(*(step(each, BEGAN + each, seconds=0.8) for each in range(41, 120)))
    assert (fired.rule, fired.severity) == ("slow", "warning")
    assert fired.evidence["missing"] == pytest.approx(1 - 0.5 / 0.8)
    assert watched.take(*(step(each, BEGAN + each, seconds=0.61) for each in range(120, 184))) == [], "nearly"
    over = watched.take(*(step(each, BEGAN + each, seconds=0.5) for each in range(184, 248)))
    assert told(over) == [("slow", "resolved")]


def on_cpu(seconds: float, steps: int = 40) -> list[Record]:
    """Return a start on a CPU's devices, and steps of so many seconds."""
    begun, *rest = steady(steps, seconds)
    assert isinstance(begun, RunStarted)
    return [dataclasses.replace(begun, cluster={"device": {"kind": "cpu"}}), *rest]


def test_steps_that_other_programs_make_slow_wake_nobody_until_those_are_gone(tmp_path: Path) -> None:
    watched = Watched(tmp_path, AlertsSpec(off=("no_step", "checkpoint_old", "memory")), load=20.0)
    (noted,) = watched.take(*on_cpu(5.0))
    assert (noted.rule, noted.severity, noted.evidence["programs_per_core"]) == ("slow", "info", 20.0)
    assert watched.said == [] and "other programs" in noted.title
    watched.load = 1.0
    (fired,) = watched.take(step(41, BEGAN + 210.0, seconds=5.0))
    assert (fired.rule, fired.severity) == ("slow", "warning") and len(watched.said) == 1


@pytest.mark.parametrize(("queued", "severity"), [(4.6, "info"), (1.0, "warning")])
def test_the_ranks_own_wait_for_a_core_tells_it_before_the_load_has_risen(
    tmp_path: Path, queued: float, severity: str
) -> None:
    watched = Watched(tmp_path, AlertsSpec(off=("no_step", "checkpoint_old", "memory")))
    waits = {"queued_here": {"min": 0.0, "median": queued / 2, "max": queued, "rank": 1}}
    told_by_ranks = RanksRecord(5, 4, 2, "cpu", waits, time=BEGAN + 1.0)
    begun, *steps = on_cpu(5.0)
    (fired,) = watched.take(begun, told_by_ranks, *steps)
    assert (fired.rule, fired.severity) == ("slow", severity)


def test_load_is_no_excuse_for_a_gpu(tmp_path: Path) -> None:
    watched = Watched(tmp_path, AlertsSpec(off=("no_step", "checkpoint_old")), load=20.0)
    assert [each.severity for each in watched.take(*steady(40, 5.0))] == ["warning"]


def test_a_straggler_in_two_records_in_a_row(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.take(*steady(20))
    assert watched.take(ranks(20, BEGAN + 10.0, most=0.8)) == [], "once may be chance"
    (fired,) = watched.take(ranks(21, BEGAN + 10.1, most=0.8))
    assert (fired.rule, fired.evidence["rank"], fired.evidence["times"]) == ("straggler", 3, pytest.approx(2.0))
    assert watched.take(ranks(22, BEGAN + 10.2, most=0.5)) == [], "below the limit, and not yet even"
    assert told(watched.take(ranks(23, BEGAN + 10.3))) == [("straggler", "resolved")]


def test_memory_of_a_device_and_of_a_machine(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.take(*steady(20))
    (fired,) = watched.take(step(21, BEGAN + 10.5, peak_bytes=77 * 10**9))
    assert fired.rule == "memory" and fired.evidence["share"] == pytest.approx(0.9625)
    on_cpu = Watched(tmp_path)
    on_cpu.memory_share = 0.97
    assert told(on_cpu.watch.judge((), BEGAN)) == [("memory", "firing")]
    on_cpu.memory_share = 0.93
    assert on_cpu.watch.judge((), BEGAN + 10) == [], "within the band"
    on_cpu.memory_share = 0.6
    assert told(on_cpu.watch.judge((), BEGAN + 20)) == [("memory", "resolved")]


def test_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.take(*steady(20))
    watched.disk = (96e9, 100e9)
    (fired,) = watched.take(after=16.0)
    assert fired.rule == "disk" and "96%" in fired.title
    watched.disk = (94e9, 100e9)
    assert ("disk", "resolved") not in told(watched.take(after=22.0))
    watched.disk = (50e9, 100e9)
    assert ("disk", "resolved") in told(watched.take(after=28.0))


def test_a_checkpoint_that_is_too_old(tmp_path: Path) -> None:
    watched = Watched(tmp_path, AlertsSpec(off=("plateau",)))
    assert watched.take(*steady(300)) == []
    (fired,) = watched.take(step(301, BEGAN + 150.5))
    assert fired.rule == "checkpoint_old" and fired.evidence["step"] == 0
    saved = CheckpointRecord(301, "step-301", 1, 1.0, 1.0, None, time=BEGAN + 151.0)
    assert told(watched.take(saved)) == [("checkpoint_old", "resolved")]


def sample(celsius: float, memory: float = 0.5) -> NodeSample:
    signals = {"celsius": {"min": 50.0, "median": 60.0, "max": celsius, "rank": 3},
               "memory_share": {"min": 0.4, "median": 0.4, "max": memory, "rank": 1}}  # fmt: skip
    return NodeSample(20, "n1", 1.0, (0, 1, 2, 3), signals, {}, {}, (), None, time=BEGAN + 10.0)


def test_memory_of_devices_as_their_nodes_tell_it(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.take(*steady(20), sample(60.0, 0.94)) == []
    assert told(watched.take(sample(60.0, 0.97))) == [("memory", "firing")]
    assert told(watched.take(sample(60.0, 0.5))) == [("memory", "resolved")]


def test_a_device_that_is_too_hot(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.take(*steady(20), sample(87.0)) == []
    (fired,) = watched.take(sample(91.0))
    assert (fired.rule, fired.evidence) == ("temperature", {"node": "n1", "rank": 3, "celsius": 91.0})
    assert watched.take(sample(86.0)) == [], "within the band"
    assert told(watched.take(sample(80.0))) == [("temperature", "resolved")]


def test_a_budget_at_80_and_at_100_percent(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.spent = {"usd": (79.0, 100.0, BUDGETS["usd"][2]), "kwh": (1.0, 10.0, BUDGETS["kwh"][2])}
    assert watched.take(*steady(20)) == []
    watched.spent["usd"] = (81.0, 100.0, BUDGETS["usd"][2])
    (warned,) = watched.take(after=16.0)
    assert (warned.rule, warned.severity, warned.title) == ("budget", "warning", "81% of the budget of $100 is spent")
    watched.spent["usd"] = (101.0, 100.0, BUDGETS["usd"][2])
    again = [each for each in watched.take(after=22.0) if each.rule == "budget"]
    assert [(each.severity, each.state) for each in again] == [("critical", "firing")]


def test_the_end_of_the_hours_is_as_planned_and_wakes_nobody(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    end = RunEnded("requeue", 75, None, 20, 10.0, goes_on=BEGAN + 40_000.0, time=BEGAN + 10.0)
    (fired,) = watched.take(*steady(20), end)
    assert (fired.rule, fired.severity) == ("finished", "info") and "until its hours begin" in fired.title
    assert watched.said == []


@pytest.mark.parametrize(
    ("status", "severity"), [("complete", "info"), ("requeue", "warning"), ("failed", "critical"), ("stopped", "info")]
)
def test_the_end_of_a_run(tmp_path: Path, status: str, severity: str) -> None:
    watched = Watched(tmp_path)
    end = RunEnded(status, 0, {"what": "it broke", "try": "mend it"} if status == "failed" else None, 20, 10.0,
                   time=BEGAN + 10.0)  # fmt: skip
    (fired,) = watched.take(*steady(20), end)
    assert (fired.rule, fired.severity, fired.state) == ("finished", severity, "firing")
    assert ("it broke" in fired.title) == (status == "failed")
    assert watched.take(after=10_000.0) == [], "nothing is expected of a run that is over"


@pytest.mark.parametrize("moved", [86400.0, -86400.0])
def test_a_clock_that_is_set_is_neither_a_pause_nor_hides_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: float
) -> None:
    """The clock of the machine jumps by a day behind step 20: that is no pause, and 10 s without a step are."""
    passed, apart = [0.0], [0.0]
    monkeypatch.setattr(watches.time, "time", lambda: BEGAN + passed[0] + apart[0])
    for module in (watches, journals):
        monkeypatch.setattr(module, "MovedClock", lambda: MovedClock(watches.time.time, lambda: passed[0]))
    watched = Watched(tmp_path, AlertsSpec(off=("checkpoint_old", "slow")))
    writing = Journal(tmp_path)
    for each in steady(20):
        writing.write(dataclasses.replace(each, attempt=1))
    passed[0] = 10.0
    assert watched.watch.look() == []
    apart[0] = moved
    assert watched.watch.look() == [], "the watch has seen the clock before the run has"
    passed[0] = 10.5
    writing.write(step(21, BEGAN + passed[0] + moved))
    assert watched.watch.look() == []
    passed[0] = 19.0
    assert watched.watch.look() == []
    passed[0] = 21.0
    (fired,) = watched.watch.look()
    assert fired.rule == "no_step" and fired.evidence["silent_seconds"] == pytest.approx(10.5)
    assert fired.time == BEGAN + 21.0 + moved
    writing.close()


def test_a_clock_that_is_set_before_a_watch_reads_of_a_start_is_taken_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start has told how its clock stood, and its journal notes the move: the watch has seen both already."""
    real, moved = watches.time.time, [0.0]
    monkeypatch.setattr(watches.time, "time", lambda: real() + moved[0])
    watched = Watched(tmp_path, AlertsSpec(off=("checkpoint_old", "slow")))
    here, began = clock_here(), real()
    writing = Journal(tmp_path)
    writing.write(dataclasses.replace(started(), time=began, boot=here["boot"], clock_apart=here["apart"]))
    moved[0] = 86_400.0
    for each in range(1, 21):
        writing.write(dataclasses.replace(step(each, began + moved[0]), attempt=1))
    writing.close()
    assert watched.watch.look() == []


@pytest.mark.parametrize(
    ("every", "steps"), [("7 steps", 7), ("100 samples", 13), ("1280 tokens", 10), ("2 epochs", 63), ("none", None)]
)
def test_intervals_in_every_unit_are_the_steps_that_training_makes_of_them(every: str, steps: int | None) -> None:
    seen = AlertSeen(AlertsSpec())
    start = started(checkpoint_every=every)
    seen.add(dataclasses.replace(start, facts={"items_per_sample": 16, "samples": 250}))
    assert seen.steps_between("run", "checkpoint_every") == steps


def test_a_run_that_fails_is_told_in_its_own_terminal_by_itself(tmp_path: Path) -> None:
    """Its error stands there anyway: what the rules say of it is on record, and sent."""
    watched = Watched(tmp_path)
    fault = FaultRecord("the metric 'mine' raised KeyError", "it was called with a batch", rank=0, time=BEGAN + 1)
    end = RunEnded("failed", 2, {"what": fault.what, "try": "a function"}, 0, 1.0, time=BEGAN + 2)
    fired = watched.take(started(), fault, end)
    assert [each.rule for each in fired] == ["rank_down", "finished"] and all(each.sent for each in fired)
    assert [each.advice for each in fired] == ["a function"] * 2 and not watched.said
    (tmp_path / "slow").mkdir()
    watched = Watched(tmp_path / "slow")  # which sees the fault before it knows that the run ends with it
    fired = watched.take(started(), fault) + watched.take(end)
    assert [each.rule for each in fired] == ["rank_down", "finished"] and all(each.sent for each in fired)
    assert len(watched.said) == 1 and "try: nothing, where run.recovery has the run go on" in watched.said[0]
    (tmp_path / "other").mkdir()
    watched = Watched(tmp_path / "other")  # of a run that ends with another error than this fault
    assert watched.take(started(), fault, dataclasses.replace(end, error={"what": "the disk is full"}))
    assert len(watched.said) == 1 and fault.what in watched.said[0]
