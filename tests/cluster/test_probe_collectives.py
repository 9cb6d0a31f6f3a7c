"""What a collective adds to a step is a difference of two times: the impossible ones are refused."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist

from paceline.cluster.probe import collectives
from paceline.cluster.probe.busy import reasons_of
from paceline.cluster.probe.collectives import BATCHES, TRIES, refused_of, time_in_step
from paceline.cluster.probe.passes import _collectives
from paceline.cluster.probe.rank import Rank
from paceline.cluster.probe.records import CollectiveTimes, Latency, ProbeRecord, Timed, TimedCollective


class Clock:
    """A clock that computing and a collective move on, each by what it takes at its turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work_seconds: list[float]) -> None:
        """`work_seconds` are of one call of each stretch of calls that begins together; the last one holds on."""
        self.now, self.stretch, self.work_seconds, self.is_awake = 0.0, -1, work_seconds, False
        monkeypatch.setattr(collectives, "computing", lambda: self.work)
        monkeypatch.setattr(collectives.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(dist, "barrier", self.begin)
        monkeypatch.setattr(Rank, "any", lambda rank, condition: condition)

    def begin(self) -> None:
        self.stretch += 1

    def work(self) -> None:
        self.now += self.work_seconds[min(max(self.stretch, 0), len(self.work_seconds) - 1)]
        self.is_awake = False

    def collective(self) -> None:
        self.now += 0.08e-3 if self.is_awake else 0.8e-3
        self.is_awake = True


def on_a_cpu(is_trial: bool = True) -> Rank:
    rank = object.__new__(Rank)
    rank.kind, rank.trial = "cpu", is_trial
    return rank


# Stretches of one try: computing alone, with the collective, alone again.
@pytest.mark.parametrize(("work_ms", "stretches"), [
    ([2.7, 2.7, 2.7], 3),
    ([9.9, 2.7, 2.7], 3),  # another program came between while a rank computed alone
    ([2.7, 2.7, 9.9], 3),
    ([9.9, 2.7, 9.9, 2.7, 2.7, 2.7], 6),  # twice: less than nothing would be left, so it is timed again
])  # fmt: skip
def test_what_disturbs_computing_alone_makes_no_collective_free(
    work_ms: list[float], stretches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An all-reduce of one number was stored with 1 us: computing had taken longer alone than beside it."""
    clock, rank = Clock(monkeypatch, [each / 1e3 for each in work_ms]), on_a_cpu()
    assert time_in_step(rank, clock.collective, 8) == {"seconds": pytest.approx(0.8e-3)}
    assert clock.stretch + 1 == stretches


def test_what_stays_impossible_is_told_and_a_row_of_collectives_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rank = Clock(monkeypatch, [9.9e-3, 2.7e-3, 9.9e-3] * TRIES), on_a_cpu()
    found = time_in_step(rank, clock.collective, 8)
    assert found == {"seconds": pytest.approx(0.08e-3), "refused": True}, "as in a row, not 1 us"
    assert clock.stretch + 1 == 3 * TRIES


def test_the_median_of_batches_leaves_out_one_that_waited_for_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two in five batches ten times as long, one with less than nothing left: none of them is what a step meets."""
    work_ms = [2.7, 10.0, 2.7, 2.7, 2.7, 10.0, 2.7, 1.0, 2.7, 2.7, 2.7]  # alone, then with the collective and alone
    clock, rank = Clock(monkeypatch, [each / 1e3 for each in work_ms]), on_a_cpu(is_trial=False)
    assert time_in_step(rank, clock.collective, 20) == {"seconds": pytest.approx(0.8e-3)}
    assert clock.stretch + 1 == 1 + 2 * BATCHES


def test_an_accelerator_is_timed_as_often_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no batches of which a median counts, and had half of its calls for them."""
    rank, seen = on_a_cpu(is_trial=False), list[int]()
    rank.kind, rank.device = "cuda", torch.device("meta")

    def timed(call: Callable[[], object], repeats: int = 0) -> Timed:
        seen.append(repeats)
        return {"seconds": 1e-3, "spread": 0.0, "repeats": repeats}

    monkeypatch.setattr(rank, "time", timed, raising=False)
    collectives._group_times(rank, None, 2)
    assert seen == [40, *[8] * 6]


def test_one_pass_that_could_tell_a_collective_from_computing_counts_for_both() -> None:
    """The mean with the other one, of a row, would be half of what steps meet; and nothing of it is busy."""

    def times(latency: Latency, refused: bool) -> CollectiveTimes:
        gather: TimedCollective = {"collective": "all_gather", "bytes": 2**22, "seconds": 4e-3}
        if refused:
            gather["refused"] = True
        return {"latency": latency, "sizes": [gather], "groups": {}}

    told, row = times({"seconds": 0.8e-3}, True), times({"seconds": 0.08e-3, "refused": True}, True)
    for passes in ((told, row), (row, told)):
        found = _collectives(*passes)
        assert found is not None and found["latency"] == {"seconds": 0.8e-3}
        assert found["sizes"][0].get("refused") and refused_of(found) == 1, "what neither could tell is marked still"
    assert refused_of(told) == 1 and refused_of(row) == 2 and refused_of(None) == 0


def test_a_probe_with_refused_collectives_is_that_of_a_busy_machine() -> None:
    quiet = {"kind": "cpu", "core_share": 1.0, "relative_spread": 0.1}
    assert reasons_of(cast("ProbeRecord", quiet | {"refused": 0})) == []
    (reason,) = reasons_of(cast("ProbeRecord", quiet | {"refused": 2}))
    assert reason == "2 of its collectives could not be told from computing"
