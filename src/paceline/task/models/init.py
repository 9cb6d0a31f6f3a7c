"""Initial weights that depend on the seed and the parameter's name alone: not on layout, order or device.

Each parameter has its own generators, one for every run of rows, so any rank can draw its part of any parameter without
the rest, and needs no memory for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.task.adapt.linear import PackedLinear, is_adapter
from paceline.task.models.decoder import Decoder
from paceline.task.models.held import Corner, held_part
from paceline.task.plain_names import named_parameters, plain_name

STD = 0.02  # Radford et al. 2019 (GPT-2), as in Llama
# Products that add to the residual stream are scaled down, so that its variance does not grow with depth (GPT-2, 2.3).
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
DRAWN_ELEMENTS = 2**22  # of one generator, in whole rows; part of what initial weights are

PartMaker = Callable[[Corner, Corner], Tensor]  # (offsets, sizes) of a part of a tensor -> its values


class DrawsNothing(TorchFunctionMode):
    """Leaves weights on "meta" as `torch.nn.init` finds them: there they have no values.

    torch would take its reference functions for that, with which its compiler comes.
    """

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        given = (kwargs or {}).get("tensor", args[0] if args else None)
        draws = getattr(func, "__module__", "") == "torch.nn.init" and func.__name__.endswith("_")
        return given if draws and isinstance(given, Tensor) and given.is_meta else func(*args, **(kwargs or {}))


def parameter_seed(name: str, seed: int, run: int = 0) -> int:
    """Return the seed of a parameter's generator for a run of rows: 63 bits of a hash of `seed`, `name` and `run`."""
    text = f"{seed}:{name}" + (f":{run}" if run else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def initial_tensor(name: str, shape: tuple[int, ...] | torch.Size, layers: int, seed: int) -> Tensor:
    """Return a decoder parameter's initial values, in fp32 on the CPU.

    Norms are ones, biases zeros; matrices normal with std 0.02, or 0.02 / sqrt(2 * layers) for those that add to the
    stream.
    """
    return initial_part(name, shape, layers, seed, (0,) * len(shape), tuple(shape))


def initial_part(
    name: str, shape: tuple[int, ...] | torch.Size, layers: int, seed: int, offsets: Corner, sizes: Corner
) -> Tensor:
    """Return the part of a parameter's initial values that begins at `offsets` and has the shape `sizes`.

    Besides the result it needs memory for DRAWN_ELEMENTS, or for one row where that is larger.
    """
    std = STD / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else STD
    return drawn_part(name, shape, std, seed, offsets, sizes)


def drawn_part(
    name: str, shape: tuple[int, ...] | torch.Size, std: float, seed: int, offsets: Corner, sizes: Corner
) -> Tensor:
    """Return a part of a parameter that is normal with a deviation; below two dimensions, zeros of a bias or ones."""
    if len(shape) < 2:
        return torch.zeros(sizes) if name.rpartition(".")[2] == "bias" else torch.ones(sizes)
    part = torch.empty(sizes, dtype=torch.float32)
    run_rows = max(1, DRAWN_ELEMENTS // max(1, math.prod(shape[1:])))
    begin, end = offsets[0], offsets[0] + sizes[0]
    for run in range(begin // run_rows, -(-end // run_rows)) if part.numel() else ():
        first, last = run * run_rows, min((run + 1) * run_rows, shape[0])
        generator = torch.Generator().manual_seed(parameter_seed(name, seed, run))
        drawn = torch.empty((last - first, *shape[1:]), dtype=torch.float32).normal_(0.0, std, generator=generator)
        low, high = max(first, begin), min(last, end)
        drawn = drawn[low - first : high - first]
        for dimension in range(1, len(shape)):
            drawn = drawn.narrow(dimension, offsets[dimension], sizes[dimension])
        part[low - begin : high - begin] = drawn
    return part


def fill(parameter: Tensor | PackedLinear, part: PartMaker) -> None:
    """Copy values into a parameter, or into this rank's shard where the parameter is a DTensor.

    A layer whose weight rests in four bits is asked for all of it, since its scales are those of the whole weight.

    `part` is asked for what this rank holds alone; every rank's must tell of the same tensor. Nothing is communicated.
    """
    with torch.no_grad():
        if isinstance(parameter, PackedLinear):
            shape = parameter.packed.shape
            parameter.pack(part((0, 0), shape))
            return
        local, offsets, sizes = held_part(parameter)
        if local.numel():
            local.copy_(part(offsets, sizes))


def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter of a decoder, one at a time: ordinary tensors and DTensors, whatever they held before."""
    layers = model.config.layers
    for buffer in model.buffers():  # the selection biases of routers, which begin at zero
        buffer.zero_()
    for name, parameter in filled_tensors(model).items():
        if is_adapter(name):
            continue  # it has a rule of its own: task/adapt/fill.py

        shape = shape_of(parameter)

        def part(offsets: Corner, sizes: Corner, name: str = name, shape: Corner = shape) -> Tensor:
            return initial_part(name, shape, layers, seed, offsets, sizes)

        fill(parameter, part)


def shape_of(filled: Tensor | PackedLinear) -> Corner:
    """Return the shape of a parameter, or of a weight in four bits."""
    return filled.packed.shape if isinstance(filled, PackedLinear) else tuple(filled.shape)


def filled_tensors(model: nn.Module) -> dict[str, Tensor | PackedLinear]:
    """Return what gets initial values, by the names of the plain model: parameters, and weights in four bits."""
    found: dict[str, Tensor | PackedLinear] = dict(named_parameters(model))
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found[plain_name(f"{name}.weight")] = module
    return found
