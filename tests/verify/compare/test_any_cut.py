"""Gradients are the same whatever the micro-batch, the passes and the rows of ranks, for samples of unequal lengths."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_kept
from tests_shared import SEQ_LEN, PaddedText, decoder_task

from paceline.run.process.world import join_world
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.verify.compare.layout import Reference, compare

TOLERANCE = 1e-10
CUTS = 5


class Ragged(PaddedText):
    """Rows of lengths between 2 and SEQ_LEN, each read padded to the longest of its micro-batch and no further."""

    fingerprint = "ragged-text"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return rows [rows, longest], the labels of what is filled up masked."""
        lengths = [int(np.random.default_rng(int(i)).integers(2, SEQ_LEN + 1)) for i in ids]
        rows, longest = [self._row(int(i)) for i in ids], max(lengths)
        tokens, labels = (torch.stack([row[part][:longest].clone() for row in rows]) for part in (0, 1))
        for row, length in enumerate(lengths):
            tokens[row, length:], labels[row, length:] = 0, -100
            labels[row, 0] = tokens[row, 0]  # no row without an item
        return {"tokens": tokens, "labels": labels}


def drawn_plans(layout: Layout, seed: int) -> list[Plan]:
    """Return plans of one global batch, cut in as many ways: any micro-batch, any number of rows on a rank."""
    drawn = random.Random(seed)
    batch, degree = drawn.randrange(degree_least(layout), 14), layout.data_degree
    plans = []
    for _ in range(CUTS):
        rows: tuple[int, ...] = ()
        if degree > 1 and drawn.random() < 0.5:
            first = drawn.randrange(1, batch)
            rows = (first, batch - first)
        size = drawn.randrange(1, batch + 1)
        passes = accumulation_for(batch, degree, size, rows) + drawn.randrange(3)  # more than it takes: some are empty
        plans.append(
            Plan(layout, micro_batch=size, accumulation=passes, batch_samples=batch, rows=rows, precision="fp64")
        )
    return plans


def degree_least(layout: Layout) -> int:
    return 2 * layout.data_degree


def _proven(layout: Layout, seed: int) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """Return the proof of every drawn plan, and on rank 0 what one device computes for each: gradients and weights."""
    world = join_world("cpu", threads=1)
    task = decoder_task(data=Ragged())
    kept: dict[Any, Reference] = {}
    proofs = [compare(task, plan, world, task.data, SEQ_LEN, 2, kept) for plan in drawn_plans(layout, seed)]
    last = [each.steps[-1] for each in kept.values()]
    return proofs, [
        {**step.gradients, **{f"{name} updated": value for name, value in step.weights.items()}} for step in last
    ]


@pytest.mark.parametrize(
    ("layout", "seed"),
    [(Layout(), 1), (Layout(), 2), (Layout(dp_replicate=2), 3), (Layout(dp_shard=2), 4)],
    ids=str,
)
def test_gradients_are_those_of_any_other_cut(layout: Layout, seed: int) -> None:
    results = run_kept(_proven, layout.devices, layout, seed)
    proofs, references = results[0]
    assert len(proofs) == CUTS and len(references) > 1
    for proof in proofs:
        assert proof.equal and proof.differences["gradients"] <= TOLERANCE, proof
        assert proof.differences["grad_norm"] <= TOLERANCE and proof.differences["loss"] <= TOLERANCE
    first, *others = references
    for other in others:
        for name, value in first.items():
            assert torch.linalg.vector_norm(other[name] - value) <= TOLERANCE * torch.linalg.vector_norm(value), name
