"""The state that an optimizer has before its first update, made early since a checkpoint is loaded into it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def knows_fresh_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the state before a first update can be made: of torch's optimizers, and of ours."""
    return type(optimizer).__module__.startswith(("torch.optim.", "paceline."))


def fresh_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], weight: nn.Parameter) -> dict[str, object]:
    """Return what the optimizer's own step() makes for a parameter before its first update.

    Of an optimizer that is not torch's or ours it is what an update with a gradient of zeros leaves: of the right names
    and shapes to load into, and of no other use.
    """
    scratch = nn.Parameter(torch.zeros_like(weight, memory_format=torch.preserve_format))
    scratch.grad = torch.zeros_like(scratch, memory_format=torch.preserve_format)
    held = optimizer.state
    with torch.no_grad():
        if isinstance(optimizer, torch.optim.SGD):
            # torch makes it from the first gradient: for dampening 0 the same as beginning with zeros.
            return {"momentum_buffer": scratch.grad} if group["momentum"] else {}
        if knows_fresh_state(optimizer):
            begin: Any = optimizer._init_group  # type: ignore[attr-defined]
            lists: list[Any] = [[] for _ in range(begin.__func__.__code__.co_argcount - 2)]
            begin({**group, "params": [scratch]}, *lists)
            return dict(held.pop(scratch))
        others = list(optimizer.param_groups)
        try:
            optimizer.param_groups[:] = [{**group, "params": [scratch]}]
            optimizer.step()
        finally:
            optimizer.param_groups[:] = others
        return dict(held.pop(scratch, {}))
