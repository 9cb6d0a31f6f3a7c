"""Intervals between checkpoints: Daly's, in whole steps, within bounds, adapted as costs are learnt, and recorded."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from distributed import run_ranks
from survive_runs import records, through, training, values_of
from tests_shared import decoder_task

from paceline.run.record.recorder import SilentRecorder
from paceline.run.survive.saving.failures_seen import FailuresSeen, failures_seen
from paceline.run.survive.saving.intervals import Cadence, Measured, choose, is_worth_a_change, mtbf_seconds
from paceline.run.survive.saving.pace import KnownPace, SavingPace
from paceline.run.survive.saving.remote_copies import RemoteCopies
from paceline.simulate.failures import failure_rates
from paceline.simulate.interval import daly_interval
from paceline.spec.cluster import ClusterSpec
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.survive.reliability import ReliabilitySpec


def test_the_interval_is_dalys_in_whole_steps() -> None:
    found = choose(Measured(step_seconds=2.0, stall_seconds=0.5, write_seconds=4.0), 3600.0, 10_000)
    assert found.every_steps == math.ceil(daly_interval(0.5, 3600.0) / 2.0) == 30
    assert "a failure every 1h 00m" in found.because and "(assumed)" in found.because


@pytest.mark.parametrize(
    ("step", "stall", "write", "mtbf", "longest", "steps"),
    [
        (1.0, 0.1, 300.0, 60.0, 10_000, 300),  # no shorter than a save takes
        (1e6, 0.1, 1.0, 60.0, 10_000, 1),  # no shorter than a step
        (1.0, 0.1, 1.0, math.inf, 500, 500),  # nothing is known to fail
        (1.0, 1.0, 1.0, 1e9, 500, 500),  # no longer than the spec says
    ],
)
def test_the_interval_keeps_its_bounds(
    step: float, stall: float, write: float, mtbf: float, longest: int, steps: int
) -> None:
    assert choose(Measured(step, stall, write), mtbf, longest).every_steps == steps


def test_what_was_measured_takes_the_place_of_what_was_assumed() -> None:
    measured = Measured(step_seconds=1.0, stall_seconds=9.0, write_seconds=9.0)
    for seconds in (0.1, 0.2, 7.0):
        measured.saved(seconds, 2 * seconds)
    assert (measured.stall_seconds, measured.write_seconds, measured.source) == (0.2, 0.4, "measured")
    assert not is_worth_a_change(100, 120) and is_worth_a_change(100, 125) and is_worth_a_change(100, 79)


def test_memory_spares_the_disk_the_failures_that_leave_the_machine() -> None:
    rates = failure_rates("NVIDIA H100")
    assert mtbf_seconds(rates, 8, machine_lost=True) > mtbf_seconds(rates, 8) > 0
    assert math.isinf(mtbf_seconds(failure_rates("cpu"), 8))


def test_an_adapted_cadence_counts_from_the_checkpoint_before() -> None:
    cadence = Cadence(4, adapts=True, last=3)
    assert [step for step in range(4, 9) if cadence.is_due(step)] == [7, 8]
    assert [step for step in range(1, 9) if Cadence(4).is_due(step)] == [4, 8]


def test_the_failures_of_a_run_are_learnt_from() -> None:
    """What is assumed counts as one failure; where nothing is, the run's own say it all."""
    hour, devices = 3600.0, 4
    seen = FailuresSeen(3, 4 * hour * devices, time.perf_counter())
    assert math.isclose(seen.mtbf_seconds(2 * hour, devices), 6 * hour / 4, rel_tol=1e-3)
    assert math.isclose(seen.mtbf_seconds(math.inf, devices), 4 * hour / 3, rel_tol=1e-3)
    none = FailuresSeen(0, 10 * hour * devices, time.perf_counter())
    assert none.mtbf_seconds(hour, devices) > 10 * hour and math.isinf(none.mtbf_seconds(math.inf, devices))


def test_failures_are_counted_from_the_journal_of_all_starts(tmp_path: Path) -> None:
    """One start that left no end, one that was asked to stop, in which two ranks were lost, and the one that counts."""
    folder = tmp_path / "journal"
    folder.mkdir()

    def at(moment: float, kind: str, **fields: object) -> str:
        return json.dumps({"v": 1, "kind": kind, "time": moment, **fields})

    recovery = {"rung": "reform", "because": "killed", "from_world": 2, "to_world": 2, "steps_lost": 0, "step": 3,
                "seconds": {"total": 1.0, "step": 0.5}, "resumed_from": None}  # fmt: skip
    began = {"spec": {}, "plan": {}, "world_size": 2}
    lines = {
        1: [at(0.0, "run_started", **began), at(50.0, "step", step=1)],
        2: [at(100.0, "run_started", **began), at(110.0, "recovery", generation=2, rank=1, **recovery),
            at(120.0, "recovery", generation=3, rank=None, **recovery),
            at(130.0, "recovery", generation=4, rank=0, **recovery),
            at(200.0, "run_ended", status="requeue", exit_code=75)],
        3: [at(300.0, "run_started", **began)],
    }  # fmt: skip
    for number, each in lines.items():
        (folder / f"{number:04d}.jsonl").write_text("\n".join(each) + "\n")
    seen = failures_seen(tmp_path)
    assert seen.failures == 3, "the world without a rank to blame was called to another number of devices"
    assert seen.device_seconds == 2 * 150.0


