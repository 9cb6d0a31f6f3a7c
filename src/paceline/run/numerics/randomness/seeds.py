"""Seeds as a pure function of the task's seed and the step: nothing to save, nothing to restore."""

from __future__ import annotations

import torch

_MASK_63 = (1 << 63) - 1


def seed_at(seed: int, step: int) -> int:
    """Return the seed of every micro-batch of a step (splitmix64 of seed and step).

    It is the same for all: what tells samples apart comes later, from where they stand (run/randomness).
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & _MASK_63


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the random numbers of the CPU and of `device`.

    torch.manual_seed also notes a seed for every kind of accelerator that is not in use, each with a stack trace for
    later error messages, which takes half a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
