"""Evaluation: the mean loss and metrics on held-out samples, each counted exactly once over all ranks."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.errors import DataError
from paceline.run.evaluate.held_out_metrics import measure, try_metrics
from paceline.run.loop.loader import held_out_batches, held_out_ids
from paceline.run.loop.step import Stepper
from paceline.run.record.remarks import damage_of_all
from paceline.task.coupling import is_coupled
from paceline.task.data.protocol import Source
from paceline.task.data.rows.mixed import InOrder
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.storage.notices import left_out_of
from paceline.task.data.unigram import unigram_loss
from paceline.task.metrics.metric import Metric
from paceline.task.models.build import evaluating

OF_TEXT = (TokenSource, PackedSource)


@dataclass(frozen=True)
class EvaluationResult:
    """What held-out samples gave: the mean loss per item, how many items it is over, and metrics by name."""

    loss: float
    weight: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)  # damaged samples of this rank, by reason


def evaluate(
    stepper: Stepper, source: Source, samples: int, data_rank: int, metrics: Sequence[Metric] = (), keeps: bool = True
) -> EvaluationResult:
    """Return the mean loss per item and the metrics of `samples` held-out samples, always the same ones.

    All of them are read first and kept, since some metrics have a second pass; not without `keeps`, for many samples.
    Raises DataError where none of them has an item that counts.
    """
    began = time.perf_counter()
    world, model = stepper.world, stepper.model
    coupled = is_coupled(model, stepper.turns[stepper.main].turn.objective)
    with evaluating(model), torch.no_grad():
        batches = held_out_batches(source, samples, stepper.plan, data_rank, world.device, coupled)
        loss_sum, weight, measured = measure(stepper, list(batches) if keeps else batches, metrics)
    left_out = sum((left_out_of(source, ids) for ids in batches.counted_ids), Counter[str]())
    if weight <= 0:
        damaged, first = damage_of_all(world, stepper.plan.layout.reads_first(world.rank), left_out)
        if damaged:
            raise DataError(
                f"the held-out samples have no item to measure the loss on: {damaged:,} of"
                f" {min(samples, source.samples):,} are damaged and left out",
                f"the first: {first}",
                "mend what is damaged, or let an evaluation read more: run.evaluate_samples",
            ).naming_ranks()
        raise DataError(
            "the held-out samples have no item to measure the loss on",
            f"the objective's weights add up to zero over the {min(samples, source.samples)} samples of an evaluation",
            'check their labels: are all of them masked? run.evaluate_every = "none" trains without evaluations',
        )
    return EvaluationResult(loss_sum / weight, weight, time.perf_counter() - began, measured, left_out)


def try_evaluation(stepper: Stepper, source: Source, samples: int, data_rank: int, metrics: Sequence[Metric]) -> None:
    """Measure metrics on the last micro-batch of an evaluation, its shortest, before training. Every rank calls it.

    Raises the error that the first evaluation would end in, where a metric cannot read what the model returns.
    """
    coupled = is_coupled(stepper.model, stepper.turns[stepper.main].turn.objective)
    with evaluating(stepper.model), torch.no_grad():
        every = held_out_batches(source, samples, stepper.plan, data_rank, stepper.world.device, coupled)
        try_metrics(stepper, list(dataclasses.replace(every, parts=every.parts[-1:])), metrics)


def unigram_bar(source: Source, held_out: Source | None, samples: int) -> float | None:
    """Return the loss that a language model must get below on the samples that evaluations read; None without text."""
    source = source.inner if isinstance(source, InOrder) else source
    if isinstance(source, OF_TEXT) and isinstance(held_out, OF_TEXT):
        found = unigram_loss(source, held_out, held_out_ids(held_out, samples))
        return found if math.isfinite(found) else None  # where no label counts the evaluation says so
    return None
