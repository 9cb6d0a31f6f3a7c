"""Names the mistake of a training loop from the weights with which its gradient counts each micro-batch.

A gradient is a sum over micro-batches, each with a factor: one over the number of all items where the loop is right.
Common mistakes are other factors, such as one over the number of the rank's own items, times the number of ranks. Each
of them is tried on a sample of the gradient's values; what fits is the mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.verify.compare.difference import times, wide

SAMPLED = 4096  # values of a gradient that are looked at, spread over all parameters
SAY_SO = (
    "what the loop does to the gradient of the whole batch before its update, optimizer= has to do as well, in a hook"
    " of what it makes (register_step_pre_hook)"
)
CLIPPED = "the gradient is one device's, clipped by value at {limit:.6g}: "
FITS = {"fp32": 1e-3, "fp64": 1e-7}  # largest norm of what is left over that of the gradient


@dataclass
class MicroBatches:
    """What one device computed of a step, micro-batch by micro-batch."""

    losses: list[float] = field(default_factory=list)  # sums
    weights: list[float] = field(default_factory=list)  # items
    ranks: list[int] = field(default_factory=list)  # which part, from 0, a micro-batch belongs to
    gradients: list[torch.Tensor] = field(default_factory=list)  # of the summed loss, float64 [SAMPLED or fewer]

    @property
    def number(self) -> int:
        """How many parts (ranks with rows of their own) there are."""
        return max(self.ranks) + 1

    def per_part(self, values: Sequence[float]) -> list[float]:
        """Return the sum of the values over each part."""
        sums = [0.0] * self.number
        for rank, value in zip(self.ranks, values, strict=True):
            sums[rank] += value
        return sums


def sampled(gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return some values of the parameters' gradients as one vector; a parameter that has none counts as zeros."""
    stride = max(1, sum(parameter.numel() for parameter in parameters.values()) // SAMPLED)
    empty = torch.zeros(1, dtype=torch.float64)
    pieces = []
    for name, parameter in parameters.items():
        if name in gradients:
            pieces.append(wide(gradients[name].detach().flatten()[::stride]).flatten().cpu())
        else:
            numbers = 2 if parameter.is_complex() else 1
            pieces.append(empty.expand(numbers * -(-parameter.numel() // stride)))
    return torch.cat(pieces)


def named_mistake(seen: torch.Tensor, before: torch.Tensor | None, parts: MicroBatches, dtype: str) -> str | None:
    """Return the mistake that explains a gradient, "" where there is none, None where nothing known explains it.

    `seen` is the loop's gradient, `before` that of its last step.
    """
    basis = torch.stack(parts.gradients, dim=1)  # [values, micro-batches]
    if not bool(seen.any()):
        return "all gradients are zero: they are cleared after the update, or no loss reached them"
    for name, factors in _factors(parts):
        expected = basis @ torch.tensor(factors, dtype=torch.float64)
        if _fits(seen, expected, dtype):
            return name
        if before is not None and _fits(seen, expected + before, dtype):
            return _together("gradients of the step before are still there: zero_grad was forgotten", name)
    for name, factors in _factors(parts):
        expected = basis @ torch.tensor(factors, dtype=torch.float64)
        size = float(expected @ expected)
        scale = float(seen @ expected) / size if size else 0.0
        if scale and _fits(seen, scale * expected, dtype):
            return _together(name, _scale_text(scale, parts))
    limit = float(seen.abs().max())
    if _fits(seen, (basis.sum(1) / sum(parts.weights)).clamp(-limit, limit), dtype):
        return CLIPPED.format(limit=limit) + SAY_SO
    return None


def named_loss(told: float, parts: MicroBatches, dtype: str) -> str | None:
    """Return how a reported loss that is wrong was computed, None where no known mistake explains it."""
    for name, factors in _factors(parts, "the reported loss"):
        value = sum(factor * loss for factor, loss in zip(factors, parts.losses, strict=True))
        if name and abs(told - value) <= FITS[dtype] * abs(told):
            return name
    return None


def _fits(seen: torch.Tensor, expected: torch.Tensor, dtype: str) -> bool:
    return bool((seen - expected).norm() <= FITS[dtype] * seen.norm())


def _together(*texts: str) -> str:
    return "; and ".join(text for text in texts if text)


def _factors(parts: MicroBatches, what: str = "the gradient") -> Iterator[tuple[str, list[float]]]:
    """Yield (mistake, factor of each micro-batch's sum of `what`); the first is right and has no name."""
    weights, ranks, count = parts.weights, parts.ranks, len(parts.weights)
    own, ones = parts.per_part(weights), parts.per_part([1.0] * count)
    total = sum(weights)
    yield "", [1 / total] * count
    if max(ones) > 1:
        yield (
            f"{what} is a mean of the micro-batches' means: each micro-batch divides by its own number of items,"
            " and the sum by how many micro-batches there are; divide by the items of the whole batch instead",
            [1 / (parts.number * ones[rank] * max(weight, 1.0)) for rank, weight in zip(ranks, weights, strict=True)],
        )
        numbers = [ranks[:index].count(rank) for index, rank in enumerate(ranks)]
        together = [sum(w for w, n in zip(weights, numbers, strict=True) if n == number) for number in numbers]
        yield (
            f"{what} is a mean of the micro-batches' means: all ranks share the number of items of a micro-batch,"
            " but micro-batches have different numbers; divide by the items of the whole batch instead",
            [1 / (max(ones) * items) for items in together],
        )
        last = [number == ones[rank] - 1 for number, rank in zip(numbers, ranks, strict=True)]
        for divisors in (weights, [total / parts.number] * count):
            yield (
                "only the last micro-batch counts: gradients are cleared between micro-batches of one step",
                [is_last / (parts.number * max(divisor, 1.0)) for is_last, divisor in zip(last, divisors, strict=True)],
            )
    if parts.number > 1:
        yield (
            f"{what} is a mean of the ranks' means: each rank divides by its own number of items; divide by the"
            " number of items on all ranks instead",
            [1 / (parts.number * max(own[rank], 1.0)) for rank in ranks],
        )
        yield (
            f"{what} is rank 0's own: it is not reduced over the ranks",
            [(rank == 0) / max(own[0], 1.0) for rank in ranks],
        )


def _scale_text(scale: float, parts: MicroBatches) -> str:
    """Return what a factor that all of the gradient has in common says."""
    micro_batches = len(parts.weights) / parts.number
    known = {
        parts.number: f"it is {parts.number} times too large, the number of ranks: a sum stands where a mean belongs",
        1 / parts.number: f"it is divided by {parts.number}, the number of ranks, once too often",
        micro_batches: f"it is {micro_batches:g} times too large, the number of micro-batches of a rank",
        1 / micro_batches: f"it is divided by {micro_batches:g}, the number of micro-batches of a rank, once too often",
        sum(parts.weights): "it is not divided by the number of items",
        1 / sum(parts.weights): "it is divided by the number of items twice",
    }
    for factor, text in known.items():
        if factor != 1 and abs(scale - factor) <= 1e-3 * factor:
            return text
    return f"it is {times(scale)} what one device has"
