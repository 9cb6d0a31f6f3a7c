"""What one device measures on held-out samples in a story: the mean loss, the items in that mean, and metrics.

Written plainly: the samples one by one, what they give added up, one division at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.errors import NothingToLearn
from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.run.numerics.randomness.again import DRAWS_BY
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.numerics.randomness.survey import length_of
from paceline.spec.plan import Plan
from paceline.spec.task import Task
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.protocol import Source
from paceline.task.metrics.metric import LossTotal, Metric
from paceline.task.metrics.resolve import metrics_of
from paceline.task.metrics.rewards import RewardsOfPairs
from paceline.task.models.build import evaluating
from paceline.task.models.held import put_buffer
from paceline.task.objective import Objective, next_token, next_token_logits
from paceline.task.turns import objective_of
from paceline.verify.compare.tolerance import TOLERANCES
from paceline.verify.reference.plain_documents import placed_plainly

HELD_OUT_SEED = 0  # of the order in which held-out samples are taken: the same in every run
LOSS, ITEMS = "evaluation", "items"


@dataclass(frozen=True)
class Evaluated:
    """What the held-out samples give: the mean loss per item, how many items it is over, and metrics by name.

    The loss is NaN where nothing is held out, or where it is not a sum over samples: it then depends on which of them
    are read together, and so do metrics.
    """

    loss: float = math.nan
    weight: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    changed: tuple[str, ...] = ()  # weights that are others once the samples have been evaluated

    def numbers(self) -> dict[str, float]:
        """Return what of it can be compared, by name: metrics that are no number are what nothing was counted of."""
        if math.isnan(self.loss):
            return {}
        counted = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        return {LOSS: self.loss, ITEMS: self.weight, **counted}


@torch.no_grad()
def evaluations(
    task: Task,
    plan: Plan,
    model: nn.Module,
    states: Iterable[Mapping[str, torch.Tensor]],
    held_out: Source | None,
    few: int,
) -> list[Evaluated]:
    """Return what the first held-out samples of their order give with the model in each state, `few` of them.

    Without held-out samples the model is not called.
    """
    if held_out is None:
        return [Evaluated() for _ in states]
    objective = objective_of(task, held_out.unit)
    metrics = metrics_of(task.evaluate, held_out, objective)
    count = min(few, held_out.samples)
    ids = sample_ids(HELD_OUT_SEED, np.arange(count, dtype=np.int64), held_out.samples)

    def read(chosen: npt.NDArray[np.int64]) -> Any:
        data = cast_floats(held_out.read(chosen, chosen), MASTER_DTYPES[plan.precision])
        return placed_plainly(objective, data)

    found = []
    for state in states:
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
        for name, _ in list(model.named_buffers()):
            put_buffer(model, name, state[name])
        with evaluating(model):  # of each state: a class may change weights by its own `eval`, and back
            # Read anew each time: a program may change its inputs in place.
            one = _measured(model, objective, metrics, [read(ids[at : at + 1]) for at in range(count)])
            with _drawing(model, range(count), whole := read(ids)):
                loss, weight = objective(model, whole)
        apart = abs(float(loss) / float(weight) - one.loss)
        is_sum = apart <= TOLERANCES["evaluation"]["fp32"] * abs(one.loss)
        changed = tuple(name for name, weight in model.named_parameters() if not torch.equal(weight, state[name]))
        found.append(dataclasses.replace(one if is_sum else Evaluated(math.nan, one.weight), changed=changed))
    return found


def _drawing(model: nn.Module, places: range, rows: object) -> contextlib.AbstractContextManager[object]:
    """Return a block in which a model that draws as it is evaluated does so for the samples at these places of theirs.

    Every evaluation draws the same for a sample, whatever the step.
    """
    randomness: SampleRandomness | None = getattr(model, DRAWS_BY, None)
    if randomness is None:
        return contextlib.nullcontext()
    return randomness.during(SampleRows(np.array(places, dtype=np.int64), 0, length_of(rows)))


def _measured(model: nn.Module, objective: Objective, metrics: Sequence[Metric], rows: Sequence[Any]) -> Evaluated:
    loss_sum = weight_sum = 0.0
    totals: list[dict[str, npt.NDArray[np.float64]]] = [{} for _ in metrics]
    for at, row in enumerate(rows):
        returned: list[object] = []
        hook = model.register_forward_hook(lambda module, given, output, kept=returned: kept.append(output))
        with _drawing(model, range(at, at + 1), row):
            loss, weight = objective(model, row)
        hook.remove()
        loss_sum, weight_sum = loss_sum + float(loss), weight_sum + float(weight)
        with _drawing(model, range(at, at + 1), row):  # a pass of its own, which draws the same as that of the loss
            logits = next_token_logits(model, row) if objective is next_token and _reads(metrics) else None
        for metric, total in zip(metrics, totals, strict=True):
            outputs = logits if logits is not None else returned[-1] if returned else None
            if isinstance(metric, RewardsOfPairs):
                outputs = getattr(objective, "told")["rewards"]  # noqa: B009  # an objective is a plain callable else
            for name, value in metric.measure(outputs, row).items():
                vector = value.detach().double().reshape(-1).numpy()
                total[name] = total.get(name, np.zeros_like(vector)) + vector
    if not weight_sum:
        raise NothingToLearn(
            f"the {len(rows)} held-out samples that the proof reads have no item to measure the loss on",
            "the objective's weights add up to zero over the first of the held-out data's order",
            "check their labels: are all of them masked?",
        )
    whole = LossTotal(loss_sum, weight_sum)
    values = {
        name: value
        for metric, total in zip(metrics, totals, strict=True)
        for name, value in metric.values(total, whole).items()
    }
    return Evaluated(loss_sum / weight_sum, weight_sum, values)


def _reads(metrics: Sequence[Metric]) -> bool:
    return any(metric.reads_outputs for metric in metrics)
