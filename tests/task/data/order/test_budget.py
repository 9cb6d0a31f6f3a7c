"""Batches of a number of tokens hold as many samples as their lengths allow, the same ones on any ranks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, PaddedText, decoder_task

from paceline.errors import ConfigError
from paceline.run.loop.loader import BatchStream
from paceline.run.process.world import World, join_world
from paceline.spec.amounts import batch_samples, total_steps
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.budget import TokenBudget
from paceline.units import Amount

SAMPLES, LONGEST, BUDGET = 211, 64, 700


class Lengths(PaddedText):
    """Rows of known lengths, in the order by length; each is read padded to the longest of its micro-batch."""

    samples, fingerprint, items_per_sample = SAMPLES, "lengths", LONGEST

    def __init__(self) -> None:
        self.lengths = np.random.default_rng(5).integers(1, LONGEST + 1, SAMPLES)
        self.order = BucketedOrder(self.lengths, 16, 64)

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return the ids and lengths of rows alone."""
        return {"ids": torch.from_numpy(np.asarray(ids)), "lengths": torch.from_numpy(self.lengths[ids])}


def plan_of(layout: Layout, micro_batch: int) -> Plan:
    rows = BUDGET // LONGEST
    passes = accumulation_for(rows, layout.data_degree, micro_batch)
    return Plan(layout, micro_batch=micro_batch, accumulation=passes, batch_samples=rows)


def read_by(ranks: int, micro_batch: int, position: int) -> tuple[list[int], list[int], int]:
    """Return what so many ranks read at a position: ids in order, padded tokens of every pass, and how many samples."""
    source, plan = Lengths(), plan_of(Layout(dp_replicate=ranks), micro_batch)
    ids: list[int] = []
    padded: list[int] = []
    for rank in range(ranks):
        sizes = TokenBudget(source, 7, BUDGET, LONGEST)
        batch = BatchStream(source, 7, plan, rank, torch.device("cpu"), sizes).at(position, 1)
        for micro in batch.micro_batches:
            ids += micro.ids.tolist()
            if micro.counts:
                padded.append(len(micro.ids) * int(micro.data["lengths"].max()))
    return ids, padded, batch.samples


@pytest.mark.parametrize("seed", range(4))
def test_any_ranks_and_micro_batches_cut_the_same_batches_and_none_is_too_large(seed: int) -> None:
    """Three epochs under ranks and micro-batches that change at every step, against one rank that never changes."""
    drawn, source, position, seen = random.Random(seed), Lengths(), 0, []
    lengths, counts = source.lengths, set()
    while position < 3 * SAMPLES:
        expected, _, samples = read_by(1, 2, position)
        ranks, micro_batch = drawn.randrange(1, 9), drawn.randrange(1, 9)
        ids, padded, other = read_by(ranks, micro_batch, position)
        assert ids == expected and samples == other == len(ids)
        assert sum(lengths[ids]) <= BUDGET and max(padded) <= micro_batch * LONGEST
        following = source.order.ids(7, np.array([position + samples]))
        assert sum(lengths[ids]) + lengths[following].sum() > BUDGET, "one more would fit"
        seen, position = seen + ids, position + samples
        counts.add(samples)
    for epoch in range(3):
        assert sorted(seen[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))
    assert len(counts) > 5, "the number of rows varies"


def test_a_sample_longer_than_the_budget_is_a_batch_of_its_own() -> None:
    assert TokenBudget(Lengths(), 7, 1, LONGEST).at(1, 5) == 1
    with pytest.raises(ConfigError, match="lengths are not known"):
        TokenBudget(PaddedText(), 7, 100, SEQ_LEN)
    source = Lengths()
    source.lengths = np.zeros(SAMPLES, dtype=np.uint8)
    with pytest.raises(ConfigError, match="all lengths are 0"):
        TokenBudget(source, 7, 100, LONGEST)


def test_steps_are_counted_in_full_batches_of_tokens() -> None:
    task = decoder_task(batch_rows="by_length", global_batch=Amount(700, "tokens"), stop=Amount(7100, "tokens"))
    assert batch_samples(task, LONGEST) == 10 and total_steps(task, 10, LONGEST, SAMPLES) == 11
    with pytest.raises(ConfigError, match="by_length"):
        total_steps(decoder_task(batch_rows="by_length"), 13, LONGEST, SAMPLES)


class RaggedText(PaddedText):
    """Rows of known lengths, those that are short filled up to the longest of their micro-batch."""

    fingerprint = "ragged-lengths"

    def __init__(self) -> None:
        self.lengths = np.random.default_rng(6).integers(2, SEQ_LEN + 1, self.samples)

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return rows [rows, longest]."""
        lengths = self.lengths[ids]
        rows = [self._row(int(i)) for i in ids]
        tokens, labels = (torch.stack([row[part][: lengths.max()].clone() for row in rows]) for part in (0, 1))
        for row, length in enumerate(lengths):
            labels[row, length:] = -100
            labels[row, 0] = tokens[row, 0]
        return {"tokens": tokens, "labels": labels}


def _losses(layout: Layout, micro_batch: int) -> list[Any]:
    from paceline.run.assemble import assemble

    world: World = join_world("cpu", threads=1)
    task = decoder_task(data=RaggedText())
    passes = accumulation_for(6, layout.data_degree, micro_batch)
    plan = Plan(layout, micro_batch=micro_batch, accumulation=passes, batch_samples=6, precision="fp64")
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    sizes = TokenBudget(task.data, task.seed, 6 * SEQ_LEN, SEQ_LEN)
    stream = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device, sizes)
    found, position = [], 0
    for step in range(1, 5):
        stats = built.stepper.step(stream.at(position, step), 3e-3)
        found.append((stats.loss, stats.grad_norm, stats.position_after))
        position = stats.position_after
    return found


def test_steps_of_a_budget_are_one_devices_on_any_layout() -> None:
    (expected,) = run_ranks(_losses, 1, Layout(), 1)
    for found in run_ranks(_losses, 2, Layout(dp_shard=2), 3):
        for (loss, norm, position), (its_loss, its_norm, its_position) in zip(found, expected, strict=True):
            assert position == its_position
            assert loss == pytest.approx(its_loss, rel=1e-10) and norm == pytest.approx(its_norm, rel=1e-9)