def _trained(folder: str) -> None:
    reliable = ClusterSpec(learn=False, reliability=ReliabilitySpec(mtbf_hours_per_device=1e-7))
    through(training(Path(folder), every=6, cluster=reliable, interval="auto"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_chooses_at_its_start_and_all_ranks_save_alike(tmp_path: Path, ranks: int) -> None:
    run_ranks(_trained, ranks, str(tmp_path))
    told = [record for record in records(tmp_path, "decision") if record["what"] == "disk checkpoints"]
    assert told and told[0]["from"] == 6 and told[0]["evidence"]["source"] == "assumed"
    assert all(1 <= record["to"] <= 6 and "a failure every" in record["because"] for record in told)
    assert 8 in values_of(tmp_path), "the ranks have agreed to the end"


# ---- through the worlds of a run ------------------------------------------------------------------------------------


def test_a_run_whose_worlds_are_shorter_than_its_interval_saves_all_the_same(tmp_path: Path) -> None:
    """Each world counted from its own beginning: a run that loses ranks more often than that never saved."""
    run = training(tmp_path, every=4, cluster=ClusterSpec(learn=False), interval="auto")
    for batch in run:
        if run.step(batch).step % 3 == 0:
            run._keeper.finish()
            run._keeper.abandon()
            run._saved = run._keeper.known
            run._open_keeper(None)
    assert sorted(values_of(tmp_path)) == [4, 8]
    told = [record for record in records(tmp_path, "decision") if record["what"] == "disk checkpoints"]
    assert len(told) == 1, "what was chosen, and what saves cost, is known to the next world"


def paced(run_dir: Path, begun_step: int, known: KnownPace, longest: int = 50) -> SavingPace:
    run = RunSpec(checkpoints=CheckpointsSpec(interval="auto"))
    spec = Spec(task=decoder_task(), cluster=ClusterSpec(learn=False), run=run)
    return SavingPace(spec, run_dir, {"disk": longest, "memory": None}, begun_step, known)


def test_the_next_world_goes_on_with_the_interval_and_the_costs_of_this_one(tmp_path: Path) -> None:
    measured = Measured(1.0, 9.0, 9.0)
    measured.saved(0.25, 0.5)
    pace = paced(tmp_path, 7, KnownPace({"disk": 4}, {"disk": 6}, {"disk": measured}))
    assert pace.is_chosen and [step for step in range(8, 12) if pace.cadences["disk"].is_due(step)] == [10, 11]
    first = pace.known.measured["disk"]
    assert (first.stall_seconds, first.write_seconds, first.source) == (0.25, 0.5, "measured")
    pace.saved("disk", 3.0, 4.0)
    assert (first.stall_seconds, first.write_seconds) == (3.0, 4.0), "another world has other costs: the first counts"
    back = paced(tmp_path, 2, pace.known)
    assert back.cadences["disk"].last == 2, "the state that was restored is older than the last save"


def test_a_save_that_was_given_up_is_due_again(tmp_path: Path) -> None:
    pace = paced(tmp_path, 0, KnownPace(), longest=4)
    pace.saved_at(4, ["disk"])
    pace.given_up(["memory"])
    assert pace.cadences["disk"].is_due(5)
    pace.saved_at(5, ["disk"])
    pace.given_up(["disk"])
    assert not pace.cadences["disk"].is_due(6)


@pytest.mark.parametrize(
    ("interval", "begun", "copied"), [("auto", 0, [14, 28]), ("auto", 5, [7, 21, 35]), ("fixed", 0, [])]
)
def test_copies_in_remote_storage_are_counted_from_the_one_before_where_checkpoints_are_of_any_step(
    interval: str, begun: int, copied: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of checkpoints after 7, 14, 21, 28 and 35 steps none would be copied every 10 steps."""
    found = list[int]()
    monkeypatch.setattr(RemoteCopies, "_begin", lambda self, path, step: found.append(step))
    spec = CheckpointsSpec(interval=interval, remote=f"file://{tmp_path}/far")
    copies = RemoteCopies(spec, 10, SilentRecorder(), begun)
    for step in (7, 14, 21, 28, 35):
        copies.published(tmp_path, step)
    assert found == copied
