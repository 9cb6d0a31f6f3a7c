"""How much a program computes, as a number that is the same on every machine and at every load: not in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# FLOPs that take a core as long: a call of an operator about 10 µs, a number that one writes about 2 ns.
CALL, NUMBER = 4e4, 8.0


class WorkSeen(TorchDispatchMode):
    """Adds up `flops` of what is computed within it, forward and backward: those of products, calls and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.flops += CALL
        if not getattr(func, "is_view", False):  # operators of a higher order say nothing of it
            self.flops += NUMBER * sum(x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor))
        if (formula := self._formulas.get(getattr(func, "overloadpacket", func))) is not None:
            self.flops += formula(*args, **kwargs, out_val=found)
        return found
