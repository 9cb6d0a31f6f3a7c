"""Context parallel: ranks that share sequences compute the numbers of one device, in every composition."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from tests_shared import VOCAB, PaddedText, decoder_task, plan_of, run_steps
from torch.distributed.tensor import DTensor

from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.run.evaluate import evaluate
from paceline.run.world import join_world
from paceline.task.task import ModelSpec, Task

STEPS = 2


class Text(PaddedText):
    """Rows of `seq` tokens, of which some labels are masked; optionally of several documents each."""

    def __init__(self, seq: int, packed: bool = False) -> None:
        self.seq = self.items_per_sample = seq
        self.packed = packed

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return rows that depend on their ids alone."""
        rows = [np.random.default_rng(int(i)) for i in ids]
        walks = np.stack([np.cumsum(row.integers(0, 3, self.seq + 1)) % VOCAB for row in rows])
        labels = torch.from_numpy(walks[:, 1:].copy())
        for row, generator in zip(labels, rows, strict=True):
            row[: int(generator.integers(0, self.seq))] = -100
        batch = {"tokens": torch.from_numpy(walks[:, :-1].copy()), "labels": labels}
        if self.packed:
            ends = np.stack([row.random(self.seq) < 0.2 for row in rows])
            batch["documents"] = torch.from_numpy(np.cumsum(ends, axis=1))
        return batch


def text_task(seq: int = 16, packed: bool = False, **changes: Any) -> Task:
    return decoder_task(data=Text(seq, packed), **changes)


def numbers(task: Task, plan: Plan, held_out: bool = False) -> tuple[list[tuple], dict[str, torch.Tensor], float]:
    """Return (loss, norm, weight) of each step, the full weights after them, and the loss on held-out rows."""
    stats, built = run_steps(task, plan, STEPS)
    weights = {}
    for name, parameter in built.model.named_parameters():
        whole = parameter.detach()
        weights[name] = whole.full_tensor() if isinstance(whole, DTensor) else whole
    loss = evaluate(built.stepper, task.data, 5, plan.layout.data_rank(join_world("cpu").rank))["loss"]
    return [(s.loss, s.grad_norm, s.weight) for s in stats], weights, loss


def all_numbers(cases: list[tuple[Task, Plan]]) -> list[tuple]:
    return [numbers(task, plan) for task, plan in cases]


def assert_equal(ours: tuple, one_device: tuple, relative: float = 1e-10) -> None:
    for step, expected in zip(ours[0], one_device[0], strict=True):
        assert step == pytest.approx(expected, rel=relative)
    assert ours[1].keys() == one_device[1].keys()
    for name, weight in ours[1].items():
        torch.testing.assert_close(weight, one_device[1][name], rtol=relative, atol=relative, msg=name)
    assert ours[2] == pytest.approx(one_device[2], rel=relative)


def assert_layouts_equal(cases: list[tuple[Task, Plan]]) -> None:
    """Assert that each case, all of one number of ranks, equals the same task and plan on one device."""
    ranks = run_ranks(all_numbers, cases[0][1].layout.devices, cases)
    for index, (task, plan) in enumerate(cases):
        alone = dataclasses.replace(
            plan_of(Layout(), batch=plan.batch_samples, micro_batch=plan.micro_batch), precision=plan.precision
        )
        expected = numbers(task, alone)
        for rank in ranks:
            assert_equal(rank[index], expected)


def fp64(layout: Layout, **changes: Any) -> Plan:
    return plan_of(layout, precision="fp64", **changes)


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_two_ranks_share_sequences(method: str) -> None:
    untied = ModelSpec("llama-1m", hidden=32, layers=2, heads=4, kv_heads=4, ffn=40, vocab=VOCAB, tied=False)
    assert_layouts_equal(
        [
            (text_task(), fp64(Layout(cp=2), cp_method=method)),
            (text_task(), fp64(Layout(cp=2), cp_method=method, zero=1)),
            (text_task(), fp64(Layout(cp=2), cp_method=method, zero=2, micro_batch=13)),
            (text_task(), fp64(Layout(cp=2), cp_method=method, recompute="full")),
            (text_task(), fp64(Layout(cp=2), cp_method=method, recompute="selective")),
            (text_task(13), fp64(Layout(cp=2), cp_method=method)),  # filled up to 16
            (text_task(3), fp64(Layout(cp=2), cp_method=method)),
            (text_task(model=untied), fp64(Layout(cp=2), cp_method=method)),
        ]
    )


@pytest.mark.parametrize(
    "layout",
    [Layout(cp=4), Layout(cp=2, dp_shard=2), Layout(cp=2, dp_replicate=2), Layout(cp=3)],
    ids=str,
)
def test_compositions(layout: Layout) -> None:
    assert_layouts_equal(
        [
            (text_task(24), fp64(layout)),
            (text_task(24), fp64(layout, cp_method="ring", zero=2)),
            (text_task(19), fp64(layout, recompute="selective", cp_method="ring")),
            (text_task(19, packed=True), fp64(layout, recompute="full")),
            (text_task(5), fp64(layout, batch=3)),  # ranks without a row, and some with padding alone
        ]
    )


def test_packed_documents() -> None:
    assert_layouts_equal(
        [
            (text_task(packed=True), fp64(Layout(cp=2))),
            (text_task(13, packed=True), fp64(Layout(cp=2), recompute="selective")),
        ]
    )
