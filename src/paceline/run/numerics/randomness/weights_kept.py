"""Weights that a pass changes, put back after it: looks at a program must not change what is trained.

A critic clamps its weights in its forward pass, and a momentum encoder follows there: in place, or by other memory for
its data (`weight.data = ...`), which no operator tells of. Hardly any program does so, and weights are large: one is
copied as it is about to be written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.task.models.held import is_spread


class WeightsKept(TorchDispatchMode):
    """Within it, weights of a model that an operator writes into are noted; at its end all of them are as they were."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, others: Sequence[Tensor] = ()) -> None:
        """Keep a model's weights, and other tensors that its program holds."""
        super().__init__()
        kept = (*model.parameters(), *others)
        self._data = [(weight, weight.detach()) for weight in kept if _place_of(weight)]
        # Several where weights are views of one flat tensor, of which an operator may write any part.
        self._at: dict[int, list[Tensor]] = defaultdict(list)
        for _, data in self._data:
            self._at[_place_of(data)].append(data)
        self._kept: dict[int, list[Tensor]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: within other modes what a program compiles runs uncompiled, and surveys would not tell of it."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # operators of a higher order have none
        if schema is not None and schema.is_mutable:
            for written in tree_leaves((args, kwargs)):
                if isinstance(written, Tensor) and (place := _place_of(written)) in self._at.keys() - self._kept:
                    self._kept[place] = [data.clone() for data in self._at[place]]
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for weight, data in self._data:
            if weight.data_ptr() != data.data_ptr():
                weight.data = data
        with torch.no_grad():
            for place, values in self._kept.items():
                for data, value in zip(self._at[place], values, strict=True):
                    data.copy_(value)
        self._kept.clear()


def _place_of(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; 0 of what has none, or is spread over ranks."""
    if is_spread(tensor) or tensor.device.type == "meta" or not tensor.numel():
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and other classes of tensors
        return 0
