"""What a rank's memory is spent on, measured."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_STATUS = Path("/proc/self/status")


def _kib_of(field: str) -> int | None:
    if not _STATUS.exists():
        return None
    _, found, rest = _STATUS.read_bytes().partition(f"\n{field}:".encode())
    return int(rest.split(maxsplit=1)[0]) if found else None


def peak_bytes(device: torch.device) -> int:
    """Return the most memory this rank has used: the device's allocator on CUDA, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kib = _kib_of("VmHWM")
    return 1024 * (kib if kib is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def resident_bytes() -> int:
    """Return the memory this process holds now, 0 where the system does not say."""
    return 1024 * (_kib_of("VmRSS") or 0)


def _local_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return this rank's bytes of weights, gradients and optimizer state, each storage counted once."""
    parameters = list(model.parameters())
    state = [value for slots in optimizer.state.values() for value in slots.values() if isinstance(value, torch.Tensor)]
    return {
        "weights": _local_bytes([p.detach() for p in parameters]),
        "gradients": _local_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": _local_bytes(state),
    }
