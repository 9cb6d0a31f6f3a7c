"""What an objective returns: a sum of losses and how many items it is over. Anything else is told in words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.errors import ConfigError


class NoSum(ConfigError):
    """What an objective returns is no sum with a weight."""

    def __init__(self, objective: object, returned: str) -> None:
        super().__init__(
            f"the objective{_named(objective)} returned {returned}",
            "a step divides the summed loss by the number of items over all micro-batches and devices: it needs both",
            'return loss_sum, items: the loss summed over the batch (reduction="sum") and how many items it is over, '
            "such as labels.numel()",
        )


def as_sum(found: object, objective: object) -> tuple[Any, Any]:
    """Return what an objective has returned as (loss sum, weight).

    Raises NoSum where it is no such pair, and ConfigError for a weight that has a gradient, which nobody would follow.
    """
    if not isinstance(found, tuple | list) or len(found) != 2:
        kind = "Tensor" if isinstance(found, Tensor) else type(found).__name__  # of a trace it is a fake one
        several = f"{len(found)} values" if isinstance(found, tuple | list) else f"a {kind} alone"
        raise NoSum(objective, several)
    loss, weight = found
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise NoSum(objective, f"a loss of shape {list(loss.shape)}, which is not one number")
    if isinstance(weight, Tensor) and weight.requires_grad:
        raise ConfigError(
            f"the objective{_named(objective)} returned a number of items that has a gradient",
            "a step divides by the items of all micro-batches and devices as by any number: what leads back through it"
            " would be left out without a word",
            "items.detach(), where that is meant; or what is learnt of it as a part of the loss",
        )
    return loss, weight


def back_through(loss: Tensor, objective: object) -> None:
    """Run the backward pass of a loss. Raises ConfigError where nothing in the loss leads back to a weight.

    What shards or parts of a sequence exchange in a backward pass all ranks wait for: none of them may leave it out.
    """
    if not getattr(loss, "requires_grad", False):
        raise ConfigError(
            f"the objective{_named(objective)} returned a loss that leads back to no weight",
            "it is a number of its own, as of a micro-batch in which nothing counts, or it was detached: every"
            " micro-batch has a backward pass, which other devices may wait for",
            "where nothing counts the sum of what the model gives, times 0: return outputs.sum() * 0.0, 0",
        )
    loss.backward()


def _named(objective: Any) -> str:
    """Return the name of an objective, inside of what is around it, after a blank; "" where it has none."""
    while inner := getattr(objective, "_objective", None) or getattr(objective, "func", None):
        objective = inner
    return f" {name}" if (name := getattr(objective, "__name__", "")) else ""
