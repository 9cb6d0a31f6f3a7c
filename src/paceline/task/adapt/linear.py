"""A linear layer whose weight is frozen, and beside it a trained product of two thin matrices.

    y = W x + scale * B^T (A drop(x))                       LoRA (Hu et al. 2021, arXiv:2106.09685, equation 3)
    y = m / |W + scale * B^T A| * (W x + scale * B^T A x)   DoRA (Liu et al. 2024, arXiv:2402.09353, equation 5)

The norm is one number for each output; gradients take it as a constant (DoRA, section 4.3). Both thin matrices are kept
as [rank, features]: a tensor axis cuts features, and shards cut the rank, never the same dimension twice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.spec.adapt.adapter import NF4, AdapterSpec
from paceline.task.adapt.nf4 import Packed, pack, packed_product, sizes_of
from paceline.task.models.held import held_part

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
NAMES = (A, B, MAGNITUDE)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
VALUES, SCALES, WIDE = "weight_nf4", "weight_scales", "weight_wide"  # buffers of a weight in four bits
PACKED = (VALUES, SCALES, WIDE)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's."""
    return name.rpartition(".")[2] in NAMES


def is_packed(name: str) -> bool:
    """Return whether a buffer of this name is a part of a weight in four bits."""
    return name.rpartition(".")[2] in PACKED


class AdapterDropout(nn.Dropout):
    """Dropout before the thin matrices of an adapter, whose random numbers are those of samples on every layout.

    Layers that a tensor axis splits are called by other code than whole ones. The random numbers are drawn in this
    module's own forward pass, which is the same in both, and layers of other widths have places of their own.
    """

    def __init__(self, p: float, width: int) -> None:
        """`width` is the number of input features of the whole layer."""
        super().__init__(p)
        self.drawing_place = width

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., in] of x [..., in]."""
        return F.dropout(x, self.p, self.training)


class AdaptedLinear(nn.Linear):
    """A frozen linear layer with an adapter; `adapted` makes it of a plain one, which stays the same object."""

    spec: AdapterSpec
    is_on = True  # whether the adapter counts: without it the layer is its frozen base
    inputs_dim = 1  # which dimension of the frozen weight has the input features
    lora_A: nn.Parameter  # [rank, in]
    lora_B: nn.Parameter  # [rank, out]
    lora_magnitude_vector: nn.Parameter | None  # [out], of DoRA
    lora_dropout: AdapterDropout  # where the adapter has any

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        out = adapted_product(self, x, self.weight, self.lora_A, self.lora_B, self.lora_magnitude_vector)
        return out if self.bias is None else out + self.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> object:
        """Change all tensors by `fn`, as nn.Module does, and keep the frozen weight in the dtype it rests in."""
        super()._apply(fn, recurse)
        rest_in_base_dtype(self)
        return self

    def extra_repr(self) -> str:
        """Return what is printed of the layer."""
        return f"{super().extra_repr()}, {self.spec.kind} rank={self.spec.rank}"


class TurnedLinear(AdaptedLinear):
    """An adapted layer whose frozen weight lies as [in, out]: transformers' Conv1D, of GPT-2."""

    inputs_dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        out = adapted_product(self, x, self.weight.T, self.lora_A, self.lora_B, self.lora_magnitude_vector)
        return out if self.bias is None else out + self.bias


class PackedLinear(AdaptedLinear):
    """An adapted layer whose frozen weight rests in four bits, in buffers; ranks may hold a part of the values."""

    weight_nf4: Tensor
    weight_scales: Tensor
    weight_wide: Tensor

    @property
    def packed(self) -> Packed:
        """The weight in four bits."""
        return Packed((self.out_features, self.in_features), self.weight_nf4, self.weight_scales, self.weight_wide)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as it computes, in fp32; made anew each time."""
        return self.packed.to(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        out = adapted_product(self, x, self.packed, self.lora_A, self.lora_B, self.lora_magnitude_vector)
        return out if self.bias is None else out + self.bias

    @torch.no_grad()
    def pack(self, weight: Tensor) -> None:
        """Put a whole weight [out, in] into the four bits, or this rank's part of them."""
        packed = pack(weight.to(self.weight_nf4.device))
        for buffer, values in zip(
            (self.weight_nf4, self.weight_scales, self.weight_wide), (packed.values, packed.scales, packed.wide),
            strict=True,
        ):  # fmt: skip
            local, (begin,), (size,) = held_part(buffer)
            local.copy_(values.narrow(0, begin, size))


