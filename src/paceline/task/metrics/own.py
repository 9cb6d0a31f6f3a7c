"""A metric of the user's: a function of what the model returned and of the batch, whose results add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError, PacelineError
from paceline.foreign_errors import says_no_memory
from paceline.task.metrics.metric import LossTotal, Totals, ratio

TAKEN = "a tensor with a number for each row, (sum, count), or a dict of such by names"


@dataclass(frozen=True)
class OwnMetric:
    """A function `metric(outputs, batch)` that returns one of TAKEN. The metric is the sum over the count."""

    function: Callable[[Any, Any], Any]
    name: str
    reads_outputs: bool = True

    def measure(self, outputs: object, batch: object) -> Mapping[str, Tensor]:
        """Return (sum, count) of each of the function's numbers, by name. Raises ConfigError where it fails on them."""
        try:
            found = self.function(outputs, batch)
        except (PacelineError, MemoryError):
            raise
        except Exception as error:  # whatever a function of the user's raises
            if says_no_memory(error):
                raise
            raise ConfigError(
                f"the metric '{self.name}' raised {type(error).__name__}: {error}",
                f"it was called with outputs = {_kind(outputs)}, batch = {_kind(batch)}",
                f"a function that reads these, and returns {TAKEN}",
            ) from error
        named = found if isinstance(found, Mapping) else {self.name: found}
        return {str(name): self._sum_and_count(name, value) for name, value in named.items()}

    def values(self, totals: Totals, loss: LossTotal) -> dict[str, float]:
        """Return the sum over the count of each."""
        return {name: ratio(pair[0], pair[1]) for name, pair in totals.items()}

    def _sum_and_count(self, name: object, value: object) -> Tensor:
        """Return [sum, count] in fp64."""
        parts = value if isinstance(value, tuple | list) else [value]
        if any(isinstance(part, Tensor) and part.is_meta for part in parts):
            raise ConfigError(
                f"the metric '{self.name}' returned a tensor without values for '{name}'",
                "it is on the device 'meta', which holds shapes alone", "a tensor made of the outputs, or of numbers",
            )  # fmt: skip
        if isinstance(value, tuple | list) and len(value) == 2:
            return torch.stack([torch.as_tensor(part).detach().double().cpu().sum() for part in value])
        if isinstance(value, Tensor) and value.dim() == 1:
            return torch.tensor([float(value.detach().double().sum()), float(len(value))], dtype=torch.float64)
        kind = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
        raise ConfigError(
            f"the metric '{self.name}' returned a {type(value).__name__} {kind}".rstrip() + f" for '{name}'",
            "a mean over a part of the samples does not add up to the mean over all of them",
            f"{TAKEN}; for what looks at all predictions, such as an AUC, a metric of torchmetrics with thresholds",
        )


def _kind(value: object) -> str:
    """Return what a metric was given, in words: of tensors their shapes, of what holds them what is in it, by name."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype)[6:]}"
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} of " + (", ".join(f"{name}: {_kind(each)}" for name, each in value.items()) or "nothing")
    if isinstance(value, tuple | list):
        return f"a {kind} of ({', '.join(_kind(each) for each in value)})"
    return "None" if value is None else f"a {kind}"
