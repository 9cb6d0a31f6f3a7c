"""Adapters on the tensor axis: thin matrices follow the frozen weight that they stand beside.

The matrix beside the features that are spread is spread with them. The other one is whole on every rank, which has of
its gradients a part of a sum: what a rank computes with it is a part, of the outputs or of the input features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.run.parallel.region import Region, own_bias
from paceline.task.adapt.linear import MAGNITUDE, A, AdaptedLinear, B, adapted_product
from paceline.task.models.layers.collectives import join, share
from paceline.task.models.layers.vocabulary import first_row, local_weight


def _adapted_out(layer: AdaptedLinear, region: Region, x: Tensor) -> Tensor:
    """Return this rank's features of an adapted layer whose outputs are spread: A is whole, and so is its product."""
    magnitude: Tensor | None = layer.lora_magnitude_vector
    own = local_weight(layer.weight)
    if magnitude is not None:
        magnitude = magnitude.narrow(0, first_row(magnitude.shape[0], region.group), own.shape[0])
    out = adapted_product(layer, region.enter(x), own, layer.lora_A, local_weight(layer.lora_B), magnitude)
    bias = own_bias(layer, region)
    return out if bias is None else out + bias


def _adapted_in(layer: AdaptedLinear, region: Region, x: Tensor) -> Tensor:
    """Return this rank's part of the sum of an adapted layer whose inputs are spread, without the bias: B is whole."""

    def total(squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=region.group)
        return squares

    parts = local_weight(layer.weight), local_weight(layer.lora_A), layer.lora_B
    return adapted_product(layer, x, *parts, layer.lora_magnitude_vector, total)


def _adapted_row(layer: AdaptedLinear, region: Region, x: Tensor) -> Tensor:
    out = region.leave(_adapted_in(layer, region, x))
    return out if layer.bias is None else out + layer.bias


def _adapted_split_row(layer: AdaptedLinear, region: Region, x: Tensor) -> Tensor:
    width = local_weight(layer.weight).shape[1]
    return _adapted_row(layer, region, share(x, region.group).narrow(-1, first_row(x.shape[-1], region.group), width))


def _adapted_gathered(layer: AdaptedLinear, region: Region, x: Tensor) -> Tensor:
    out = _adapted_out(layer, region, x)
    return join(out.transpose(-1, -2), region.group).transpose(-1, -2).contiguous()


def adapted_fused(layer: AdaptedLinear, region: Region, rows: list[slice], x: Tensor) -> Tensor:
    weight, thin_out = (torch.cat(parts, dim) for parts, dim in (
        ([layer.weight[part] for part in rows], 0), ([layer.lora_B[:, part] for part in rows], 1)))  # fmt: skip
    every = layer.lora_magnitude_vector
    magnitude = None if every is None else torch.cat([every[part] for part in rows])
    out = adapted_product(layer, region.enter(x), weight, layer.lora_A, thin_out, magnitude)
    return out if layer.bias is None else out + torch.cat([layer.bias[part] for part in rows])


def spread_adapter(
    name: str, layer: AdaptedLinear, dim: int, own_part: Callable[[str, nn.Parameter, int], nn.Parameter]
) -> set[str]:
    """Spread the thin matrix that reads or gives the features of which ranks have parts; the other one stays whole.

    Returns the names of the whole parameters: a rank's gradient of these is its part of a sum.
    """
    spread, whole = (B, A) if dim == 0 else (A, B)
    own = own_part(f"{name}.{spread}", getattr(layer, spread), 1)  # both are [rank, features]
    layer.register_parameter(spread, own)
    return {f"{name}.{whole}", f"{name}.{MAGNITUDE}"}


ADAPTED: dict[tuple[str, object], Callable[..., Tensor]] = {
    ("column", AdaptedLinear.forward): _adapted_out,
    ("row", AdaptedLinear.forward): _adapted_row,
    ("split_row", AdaptedLinear.forward): _adapted_split_row,
    ("partial", AdaptedLinear.forward): _adapted_in,
    ("gathered", AdaptedLinear.forward): _adapted_gathered,
}
