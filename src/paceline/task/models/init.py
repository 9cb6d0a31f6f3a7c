"""Initial weights that depend on the seed and the parameter's name alone: not on layout, order or device.

Each parameter has its own generator, so any rank can draw any parameter without the others.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.task.models.decoder import Decoder

STD = 0.02  # Radford et al. 2019 (GPT-2), as in Llama
# Products that add to the residual stream are scaled down, so that its variance does not grow with depth (GPT-2, 2.3).
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


def parameter_seed(name: str, seed: int) -> int:
    """Return the seed of one parameter's generator: 63 bits of a hash of `seed` and `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def initial_tensor(name: str, shape: tuple[int, ...] | torch.Size, layers: int, seed: int) -> Tensor:
    """Return a decoder parameter's initial values, in fp32 on the CPU.

    Norms are ones; matrices normal with std 0.02, or 0.02 / sqrt(2 * layers) for those that add to the stream.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    std = STD / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else STD
    generator = torch.Generator().manual_seed(parameter_seed(name, seed))
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy full `values` into a parameter, or into this rank's shard where the parameter is a DTensor.

    Every rank must hold the same `values`: nothing is communicated.
    """
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            values = values.to(device=parameter.device, dtype=parameter.dtype)
            shard = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(values)


def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter of a decoder, one at a time: ordinary tensors and DTensors, whatever they held before."""
    for name, parameter in named_parameters(model):
        fill(parameter, initial_tensor(name, parameter.shape, model.config.layers, seed))
    for buffer in model.buffers():  # the selection biases of routers, which begin at zero
        buffer.zero_()


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with the names they have in the plain model, without what wrappers put between."""
    wrappers = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, torch's checkpoint_wrapper
    found = []
    for name, parameter in model.named_parameters():
        for wrapper in wrappers:
            name = name.replace(wrapper, "")
        found.append((name, parameter))
    return found
