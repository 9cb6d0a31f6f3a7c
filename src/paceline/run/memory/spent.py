"""What a rank's memory is spent on, measured."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.run.memory.on_gpu import READ_SECONDS, BesideAllocator, allocator_bytes, beside_allocator
from paceline.task.models.held import local_of

_STATUS = Path("/proc/self/status")
_KILOBYTES = re.compile(rb"^(\w+):\s*(\d+) kB$", re.M)


def process_bytes() -> dict[str, int]:
    """Return the bytes that Linux reports of this process, by field; empty where nothing can be read of it."""
    try:
        descriptor = os.open(_STATUS, os.O_RDONLY)
        try:
            status = os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)
    except OSError:  # another system, or no descriptor is left: a look at the memory ends no run
        return {}
    return {name.decode(): 1024 * int(count) for name, count in _KILOBYTES.findall(status)}


class MemoryMeter:
    """Measures the most memory this rank has used.

    On CUDA that is what the device must hold for this process: the allocator's peak, and what the process holds beside
    it (`on_gpu`). On a CPU it is resident memory without the pages of mapped files, libraries and a corpus: they belong
    to the system's cache, which takes them back when memory is short, and of a library all processes share them. A
    forked rank has mapped next to none of them, and one that was started by itself some 80 MB.
    """

    def __init__(self, device: torch.device, nvml: Any = None) -> None:
        """`nvml` is NVIDIA's management library, as the module pynvml has it; None imports that."""
        self._device = device
        self._beside = BesideAllocator(device, nvml) if device.type == "cuda" else None
        self._earlier = 0  # the peak before the last `begin_anew`
        self._known, self._read_at = (0, 0), 0.0  # the process's peak as it was read, what of it counts, and when

    def peak_bytes(self) -> int:
        """Return the peak so far."""
        if self._beside is not None:
            return max(self._earlier, allocator_bytes(self._device).peak + self._beside.bytes())
        resident, now = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        # Though it has not grown, it is read anew after a while: fewer pages of files may be in it.
        if resident != self._known[0] or now - self._read_at > READ_SECONDS:
            status = process_bytes()
            peak = status.get("VmHWM", resident)  # what was there before this program began is in the other
            self._known, self._read_at = (resident, max(0, peak - status.get("RssFile", 0))), now
        return self._known[1]

    def beside_bytes(self) -> int:
        """Return what of all these figures is no tensor: what a CUDA process holds beside its allocator, as it is now.

        0 on a CPU, where nothing tells the two apart.
        """
        return self._beside.bytes(at_once=True) if self._beside is not None else 0

    def others_bytes(self) -> int:
        """Return what other programs hold of the device, as far as that can be told from what is this process's.

        0 on a CPU, whose memory is the machine's.
        """
        if self._beside is None:
            return 0
        beside, _ = beside_allocator(self._device)
        return max(0, beside - self.beside_bytes())

    def begin_anew(self) -> None:
        """Measure the peak of what comes from here on by itself, where the device can: see `recent_bytes`."""
        if self._beside is not None:
            self._earlier = self.peak_bytes()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._beside.forget()

    def recent_bytes(self) -> int:
        """Return the peak since `begin_anew`; on a CPU what is used now, since nothing measures such a peak there."""
        if self._beside is None:
            return self.now_bytes()
        return allocator_bytes(self._device).peak + self.beside_bytes()

    def now_bytes(self) -> int:
        """Return what this rank uses at the moment, measured as the peak is."""
        if self._beside is not None:
            return allocator_bytes(self._device).now + self.beside_bytes()
        status = process_bytes()
        return max(0, status.get("VmRSS", 0) - status.get("RssFile", 0))


def _local_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {}
    for tensor in tensors:
        local = local_of(tensor)
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return this rank's bytes of weights, gradients and optimizer state, each storage counted once.

    What rests in a GPU's host memory is not counted: it is no memory of the device.
    """
    parameters = list(model.parameters())
    state = [
        value
        for parameter, slots in optimizer.state.items()
        for value in slots.values()
        if isinstance(value, torch.Tensor) and value.device == parameter.device
    ]
    return {
        "weights": _local_bytes([p.detach() for p in parameters]),
        "gradients": _local_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimizer": _local_bytes(state),
    }


def spent_now(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    meter: MemoryMeter,
    maximum: Callable[[list[float]], list[float]],
) -> dict[str, float]:
    """Return the bytes that are used at this moment, by what they are spent on, on the fullest rank."""
    held = held_bytes(model, optimizer)
    *parts, rest = maximum([*map(float, held.values()), float(meter.now_bytes() - sum(held.values()))])
    return {**dict(zip(held, parts, strict=True)), "the rest": max(0.0, rest)}


def spent_on(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    meter: MemoryMeter,
    maximum: Callable[[list[float]], list[float]],
) -> tuple[dict[str, float], float]:
    """Return (bytes by what they are spent on, peak bytes) of the fullest rank; `maximum` is over all ranks.

    The parts add up to the peak. CUDA tells what is no tensor, the runtime, apart from activations and buffers.
    """
    held = held_bytes(model, optimizer)
    beside = meter.beside_bytes()  # first: the peak counts as much
    *parts, runtime, peak = maximum([*map(float, held.values()), float(beside), float(meter.peak_bytes())])
    found = dict(zip(held, parts, strict=True))
    if not runtime:
        return {**found, "activations_and_runtime": peak - sum(parts)}, peak
    return {**found, "activations_and_buffers": peak - sum(parts) - runtime, "runtime": runtime}, peak
