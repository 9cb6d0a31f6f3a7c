"""What bounds a run's steps is told from its journal: a slow loader, a slow network, and neither."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from runs import records_of
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of
from thread_worlds import on_threads

from paceline.report.build import build_report
from paceline.report.html import render_html
from paceline.run.loop.step import StepStats
from paceline.run.loop.training import Training
from paceline.run.process.spread import spread_over
from paceline.run.process.world import World
from paceline.run.record.tally import TASKS, RankTally, sends
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import RanksRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.rank_spread import RankSpread
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.survive.faults import FaultPlan, read_faults
from paceline.supervise.told.brief import Brief
from paceline.units import Amount
from paceline.verdict.steps_seen import StepsSeen, seen_of
from paceline.verdict.verdict import BoundVerdict, judge

STEPS, BATCH = 8, 6
PASSES = 8  # of a step that computes: what lies between two steps is little then
TIMES = 8.0  # as long as all the rest of a step: shares of a step hold on a machine of any load
LONGEST = 2.0  # seconds that the slow network takes: what a run does for the first time may take as long


class SlowText(PaddedText):
    """Rows that one rank waits for, each time or now and then, `TIMES` as long as for what it did since the last."""

    def __init__(self, slow_rank: int, every: int = 1) -> None:
        self._slow_rank, self._every, self._reads = slow_rank, every, 0
        self._read_at: float | None = None  # the first read has nothing to be slower than

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return the rows, late."""
        self._reads += 1
        is_slow = dist.get_rank() == self._slow_rank and self._reads % self._every == 0
        if is_slow and self._read_at is not None:
            time.sleep(TIMES * (time.perf_counter() - self._read_at))  # what is slow, and no synchronisation
        found = super().read(ids, positions)
        if is_slow or self._read_at is None:
            self._read_at = time.perf_counter()
        return found


class SlowNetwork(World):
    """A world whose sums take `TIMES` as long as all that was done since the last one, up to `LONGEST`."""

    summed_at = 0.0

    def add_up(self, vector: torch.Tensor) -> None:
        """Put the sum over all ranks in the place of a vector, late."""
        if SlowNetwork.summed_at:
            time.sleep(min(LONGEST, TIMES * (time.perf_counter() - SlowNetwork.summed_at)))  # what is slow
        super().add_up(vector)
        SlowNetwork.summed_at = time.perf_counter()


@dataclass
class SlowDisk:
    """Takes `TIMES` as long for a checkpoint as for all that was done since the last one."""

    save: Callable[..., bool]
    saved_at: float = field(default_factory=time.perf_counter)

    def __call__(self, *arguments: Any) -> bool:
        """Save, late."""
        time.sleep(TIMES * (time.perf_counter() - self.saved_at))  # what is slow
        saved = self.save(*arguments)
        self.saved_at = time.perf_counter()
        return saved


DATA: dict[str, Callable[[], object]] = {
    "data": lambda: SlowText(1),
    "data now and then": lambda: SlowText(0, every=4),
    "evaluation": lambda: (PaddedText(), SlowText(1)),
}


