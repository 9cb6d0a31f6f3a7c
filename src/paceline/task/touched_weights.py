"""What a program does to weights and gradients outside of plain layers, that some axes or all would lose."""

from __future__ import annotations

from torch import nn

from paceline.errors import ConfigError
from paceline.task.profile.closed import hooked_axes, renormed_axes, summed_axes

HOOKS, SUMMED = "_backward_hooks", "_post_accumulate_grad_hooks"  # of a tensor, as torch keeps them


def touched_axes(model: nn.Module) -> dict[str, str]:
    """Return axis -> why it is closed to a model that touches its weights or gradients by itself.

    Raises ConfigError for gradients that no axis and no update rule can take.
    """
    closed: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, SUMMED, None):
            closed = summed_axes(name)
            break
        if getattr(parameter, HOOKS, None) and not closed:
            closed = hooked_axes(name)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            if module.sparse:
                raise ConfigError(
                    f"'{name}' of {type(model).__name__} has sparse gradients",
                    "norms of gradients, their sums over ranks and the update rules take dense ones",
                    f"{type(module).__name__}(..., sparse=False)",
                )
            if module.max_norm is not None:
                closed |= renormed_axes(name)
    return closed
