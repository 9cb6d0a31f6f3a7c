"""How much a program computes, as a number that is the same on every machine and at every load: not in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# Seconds of a call of an operator, of a number that it writes, and of a product's FLOP. One core of a Xeon of 2019 took
# 6e-6, 6e-10, and 1e-11 (fp32) to 2e-11 (fp64) on 2026-11-28. Only how they stand to each other matters much.
CALL, NUMBER, FLOP = 6e-6, 6e-10, 2e-11


class WorkSeen(TorchDispatchMode):
    """Adds up the `seconds` that one core would take for what is computed within it, forward and backward.

    Example: a product of [4, 8] and [8, 16] is one call, writes 64 numbers, and takes 2 x 4 x 8 x 16 = 1,024 FLOPs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._formulas = FlopCounterMode(display=False).flop_registry

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.seconds += CALL
        if not getattr(func, "is_view", False):  # operators of a higher order say nothing of it
            self.seconds += NUMBER * sum(x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor))
        if (formula := self._formulas.get(getattr(func, "overloadpacket", func))) is not None:
            self.seconds += FLOP * formula(*args, **kwargs, out_val=found)
        return found
