"""The built-in metrics, as sums and counts. Names and definitions are scikit-learn's where it has the metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.spec.data.labels import IGNORED
from paceline.task.metrics.metric import LossTotal, Metric, Totals, ratio
from paceline.task.metrics.metric_inputs import OWN, counted, labels_of, predictions_of


@dataclass(frozen=True)
class Accuracy:
    """The share of labels that are predicted: the largest logit, or of a column that says yes or no its sign.

    With `top`, a label counts where it is among so many of the largest logits.
    """

    name: str = "accuracy"
    top: int = 1
    reads_outputs: bool = True

    def measure(self, outputs: object, batch: object) -> Mapping[str, Tensor]:
        """Return how many labels are predicted, and how many there are."""
        logits, labels, of_classes = counted(predictions_of(outputs, self.name), labels_of(batch, self.name), self.name)
        if not of_classes:
            if self.top > 1:
                raise ConfigError(
                    f"the metric '{self.name}' needs classes", "a column says yes or no", "the metric 'accuracy'"
                )
            counts = labels != IGNORED
            right = ((logits > 0) == (labels > 0)) & counts
            return {"right": right.sum(), "count": counts.sum()}
        best = logits.topk(min(self.top, logits.shape[-1])).indices if self.top > 1 else logits.argmax(-1, keepdim=True)
        return {"right": (best == labels[:, None]).any(-1).sum(), "count": torch.tensor(len(labels))}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return the share."""
        return {self.name: ratio(totals["right"][0], totals["count"][0])}


@dataclass(frozen=True)
class F1:
    """F1 = 2 tp / (2 tp + fp + fn): of all classes together (micro), or the mean over those that are met (macro).

    A class is met that is a label or a prediction. Columns that say yes or no are classes; a single one is the positive
    class alone.
    """

    name: str
    reads_outputs: bool = True

    def measure(self, outputs: object, batch: object) -> Mapping[str, Tensor]:
        """Return for each class how often it was right, how often it was predicted, and how often it was a label."""
        logits, labels, of_classes = counted(predictions_of(outputs, self.name), labels_of(batch, self.name), self.name)
        if of_classes:
            classes, found = logits.shape[-1], logits.argmax(-1)
            return {
                "right": torch.bincount(labels[found == labels], minlength=classes),
                "predicted": torch.bincount(found, minlength=classes),
                "labels": torch.bincount(labels, minlength=classes),
            }
        counts = labels != IGNORED
        yes, so = (logits > 0) & counts, (labels > 0) & counts
        return {"right": (yes & so).sum(0), "predicted": yes.sum(0), "labels": so.sum(0)}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return the mean."""
        right, both = totals["right"], totals["predicted"] + totals["labels"]
        if self.name == "f1_micro":
            return {self.name: ratio(2 * right.sum(), both.sum())}
        met = both > 0
        return {self.name: ratio((2 * right[met] / both[met]).sum(), met.sum())}


@dataclass(frozen=True)
class Distance:
    """The root of the mean squared difference between outputs and labels, or the mean of its size.

    A label that is no number (NaN) counts nothing, as in the objective "regression".
    """

    name: str
    reads_outputs: bool = True

    def measure(self, outputs: object, batch: object) -> Mapping[str, Tensor]:
        """Return the sum over all labels that are numbers, and how many there are."""
        found, labels = predictions_of(outputs, self.name), labels_of(batch, self.name)
        if found.shape == (*labels.shape, 1):
            found = found.squeeze(-1)
        if found.shape != labels.shape:
            raise ConfigError(
                f"the metric '{self.name}' cannot compare outputs {list(found.shape)} with labels {list(labels.shape)}",
                "it takes a number for each label", OWN,
            )  # fmt: skip
        counts = ~labels.isnan()
        apart = (found.double() - labels.double()).where(counts, 0.0)
        total = apart.square().sum() if self.name == "rmse" else apart.abs().sum()
        return {"total": total, "count": counts.sum()}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return the mean, or its root."""
        mean = ratio(totals["total"][0], totals["count"][0])
        return {self.name: math.sqrt(mean) if self.name == "rmse" else mean}


@dataclass(frozen=True)
class Perplexity:
    """The exponential of the mean loss, which is in nats."""

    name: str = "perplexity"
    reads_outputs: bool = False

    def measure(self, outputs: object, batch: object) -> Mapping[str, Tensor]:
        """Return nothing: the loss is known."""
        return {}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return the perplexity, infinite where it is beyond double precision."""
        try:
            return {self.name: math.exp(loss.total / loss.weight)}
        except OverflowError:
            return {self.name: math.inf}


@dataclass(frozen=True, eq=False)
class BitsPerByte:
    """The loss of a text in bits over the bytes of that text, whatever its tokens are.

    An end of a document is predicted as well, and stands for no byte.
    """

    bytes_of_token: Tensor  # int64 [vocab]
    name: str = "bits_per_byte"
    reads_outputs: bool = False

    def measure(self, outputs: object, batch: object) -> Mapping[str, Tensor]:
        """Return the bytes of the labels that count."""
        labels = labels_of(batch, self.name)
        return {"bytes": self.bytes_of_token.to(labels.device)[labels[labels != IGNORED]].sum()}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return the bits of a byte."""
        return {self.name: ratio(loss.total / math.log(2), totals["bytes"][0])}


def built_in(name: str, top: int | None) -> Metric:
    """Return the built-in metric of a name that needs nothing but batches; `top` is the K of `top_K`."""
    if top is not None:
        return Accuracy(name, top)
    made: dict[str, Metric] = {"accuracy": Accuracy(), "f1_macro": F1(name), "f1_micro": F1(name),
                               "perplexity": Perplexity(), "rmse": Distance(name), "mae": Distance(name)}  # fmt: skip
    return made[name]
