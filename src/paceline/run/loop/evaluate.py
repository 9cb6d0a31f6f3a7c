"""Evaluation: the mean loss on held-out samples, each counted exactly once over all ranks."""

from __future__ import annotations

import time

import torch

from paceline.errors import DataError
from paceline.run.loop.loader import held_out_batches, held_out_ids
from paceline.run.loop.step import Stepper
from paceline.task.data.protocol import Source
from paceline.task.data.rows.mixed import InOrder
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.unigram import unigram_loss
from paceline.task.models.build import evaluating

OF_TEXT = (TokenSource, PackedSource)


def evaluate(stepper: Stepper, source: Source, samples: int, data_rank: int) -> dict[str, float]:
    """Return {loss, weight, seconds}: the mean loss per item over `samples` held-out samples, always the same ones."""
    began = time.perf_counter()
    world, model = stepper.world, stepper.model
    with evaluating(model), torch.no_grad():
        batches = held_out_batches(source, samples, stepper.plan, data_rank, world.device)
        loss_sum, weight = stepper.passes.evaluate(batches)
    loss_sum, weight = world.sum([loss_sum, weight])
    if weight <= 0:
        raise DataError(
            "the held-out samples have no item to measure the loss on",
            f"the objective's weights add up to zero over the {min(samples, source.samples)} samples of an evaluation",
            'check their labels: are all of them masked? run.evaluate_every = "none" trains without evaluations',
        )
    return {"loss": loss_sum / weight, "weight": weight, "seconds": time.perf_counter() - began}


def unigram_bar(source: Source, held_out: Source | None, samples: int) -> float | None:
    """Return the loss that a language model must get below on the samples that evaluations read; None without text."""
    source = source.inner if isinstance(source, InOrder) else source
    if isinstance(source, OF_TEXT) and isinstance(held_out, OF_TEXT):
        return unigram_loss(source, held_out, held_out_ids(held_out, samples))
    return None
