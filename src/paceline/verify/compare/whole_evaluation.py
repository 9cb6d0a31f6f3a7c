"""Whether an evaluation is a sum over rows: the loss in evaluation mode, and metrics of the user's own.

Held-out rows are read in pieces too. A model that takes statistics over them where it is evaluated, or a metric that
looks at all rows of a piece together, gives another number for every layout, and decides otherwise when to stop.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.spec.proof.records import FirstDifference
from paceline.task.metrics.metric import LossTotal
from paceline.task.metrics.own import OwnMetric
from paceline.task.models.build import evaluating
from paceline.task.models.held import buffers_kept
from paceline.task.objective import Objective, logits_of
from paceline.verify.compare.tolerance import TOLERANCES

MOST = TOLERANCES["evaluation"]["fp32"]  # parts of a model may compute in fp32 whatever they are asked for
FAMILY = "evaluation not a sum over rows"
LIKELY = (
    "an evaluation is not a sum over rows: {name} of {rows} rows is {whole:.6g} in one piece and {cut:.6g} in pieces of"
    " {pieces}, so it would follow the micro-batches and ranks of a layout. Where the model is evaluated, statistics"
    " are those of training (running ones); a metric returns (sum, count) of its rows, each for itself; for what looks"
    " at all predictions, such as an AUC, a metric of torchmetrics with thresholds"
)
LOSS = "the loss in evaluation mode"
# (the first row, how many) -> a block in which random numbers are theirs, and the rows
Read = Callable[[int, int], tuple[contextlib.AbstractContextManager[object], Any]]
PieceSizes = Sequence[int]


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated: a model by an objective and metrics, on rows that `read` gives."""

    model: nn.Module
    objective: Objective
    metrics: Sequence[OwnMetric]
    read: Read

    def measured(self, sizes: Sequence[int]) -> dict[str, tuple[float, float]]:
        """Return (value, what a difference of it is relative to) of the loss and each metric, in pieces of these sizes.

        The model is left as it was.
        """
        loss = weight = magnitude = 0.0
        totals: list[dict[str, npt.NDArray[np.float64]]] = [{} for _ in self.metrics]
        sizes_of: list[dict[str, npt.NDArray[np.float64]]] = [{} for _ in self.metrics]  # signs aside
        with evaluating(self.model), buffers_kept(self.model), torch.no_grad():
            for outputs, rows, of_piece, items in self._pieces(sizes):
                loss, magnitude, weight = loss + of_piece, magnitude + abs(of_piece), weight + items
                for metric, total, size in zip(self.metrics, totals, sizes_of, strict=True):
                    for name, value in metric.measure(outputs, rows).items():
                        vector = value.double().reshape(-1).numpy()
                        total[name] = total.get(name, np.zeros_like(vector)) + vector
                        size[name] = size.get(name, np.zeros_like(vector)) + abs(vector)
        by = weight or 1.0
        found = {LOSS: (loss / by, magnitude / abs(by))}
        for metric, total, size in zip(self.metrics, totals, sizes_of, strict=True):
            values, of_rows = (metric.values(each, LossTotal(loss, weight)) for each in (total, size))
            found |= {f"the metric {name}": (value, of_rows[name]) for name, value in values.items()}
        return found

    def _pieces(self, sizes: Sequence[int]) -> Iterator[tuple[object, Any, float, float]]:
        """Yield (what the model returned, the rows, their loss, their items) of each piece."""
        whole = logits_of(self.objective)
        returned: list[object] = []
        hook = self.model.register_forward_hook(lambda module, given, output: returned.append(output))
        start = 0
        try:
            for size in sizes:
                drawing, rows = self.read(start, size)
                with drawing:
                    loss, items = self.objective(self.model, rows)
                    outputs = whole(self.model, rows) if whole and self.metrics else returned[-1] if returned else None
                yield outputs, rows, float(loss), float(items)
                start += size
        finally:
            hook.remove()


def evaluation_apart(evaluation: Evaluation, cuts: Sequence[PieceSizes], reach: float) -> FirstDifference | None:
    """Return what says that an evaluation depends on how its rows are cut, None where it does not, or none can tell.

    The first of the cuts is the whole. `reach` is what a loss counts as at least.
    """
    try:
        whole, again, *others = (evaluation.measured(sizes) for sizes in (cuts[0], *cuts))
    except Exception:  # whatever a program says to rows that are not held out, or to fewer of them: the story tells
        return None
    for sizes, other in zip(cuts[1:], others, strict=True):
        for name, (value, _) in whole.items():
            cut, _ = other.get(name, (math.nan, 0.0))
            # Rows may cancel, in pieces too: it is their own sizes that rounding is relative to.
            of_rows = [size for each in (whole, *others) if math.isfinite(size := each.get(name, (0.0, 0.0))[1])]
            least = max(*of_rows, reach if name == LOSS else 0.0, 1e-300)
            far = abs(cut - value) / least if math.isfinite(cut) else math.inf
            if math.isfinite(value) and far > MOST and again.get(name, (math.nan,))[0] == value:
                return _told(name, value, cut, far, sizes)
    return None


def _told(name: str, whole: float, cut: float, far: float, sizes: PieceSizes) -> FirstDifference:
    rows, pieces = sum(sizes), " + ".join(map(str, sizes))
    return FirstDifference(
        quantity="whole batch", name=name, step=1, rank=0, relative=far, ratio=cut / whole if whole else math.nan,
        ours=cut, reference=whole, copies_agree=True, tensors=(name,), tensors_in_all=1, family=FAMILY,
        likely=LIKELY.format(name=name, rows=rows, whole=whole, cut=cut, pieces=pieces),
    )  # fmt: skip
