"""A metric of torchmetrics, or of its interface: its states are sums, which add up over micro-batches and ranks.

Each part of the samples updates a fresh state; what the state has gained is added over all parts, and the metric is
computed of the whole. So it is exact for uneven batches and the same on every layout, without any collective of
torchmetrics' own. A state that is no sum cannot be had in this way, and is refused by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.task.metrics.metric import LossTotal, Totals
from paceline.task.metrics.metric_inputs import counted, labels_of, predictions_of
from paceline.task.objective import multi_label, regression

METHODS = ("update", "compute", "reset")
PROBE = ((1.0, 2.0), (4.0, 8.0), (0.0, 1.0))  # whose sums along the first dimension are no mean, largest, or list


def keeps_states(found: object) -> bool:
    """Return whether an object has the interface of a metric of torchmetrics."""
    return all(hasattr(found, method) for method in METHODS)


class StateMetric:
    """A metric that keeps states. It gets chances of classes [n, classes] with labels [n], or numbers and labels [n].

    What a model returns for classes and for columns that say yes or no becomes chances first: torchmetrics would guess
    by the values of a batch whether it has to.
    """

    reads_outputs = True

    def __init__(self, metric: Any, name: str, objective: Callable[..., Any]) -> None:
        self._metric, self.name = copy.deepcopy(metric), name
        self._metric.distributed_available_fn = _alone
        self._is_number, self._is_yes_or_no = objective is regression, objective is multi_label
        reductions = getattr(metric, "_reductions", None)
        if not isinstance(reductions, Mapping) or not reductions:
            raise ConfigError(
                f"task.evaluate.metrics: {name} keeps a state of its own",
                "it does not say how its states add up, so they would be of one rank's samples alone",
                "a metric of torchmetrics, or a function of (outputs, batch)",
            )
        self._states = tuple(reductions)
        if hasattr(self._metric, "set_dtype"):
            self._metric.set_dtype(torch.float64)  # sums of floats are then the same however samples are cut
        self._metric.reset()
        wrong = [state for state in self._states if not (isinstance(getattr(self._metric, state), Tensor)
                                                         and _adds_up(reductions[state]))]  # fmt: skip
        if wrong:
            raise ConfigError(
                f"task.evaluate.metrics: {name} cannot be added up over ranks and batches",
                f"its state '{wrong[0]}' is no sum: it keeps all predictions, or is a mean or a largest value",
                "a metric whose states are sums; those of curves, such as AUROC, have them with thresholds = 200",
            )

    def measure(self, outputs: Any, batch: Any) -> Mapping[str, Tensor]:
        """Return what each state gains of a micro-batch, in one row."""
        predictions, labels = self._read(outputs, batch)
        if hasattr(self._metric, "to"):
            self._metric.to(predictions.device)
        self._metric.reset()
        before = {state: getattr(self._metric, state).double().clone() for state in self._states}
        if len(labels):
            self._update(predictions, labels)
        return {state: (getattr(self._metric, state).double() - before[state]).reshape(-1) for state in self._states}

    def _update(self, predictions: Tensor, labels: Tensor) -> None:
        """Give the metric a micro-batch. Raises ConfigError with what it was given where it cannot take that."""
        try:
            self._metric.update(predictions, labels)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            classes = predictions.shape[-1] if predictions.dim() > labels.dim() else 0
            raise ConfigError(
                f"the metric '{self.name}' takes no outputs of shape {list(predictions.shape)} with labels of shape "
                f"{list(labels.shape)}",
                f"{type(self._metric).__name__} raised {type(error).__name__}: {error}",
                f"the metric of its kind for classes, Multiclass... with num_classes={classes}"
                if classes
                else "a metric of torchmetrics for such labels, or a function of (outputs, batch)",
            ) from error

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return what the metric computes of the states' totals: one number, one for each class, or by its names."""
        if hasattr(self._metric, "to"):
            self._metric.to("cpu")
        self._metric.reset()
        for state in self._states:
            start: Tensor = getattr(self._metric, state)
            whole = start.double() + torch.from_numpy(np.asarray(totals[state])).reshape(start.shape)
            # Sums beyond what a float32 counts stay exact in fp64.
            setattr(self._metric, state, whole if start.is_floating_point() else whole.to(start.dtype))
        self._metric._update_count = 1  # otherwise it warns that nothing was updated
        found = self._metric.compute()
        self._metric.reset()
        named = found if isinstance(found, Mapping) else {self.name: found}
        return {key: value for name, each in named.items() for key, value in _numbers(str(name), each).items()}

    def _read(self, outputs: object, batch: object) -> tuple[Tensor, Tensor]:
        raw, labels = predictions_of(outputs, self.name).double(), labels_of(batch, self.name)
        if self._is_number:
            counts = ~labels.isnan()  # the objective leaves out labels that are no number
            numbers = raw.reshape(labels.shape)
            return (numbers, labels) if bool(counts.all()) else (numbers[counts], labels[counts])
        found, of, of_classes = counted(raw, labels, self.name)
        if of_classes:
            return found.softmax(-1), of
        found, of = (each.squeeze(-1) if each.shape[-1] == 1 else each for each in (found, of))
        if self._is_yes_or_no or not labels.is_floating_point():
            return found.sigmoid(), of.long()
        return found, of


def _alone() -> bool:
    """Return that there are no other ranks to gather from: states are added up here."""
    return False


def _adds_up(reduction: object) -> bool:
    """Return whether a state's reduction over ranks [ranks, ...] is their sum."""
    if not callable(reduction):
        return False
    probe = torch.tensor(PROBE)
    try:
        found = reduction(probe)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False
    return isinstance(found, Tensor) and found.shape == probe.sum(0).shape and bool((found == probe.sum(0)).all())


def _numbers(name: str, value: object) -> dict[str, float]:
    """Return the numbers of what a metric computed, each class's under the name and its number."""
    whole = torch.as_tensor(value).double()
    if whole.numel() == 1:
        return {name: float(whole)}
    if whole.dim() == 1:
        return {f"{name}_{number}": float(each) if not each.isnan() else math.nan for number, each in enumerate(whole)}
    raise ConfigError(
        f"the metric '{name}' computes {list(whole.shape)} numbers", "the journal keeps single numbers and vectors",
        "a metric of one number, or of one for each class",
    )  # fmt: skip
