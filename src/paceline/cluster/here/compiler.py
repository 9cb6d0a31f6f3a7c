"""Whether torch's compiler can make code for the device that a rank computes on."""

from __future__ import annotations

import platform

from paceline.errors import ConfigError

# torch 2.13's inductor writes calls of at::vec into kernels which it then compiles without that namespace.
_NO_VECTORS = "torch's compiler writes C++ that does not compile on a CPU without vector instructions (AVX2)"


def cannot_compile(device: str) -> str:
    """Return why torch's compiler cannot be used on a kind of device, such as "cpu"; empty where it can."""
    import torch

    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    lacks_vectors = is_x86 and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    return _NO_VECTORS if device == "cpu" and lacks_vectors else ""


def refuse_to_compile(device: str) -> None:
    """Raise ConfigError where torch's compiler cannot be used on a kind of device."""
    if because := cannot_compile(device):
        raise ConfigError("plan.compile = true", because, "plan.compile = false")
