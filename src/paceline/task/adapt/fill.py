"""First values of adapters: a function of the seed and the layer's name, or read from a folder in peft's format.

Like initial weights (task/models/init.py) they depend on no layout: any rank fills its part of any of them alone. The
magnitudes of DoRA are norms of rows of the frozen weight; ranks that hold parts of the rows add their squares.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.spec.adapt.adapter import AdapterSpec
from paceline.task.adapt.linear import MAGNITUDE, A, AdaptedLinear, B
from paceline.task.adapt.peft import read_adapter
from paceline.task.models.held import is_spread
from paceline.task.models.init import Corner, fill, parameter_seed
from paceline.task.plain_names import plain_name


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers that have an adapter, by the names that they have without torch's wrappers."""
    every = model.named_modules()
    return {plain_name(name): module for name, module in every if isinstance(module, AdaptedLinear)}


def fill_adapters(model: nn.Module, seed: int) -> None:
    """Give the adapters of a model, or of a stage of one, their first values; weights must be in place.

    Parameters may be DTensors. Every rank that shares a layer calls it.
    """
    layers = adapted_layers(model)
    if not layers:
        return
    spec = next(iter(layers.values())).spec
    if spec.weights:
        read_adapter(model, layers, spec)
        return
    for name, layer in layers.items():
        _fill(f"{name}.{A}", layer.lora_A, first_values(f"{name}.{A}", layer.lora_A, spec, seed))
        second = torch.zeros(layer.lora_B.shape)
        if spec.init == "random":
            second = first_values(f"{name}.{B}", layer.lora_B, spec, seed)
        _fill(f"{name}.{B}", layer.lora_B, second)
        if layer.lora_magnitude_vector is not None:
            _fill(f"{name}.{MAGNITUDE}", layer.lora_magnitude_vector, row_norms(layer))


def first_values(name: str, like: Tensor, spec: AdapterSpec, seed: int) -> Tensor:
    """Return the values that a thin matrix [rank, features] begins with, in fp32 on the CPU.

    Those of peft: even over +-1 / sqrt(features) (kaiming, a = sqrt 5), or normal with a deviation of 1 / rank.
    """
    generator = torch.Generator().manual_seed(parameter_seed(name, seed))
    values = torch.empty(like.shape, dtype=torch.float32)
    if spec.init == "gaussian":
        return values.normal_(0.0, 1.0 / spec.rank, generator=generator)
    bound = 1.0 / math.sqrt(like.shape[1])
    return values.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def row_norms(layer: AdaptedLinear) -> Tensor:
    """Return the norm of what each output reads of the frozen weight, fp32 [out] on the CPU; of a sharded one, over all
    its parts.

    Squares are added in fp64: however the rows are cut, the norm is then the same number in fp32.
    """
    weight, along = layer.weight, layer.inputs_dim
    across = 1 - along
    if not is_spread(weight):
        return weight.double().square().sum(along).sqrt().float().cpu()
    (chunk,) = weight.__create_chunk_list__()
    local = weight.to_local().double()
    squares = torch.zeros(weight.shape[across], dtype=torch.float64, device=local.device)
    squares[chunk.offsets[across] : chunk.offsets[across] + chunk.sizes[across]] = local.square().sum(along)
    for dimension, placement in enumerate(weight.placements):
        if not placement.is_replicate():
            dist.all_reduce(squares, group=weight.device_mesh.get_group(dimension))
    return squares.sqrt().float().cpu()


def _fill(name: str, parameter: Tensor, values: Tensor) -> None:
    assert tuple(values.shape) == tuple(parameter.shape), name

    def part(offsets: Corner, sizes: Corner) -> Tensor:
        return values[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]

    fill(parameter, part)