def _train(run_dir: str, kind: str) -> None:
    make = SlowNetwork if kind == "communication" else World
    world = make(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    batch = BATCH * PASSES if kind in ("compute", "straggler") else BATCH
    plan = plan_of(Layout(dp_replicate=2), batch=batch, micro_batch=3)
    task = decoder_task(stop=Amount(STEPS, "steps"), data=DATA.get(kind, PaddedText)())
    faults = read_faults([{"kind": "slow", "rank": 1, "factor": TIMES, "steps": STEPS, "step": 1}])
    run = RunSpec(
        checkpoint_every=Amount(1, "steps") if kind == "checkpoint" else None,
        evaluate_every=Amount(1, "steps") if kind == "evaluation" else None,
        evaluate_samples=BATCH,
        faults=faults if kind == "straggler" else FaultPlan(),
    )
    brief = Brief(plan, STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    training = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, world, Path(run_dir))
    if kind == "checkpoint":
        training._keeper.save_if_due = SlowDisk(training._keeper.save_if_due)  # type: ignore[method-assign]
    stepped_at = time.perf_counter()
    for batch in training:
        if kind == "host" or (kind == "host of rank 0" and world.is_first):
            time.sleep(TIMES * (time.perf_counter() - stepped_at))  # what is slow: the loop's own body
        training.step(batch)
        stepped_at = time.perf_counter()


def is_busy(bound: BoundVerdict) -> bool:
    """Return whether a thread had no core: a busy machine may be found to be one, and nothing else."""
    return bound.kind == "host" and "no core" in bound.evidence[0]


DEEP = [
    pytest.param(kind, marks=pytest.mark.deep)
    for kind in ("data now and then", "host", "host of rank 0", "straggler", "checkpoint")
]


@pytest.mark.parametrize("kind", ["data", "communication", "evaluation", "compute", *DEEP])
def test_what_a_run_is_slowed_by_bounds_it(kind: str, tmp_path: Path) -> None:
    run_ranks(_train, 2, str(tmp_path), kind)
    summary = build_report(tmp_path)
    bound = summary.bound
    assert bound is not None
    by_kind = {part.kind: part for part in bound.parts}
    if kind == "compute":
        assert bound.kind == "compute" or is_busy(bound), bound
    elif kind == "straggler":
        part = by_kind[kind]
        assert bound.kind == kind or (is_busy(bound) and part.share > 0.1), bound
        assert part.evidence[0].startswith("rank 1 computes"), part
    elif kind == "communication":  # a thread that sends is not given a core at once either
        assert bound.kind == kind or (is_busy(bound) and by_kind[kind].share > 0.1), bound
    else:
        assert bound.kind == kind.split()[0] and bound.share > 0.5, bound
    assert sum(part.share for part in bound.parts) == pytest.approx(1.0, abs=0.35) and set(by_kind) == {
        "data", "communication", "host", "straggler", "checkpoint", "compute",
        *(["evaluation"] if kind == "evaluation" else []),
    }  # fmt: skip
    told = records_of(tmp_path, "verdict")
    also = ("host", kind) if is_busy(bound) else ("host",)  # of its last steps alone a run sees more
    assert told and told[-1]["bound"] in (bound.kind, *also) and told[-1]["shares"].keys() == by_kind.keys()
    skew = {each.name: each for each in bound.skew}
    if kind == "data":
        waiting = skew["waiting for its batch"]
        assert waiting.rank == 1 and waiting.most > 5 * waiting.least
        assert "rank 1 waits longest" in bound.evidence
    page = render_html(summary)
    assert f"{bound.kind}-bound" in page
    assert summary.as_dict()["bound"]["kind"] == bound.kind


def cpu(**means: tuple[float, float]) -> StepsSeen:
    """Return what two ranks have shown, whose least and most are given."""
    found = {name: RankSpread(least, (least + most) / 2, most, 1) for name, (least, most) in means.items()}
    return StepsSeen({"total": RankSpread(1.0, 1.0, 1.0, 0), **found}, 20, 2, "cpu")


def parts_of(verdict: BoundVerdict) -> dict[str, float]:
    return {part.kind: round(part.share, 6) for part in verdict.parts}


def test_who_waits_for_a_slower_rank_does_not_wait_for_the_network() -> None:
    slow_peer = judge(cpu(data=(0, 0), waiting=(0.05, 0.8), queued=(0, 0), queued_here=(0, 0), other=(0, 0)))
    assert slow_peer.kind == "compute" and parts_of(slow_peer)["communication"] == 0.05
    network = judge(cpu(data=(0, 0), waiting=(0.6, 0.8), queued=(0, 0), queued_here=(0, 0), other=(0, 0)))
    assert network.kind == "communication" and network.gain == pytest.approx(2.5)


def test_a_busy_machine_is_no_slow_network() -> None:
    busy = judge(cpu(data=(0, 0), waiting=(0.4, 0.5), queued=(0.3, 0.4), queued_here=(0.2, 0.3), other=(0, 0)))
    assert busy.kind == "host" and parts_of(busy)["communication"] == 0.0
    others = judge(cpu(data=(0, 0), waiting=(0.6, 0.7), queued=(0.5, 0.6), queued_here=(0.0, 0.05), other=(0, 0)))
    assert others.kind == "host" and not others.healthy, "what is taken off a wait is no computing"
    assert parts_of(others) | {"compute": 0.4, "host": 0.6} == parts_of(others)


def test_threads_that_delay_no_collective_are_not_taken_off_a_wait() -> None:
    """Threads that share a rank's computing wait for a core for longer than the step lasts; its network is slow."""
    told = {"data": (0, 0), "waiting": (0.7, 0.75), "queued": (0.9, 1.6), "queued_here": (0.02, 0.05), "other": (0, 0)}
    network = judge(cpu(**told, queued_sending=(0.0, 0.01)))
    assert network.kind == "communication" and parts_of(network)["communication"] == pytest.approx(0.64)
    assert parts_of(network)["host"] == pytest.approx(0.06), "what was taken off the wait"
    sending = judge(cpu(**{**told, "queued_here": (0.0, 0.05)}, queued_sending=(0.0, 0.6)))
    assert sending.kind == "host" and parts_of(sending)["communication"] == pytest.approx(0.05)
    assert judge(cpu(**told)).kind == "host", "an older journal tells of all threads together"


def test_what_every_rank_waits_in_every_step_is_the_networks() -> None:
    """Beside programs that take the cores: a thread that wakes late from a wait has waited for the network before."""
    told = {"data": (0, 0), "waiting": (0.02, 0.5), "queued": (0.5, 0.9), "queued_here": (0.1, 0.3), "other": (0, 0)}
    slow = judge(cpu(**told, queued_sending=(0.3, 0.4), waiting_least=(0.45, 0.46)))
    assert slow.kind == "communication" and parts_of(slow)["communication"] == pytest.approx(0.45)
    assert parts_of(slow)["host"] == pytest.approx(0.3)
    busy = judge(cpu(**told, queued_sending=(0.3, 0.4), waiting_least=(0.01, 0.02)))
    assert busy.kind == "host" and parts_of(busy)["communication"] <= 0.02


def _senders() -> list[str]:
    dist.all_reduce(torch.ones(1))
    return [(task / "comm").read_text().strip() for task in TASKS.iterdir() if sends(task)]


def test_gloos_threads_are_known_by_their_names() -> None:
    for names in run_ranks(_senders, 2):
        assert len(names) >= 2 and not any(name.startswith("python") for name in names), names


def test_a_device_that_computes_while_the_host_waits_is_not_starved() -> None:
    times = {"total": 1.0, "data": 0.6, "forward_backward": 0.9, "reduce": 0.0, "other": 0.0}
    spreads = {name: RankSpread(value, value, value, 0) for name, value in times.items()}

    def verdict(idle: float, awaited: float, held: float = 0.0) -> BoundVerdict:
        values = {"idle": idle, "awaited": awaited, "held": held}
        more = {name: RankSpread(value, value, value, 0) for name, value in values.items()}
        return judge(StepsSeen({**spreads, **more}, 20, 1, "cuda"))

    assert verdict(idle=0.01, awaited=0.3).kind == "compute"
    assert verdict(idle=0.55, awaited=0.3).kind == "data"
    assert verdict(idle=0.01, awaited=0.0).kind == "host", "the host is never ahead of the device"
    assert verdict(idle=0.01, awaited=0.0, held=0.5).kind == "data", "it reads for longer than the device computes"
    assert "communication" not in parts_of(verdict(0.0, 0.3)), "one rank sends nothing"


def test_of_an_older_journal_rank_0_is_known() -> None:
    assert seen_of([], {"total": math.nan}, 3, 2) is None and seen_of([], {}, 0, 1) is None
    seen = seen_of([], {"total": 2.0, "data": 1.0, "waiting": 0.2}, 7, 2)
    assert seen is not None and not seen.whole
    verdict = judge(seen)
    assert verdict.kind == "data" and verdict.skew == () and verdict.steps == 7


def test_records_count_by_their_steps_and_those_of_another_world_do_not() -> None:
    def record(ranks: int, steps: int, total: float, rank: int) -> RanksRecord:
        spreads = {"total": {"min": total, "median": total, "max": total, "rank": rank}, "data": {"min": "nan"}}
        return RanksRecord(steps, steps, ranks, "cpu", spreads)

    seen = seen_of([record(4, 9, 100.0, 3), record(2, 10, 1.0, 0), record(2, 30, 2.0, 1)], {}, 0, 2)
    assert seen is not None and seen.steps == 40 and set(seen.spreads) == {"total"}
    assert seen.spreads["total"] == RankSpread(1.75, 1.75, 1.75, 1)


def test_a_record_does_not_grow_with_the_ranks() -> None:
    for ranks in (1, 2, 9):
        found = on_threads(ranks, lambda world: spread_over(world, [float(world.rank % 7)]))
        assert found == [found[0]] * ranks and found[0][0] is not None
        told = found[0][0].told()
        assert set(told) == {"min", "median", "max", "rank"} and told["rank"] == min(6, ranks - 1)


def test_a_tally_says_nothing_of_no_step() -> None:
    tally = RankTally(World(0, 1, 0, torch.device("cpu")))
    assert tally.over_ranks(0, last=True) is None


def test_a_tally_tells_the_shortest_wait_of_its_steps_and_begins_anew_with_each_record() -> None:
    tally = RankTally(World(0, 1, 0, torch.device("cpu")))

    def made(step: int, waited: float) -> None:
        seconds = {"total": 1.0, "forward_backward": 0.9, "reduce": 0.1}
        tally.add(StepStats(step, 0, 1, 1.0, 1.0, 1.0, 0.1, seconds, True, False, waiting_seconds=waited))

    made(1, 0.001)  # the first warms up
    for waits in ((0.5, 0.2, 0.4, 0.3), (0.6, 0.7, 0.9, 0.8)):
        for step, waited in enumerate(waits, 2):
            made(step, waited)
        record = tally.over_ranks(5)
        assert record is not None and record.spreads["waiting_least"]["min"] == min(waits)
        assert record.spreads["waiting"]["max"] <= sum(waits) / 4
