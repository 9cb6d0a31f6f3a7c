"""Weights that a pass changes in place, put back after it: looks at a program must not change what is trained.

A critic clamps its weights in its forward pass, and a momentum encoder follows there. Hardly any program does so, and
weights are large: one is copied as it is about to be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WeightsKept(TorchDispatchMode):
    """Within it, weights of a model that an operator writes into are noted; at its end all of them are as they were."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        plain = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        self._weights = {place: weight for weight in plain if (place := _place_of(weight))}
        self._kept: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # operators of a higher order have none
        if schema is not None and schema.is_mutable:
            for written in tree_leaves((args, kwargs)):
                if isinstance(written, Tensor) and (place := _place_of(written)) in self._weights.keys() - self._kept:
                    self._kept[place] = self._weights[place].detach().clone()
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for place, value in self._kept.items():
                self._weights[place].copy_(value)
        self._kept.clear()


def _place_of(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; 0 of what has none."""
    if isinstance(tensor, DTensor) or tensor.device.type == "meta" or not tensor.numel():
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and other classes of tensors
        return 0