def is_turned(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' Conv1D: a linear one, whose weight lies as [in, out]."""
    kind = type(layer)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def adapted(layer: nn.Module, spec: AdapterSpec) -> AdaptedLinear:
    """Return the same layer, now with an adapter beside its weight, without values yet."""
    turned = is_turned(layer)
    layer.__class__ = TurnedLinear if turned else AdaptedLinear
    assert isinstance(layer, AdaptedLinear)
    if turned:
        layer.in_features, layer.out_features = layer.weight.shape
    layer.spec = spec
    layer.lora_A = nn.Parameter(layer.weight.detach().new_empty(spec.rank, layer.in_features))
    layer.lora_B = nn.Parameter(layer.weight.detach().new_empty(spec.rank, layer.out_features))
    magnitude = nn.Parameter(layer.weight.detach().new_empty(layer.out_features)) if spec.kind == "dora" else None
    layer.register_parameter(MAGNITUDE, magnitude)
    if spec.dropout:
        layer.lora_dropout = AdapterDropout(spec.dropout, layer.in_features)
    if spec.base_dtype == NF4:
        return _packed(layer)
    rest_in_base_dtype(layer)
    return layer


def _packed(layer: AdaptedLinear) -> PackedLinear:
    """Return the same layer with its weight in four bits; of one on the meta device they are filled later."""
    weight = layer.weight.detach()
    del layer._parameters["weight"]
    layer.__class__ = PackedLinear
    assert isinstance(layer, PackedLinear)
    dtypes = (torch.uint8, torch.uint8, torch.int32)
    for name, count, dtype in zip(PACKED, sizes_of((layer.out_features, layer.in_features)), dtypes, strict=True):
        layer.register_buffer(name, torch.zeros(count, dtype=dtype, device=weight.device))
    if not weight.is_meta:
        layer.pack(weight)
    return layer


def rest_in_base_dtype(layer: AdaptedLinear) -> None:
    """Keep the layer's frozen weight in the dtype in which it is to rest."""
    dtype = DTYPES.get(layer.spec.base_dtype)
    weight = layer._parameters.get("weight")
    if dtype is not None and weight is not None and not weight.requires_grad and weight.dtype != dtype:
        weight.data = weight.data.to(dtype)


def adapted_product(
    layer: AdaptedLinear,
    x: Tensor,
    weight: Tensor | Packed,
    thin_in: Tensor,
    thin_out: Tensor,
    magnitude: Tensor | None,
    total: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> Tensor:
    """Return the layer's product with its adapter, without the bias, of these parts of its matrices.

    `thin_in` is [rank, in], `thin_out` [rank, out]. Where ranks hold parts of the input features, `total` sums the
    squares of the parts; what is returned is then a part of a sum.
    """
    spec = layer.spec
    thin_in, thin_out = thin_in.to(x.dtype), thin_out.to(x.dtype)
    if not layer.is_on:
        return _product(x, weight)
    drops = spec.dropout > 0.0 and layer.lora_dropout.training
    dropped = layer.lora_dropout(x) if drops else x
    added = F.linear(F.linear(dropped, thin_in), thin_out.T) * spec.scale
    plain = _product(x, weight)
    if magnitude is None:
        return plain + added
    norms = _norms(weight.to(x.dtype), thin_in, thin_out, spec.scale, total)
    ratio = (magnitude / norms.to(magnitude.dtype)).to(x.dtype)
    if not drops:
        return ratio * (plain + added)
    return plain + (ratio - 1) * _product(dropped, weight) + ratio * added  # as peft has it: the base sees all of x


def _product(x: Tensor, weight: Tensor | Packed) -> Tensor:
    """Return [..., out] of x [..., in] and a frozen weight, in the dtype of x."""
    return packed_product(x, weight) if isinstance(weight, Packed) else F.linear(x, weight.to(x.dtype))


@torch.no_grad()
def _norms(
    weight: Tensor, thin_in: Tensor, thin_out: Tensor, scale: float, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the norm of every row of the weight with its adapter, [out], in fp32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(wide) + scale * thin_out.to(wide).T @ thin_in.to(wide)
    return total(merged.square().sum(1)).sqrt()
