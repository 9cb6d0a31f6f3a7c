"""Where the random numbers stand, as a tensor that can travel from one pipeline stage to the next."""

from __future__ import annotations

from typing import Any

import torch

from paceline.plan.feasible.torch_version import MIXED_STAGE_INPUTS, is_older

# Before torch 2.12 all that a stage is sent needs a gradient, and so must be able to have one: bytes travel as fp32,
# and zeros are sent back.
AS_FLOATS = is_older(MIXED_STAGE_INPUTS)


def random_state(device: torch.device) -> torch.Tensor:
    """Return where the random numbers of the CPU and of `device` stand, a number from 0 to 255 for each byte."""
    state = torch.default_generator.get_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.default_generators[device.index].get_state()])
    return state.to(device, torch.float32 if AS_FLOATS else None)


def beside_random_state(hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the hidden states that came with a random state, which gets a gradient of zeros where it needs one."""
    found: torch.Tensor = _Beside.apply(hidden, state) if state.requires_grad else hidden
    return found


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        ctx.zeros = torch.zeros_like(state)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, ctx.zeros


def restore_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Go on with random numbers from where `random_state` was taken."""
    state = state.detach().to("cpu", torch.uint8)
    size = torch.default_generator.get_state().numel()
    torch.default_generator.set_state(state[:size])
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].set_state(state[size:])
