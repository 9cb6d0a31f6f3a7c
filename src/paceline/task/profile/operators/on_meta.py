"""A forward pass on the device "meta": shapes and dtypes as on fake tensors of a CPU, without what these import.

`FakeTensorMode` imports torch's compiler and sympy, a second and more of a slow core, and hands every operator through
Python. On "meta" torch's own kernels give the shapes. What chooses its operators by the device it finds would choose
others there: such calls end the pass (`NotOnMeta`), as does whatever mixes devices or asks for values, which torch
itself refuses. Then the program is followed on fake tensors, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class NotOnMeta(Exception):
    """A program calls what computes in another way on a CPU than on the device "meta"."""


# What torch computes by other operators on a CPU: attention in one kernel, pooling in one dimension without places.
_BY_DEVICE: frozenset[Callable[..., Any]] = frozenset({
    F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.max_pool1d, F.max_pool1d,
    torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd, torch.lstm_cell, torch.gru_cell,
    torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.quantize_per_tensor,
})  # fmt: skip
_ASKS = frozenset({Tensor.is_cpu.__get__, Tensor.is_meta.__get__, Tensor.is_cuda.__get__})  # type: ignore[attr-defined]


class OnMeta(TorchFunctionMode):
    """Has what a program makes lie on "meta", and ends a pass that a CPU would make by other operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _BY_DEVICE or func in _ASKS:
            raise NotOnMeta(getattr(func, "__name__", str(func)))
        kwargs = kwargs or {}
        if kwargs.get("device") is not None and torch.device(kwargs["device"]) == CPU:
            raise NotOnMeta(f"{getattr(func, '__name__', func)} on the CPU")
        return func(*args, **kwargs)
