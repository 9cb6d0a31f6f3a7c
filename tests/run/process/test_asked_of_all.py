"""What ranks have alike is told by one of them; what only rank 0 needs goes to rank 0 alone."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of
from thread_worlds import InThreads, on_threads

from paceline.errors import ConfigError
from paceline.run.evaluate.held_out_metrics import Sums
from paceline.run.loop.loader import MicroBatch, StepBatch
from paceline.run.loop.training import Training
from paceline.run.process.neighbours import Neighbours
from paceline.run.process.world import World, join_world
from paceline.run.record.samples_read import ids_read
from paceline.run.survive.saving import host_room, memory_tier
from paceline.run.survive.saving.host_room import why_not_beside
from paceline.run.survive.saving.memory_tier import why_no_memory_tier
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.task import ModelSpec
from paceline.supervise.told.brief import Brief
from paceline.task.models.build import build_model
from paceline.units import Amount


class Unasked(AssertionError):
    """Every rank was asked for what it has."""


@pytest.fixture
def nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: World, item: Any) -> list[Any]:
        raise Unasked

    monkeypatch.setattr(InThreads, "gather", refused)


def sums_of(rank: int, classes: int) -> Sums:
    """Return the sums of a rank: none of the first, whose samples end on another one."""
    vectors = {(0, "right"): torch.tensor([rank]), (1, "of_class"): torch.arange(classes) * rank}
    return Sums([], vectors if rank else {})


def over(world: World, classes: int = 3) -> dict[str, list[float]]:
    sums = sums_of(world.rank, classes)
    sums.metrics = [None, None]  # type: ignore[list-item]
    return {name: values.tolist() for totals in sums.over(world, world.rank != 2) for name, values in totals.items()}


def test_metrics_with_the_same_names_and_lengths_ask_nobody(nobody_asks: None) -> None:
    assert on_threads(4, over) == [{"right": [1.0 + 3.0], "of_class": [0.0, 4.0, 8.0]}] * 4


def test_metrics_of_different_lengths_are_refused_on_every_rank() -> None:
    def refused(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            over(world, classes=2 + world.rank)
        return caught.value.what

    assert on_threads(4, refused) == ["a metric has 3 and 5 numbers for 'of_class' on different ranks"] * 4


def test_metrics_that_only_some_ranks_have_are_added_up() -> None:
    def some(world: World) -> dict[str, list[float]]:
        sums = Sums([None], {(0, f"class {world.rank}"): torch.ones(1)})  # type: ignore[list-item]
        (totals,) = sums.over(world, True)
        return {name: values.tolist() for name, values in totals.items()}

    assert on_threads(3, some) == [{f"class {rank}": [1.0] for rank in range(3)}] * 3


def test_names_that_all_have_ask_nobody(nobody_asks: None) -> None:
    assert on_threads(3, lambda world: world.union(["b", "a", "b"])) == [["a", "b"]] * 3


def test_names_of_stages_are_sent_once_for_each_stage(nobody_asks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight ranks in four stages one of each stage sends its names; a name of two stages comes once."""
    sent: list[int] = []
    share = InThreads.share

    def counted(self: InThreads, item: Any, root: int = 0) -> Any:
        sent.extend([root] if self.is_first else [])
        return share(self, item, root)

    monkeypatch.setattr(InThreads, "share", counted)
    names = [["embed", "norm"], ["a", "norm"], ["b"], ["head", "embed"]]
    assert on_threads(8, lambda world: world.union(names[world.rank // 2])) == [["embed", "norm", "a", "b", "head"]] * 8
    assert sent == [0, 2, 4, 6]


def test_room_for_copies_is_asked_of_the_ranks_of_a_machine_alone(
    nobody_asks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines are as many as there are nodes: a list of all of them, and a turn for each, grows with the world."""
    of_thread = threading.local()
    for asks in (host_room, memory_tier):
        monkeypatch.setattr(asks, "machine_here", lambda: of_thread.name)
    monkeypatch.setattr(InThreads, "union", lambda world, names: pytest.fail("a turn for each machine"))
    monkeypatch.setattr(host_room, "available_memory_bytes", lambda: 10 * 2**20)
    held = {"weight": torch.zeros(2**20)}

    def reasons(world: World) -> tuple[str, str]:
        of_thread.name = f"machine {world.rank // 2}"
        return why_not_beside(held if world.rank < 2 else {}, world), why_no_memory_tier(held, world)

    for beside, in_memory in on_threads(6, reasons):
        assert beside == "the copies of a machine's ranks take 8.00 MiB of host memory, of which 10.0 MiB are free"
        assert in_memory == "the ranks are on 3 machines, and each would hold a part only"


def test_contents_that_differ_are_never_alike() -> None:
    for contents, found in (
        ([None, b"x", b"x"], 1), ([b"x", None, None], 0), ([None, None, None], 0), ([b"x", b"y", None], None),
        ([None, b"x", b""], None), ([b"", b"", b""], 0),
    ):  # fmt: skip
        told = on_threads(3, lambda world, contents=contents: world.one_of_alike(contents[world.rank]))
        assert told == [found] * 3, contents


def batch_of(rank: int) -> StepBatch:
    """Return a batch of four positions: a rank reads two, one in each pass, and a pass that counts for nothing."""
    passes = [MicroBatch({}, np.array([10 * (2 * each + rank)]), 2 * each + rank) for each in range(2)]
    return StepBatch(1, 0, 4, (*passes, MicroBatch({}, np.array([99]), 9, counts=False)))


def test_ids_of_samples_go_to_rank_0_alone(nobody_asks: None) -> None:
    layout = Layout(dp_shard=2, tp=2)  # neighbours read the same rows, and one of them tells
    found = on_threads(4, lambda world: ids_read(batch_of(world.rank // 2), world, layout, lambda at: 11 * at))
    assert found == [[0, 10, 20, 30], None, None, None], "not those of these positions, so each tells what it has read"


def test_ids_that_are_those_of_the_positions_are_sent_by_nobody(
    nobody_asks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(dp_shard=2, tp=2)
    monkeypatch.setattr(World, "bring_to_first", lambda world, item: pytest.fail("a rank sends its ids"))
    found = on_threads(4, lambda world: ids_read(batch_of(world.rank // 2), world, layout, lambda at: 10 * at))
    assert found == [[0, 10, 20, 30], None, None, None]


@pytest.mark.parametrize("case", ["exchanged", "twice", "elsewhere"])
def test_ids_that_depart_are_told_as_they_were_read(case: str) -> None:
    """Two ranks with each other's samples, both with the same rows, and one with those of other positions."""

    def read(world: World) -> list[int] | None:
        batch = batch_of(0 if case == "twice" else world.rank)
        if case == "exchanged":
            for micro in batch.micro_batches:
                micro.ids = 10 * (micro.position ^ 1) * np.ones(1, dtype=np.int64)
        elif case == "elsewhere" and world.rank:
            batch.micro_batches[0].ids = np.array([70])
        return ids_read(batch, world, Layout(dp_shard=2), lambda at: 10 * at)

    expected = {"exchanged": [10, 0, 30, 20], "twice": [0, 0, 20, 20], "elsewhere": [0, 70, 20, 30]}
    assert on_threads(2, read) == [expected[case], None]


def test_the_first_that_has_something_is_heard_and_nobody_else_is_asked(nobody_asks: None) -> None:
    for items, found in (
        (["", "full", "hot"], "full"), ([None, None, None], None), (["", "", ""], None), (["a", "", "b"], "a"),
        ([0, 0, [7]], [7]),
    ):  # fmt: skip
        assert on_threads(3, lambda world, items=items: world.first_told(items[world.rank])) == [found] * 3
    alone = World(0, 1, 0, torch.device("cpu"))
    assert (alone.first_told("x"), alone.first_told("")) == ("x", None)


def whole_run(folder: str) -> tuple[Counter[str], int]:
    """Return who has asked every rank for what it has, and how often, over a run of three steps with two saves."""
    asked: Counter[str] = Counter()
    ask = World.gather

    def counted(self: World, item: Any) -> list[Any]:
        asked[sys._getframe(1).f_code.co_qualname] += 1
        return ask(self, item)

    world = join_world("cpu", threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "gather", counted)
        model = build_model(ModelSpec("llama-1m", hidden=32, layers=1, heads=4, ffn=40), VOCAB, SEQ_LEN, 0)
        task = decoder_task(model=model, stop=Amount(3, "steps"))
        run = RunSpec(checkpoint_every=Amount(1, "steps"), keep_last=2, check_every=Amount(1, "steps"))
        brief = Brief(plan_of(Layout(dp_replicate=2)), 3, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan,
                      PlannedRecord())  # fmt: skip
        training = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, world, Path(folder))
        for batch in training:
            stats = training.step(batch)
    return asked, stats.step


def test_a_run_asks_all_ranks_for_nothing(tmp_path: Path) -> None:
    """Its start, steps, comparisons, saves and end: what grows with the number of ranks is what is listed here."""
    for asked, steps in run_ranks(whole_run, 2, str(tmp_path)):
        assert steps == 3
        del asked["spread_over"]  # which asks in small worlds alone
        assert not asked


def brought() -> tuple[Any, int | None, list[str]]:
    world = join_world("cpu", threads=1)
    return world.bring_to_first(world.rank), world.one_of_alike(b"x" if world.rank else None), world.union(["b", "a"])


def test_real_ranks_bring_and_agree_likewise() -> None:
    assert run_ranks(brought, 2) == [([0, 1], 1, ["a", "b"]), (None, 1, ["a", "b"])]


def told_alike() -> list[Any]:
    """Return what this rank is told and how many keys stay: the even ranks are on one node, the odd ones on another."""
    world = join_world("cpu", threads=1)
    own, other = ("even", "odd") if world.rank % 2 == 0 else ("odd", "even")
    world.wait()
    before = keys_held()
    found: list[Any] = [world.told_at(own, {"n": world.rank * 10})]
    found += [world.told_at(own, {"n": world.rank}, (other, "nowhere"))]
    world.wait()
    kept = keys_held() - before
    for call in ("tell", "told"):  # the store is gone when one of the ranks comes to that
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 1:
                patch.setattr(Neighbours, call, _gone)
            found += [world.told_at(own, {"n": world.rank}, (other, "nowhere"))]
    return [*found, kept]


def keys_held() -> int:
    """Return how many keys the store has in which the ranks met."""
    return dist.distributed_c10d._get_default_store().num_keys()


def _gone(*given: object) -> None:
    raise dist.DistNetworkError("Connection was likely closed")


def test_ranks_of_a_node_tell_each_other_and_two_rounds_are_two() -> None:
    even, odd = [(0, {"n": 0}), (2, {"n": 2})], [(1, {"n": 1})]
    first = [{"even": [(0, {"n": 0}), (2, {"n": 20})]}, {"odd": [(1, {"n": 10})]}]
    found = run_ranks(told_alike, 3)
    assert [each[0] for each in found] == [first[0], first[1], first[0]]
    for number in (1, 2, 3):
        assert [each[number] for each in found] == [{"even": even, "odd": odd, "nowhere": []}] * 3
    assert [each[4] for each in found] == [0] * 3, "nothing of it stays in the store"
    alone = World(0, 1, 0, torch.device("cpu"))
    assert alone.told_at("a", {"n": 1}, ("b",)) == {"a": [(0, {"n": 1})], "b": []}
