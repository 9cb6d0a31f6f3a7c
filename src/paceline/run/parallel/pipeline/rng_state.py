"""Where the random numbers stand, as a tensor that can travel from one pipeline stage to the next."""

from __future__ import annotations

import torch


def random_state(device: torch.device) -> torch.Tensor:
    """Return where the random numbers of the CPU and of `device` stand, uint8 [bytes] on `device`."""
    state = torch.default_generator.get_state()
    if device.type == "cuda":
        state = torch.cat([state, torch.cuda.default_generators[device.index].get_state()])
    return state.to(device)


def restore_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Go on with random numbers from where `random_state` was taken."""
    state = state.cpu()
    size = torch.default_generator.get_state().numel()
    torch.default_generator.set_state(state[:size])
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].set_state(state[size:])
