"""What a GPU holds for this process: tensors, as its allocator counts them, and what is beside the allocator.

Beside it are the CUDA context, workspaces of libraries and channels of NCCL: 1.3 to 2 GiB that no other process can
have, so a device must have them to spare. The allocator does not know of them; the driver does.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from paceline.cluster.catalog.assumed import CUDA_RUNTIME_BYTES

READ_SECONDS = 1.0  # between two looks at the device: libraries take their workspaces when they are first used
# More than this beside the allocator is not one process's own: other programs are on the device. A rank with NCCL was
# seen to hold 2.0 GiB, tensors of half a GiB included (one H200, torch 2.11); each further group takes some 100 MB.
MOST_BESIDE = 4 << 30


@dataclass(frozen=True)
class AllocatorBytes:
    """What torch's allocator counts on one device, for this process."""

    now: int  # of tensors
    peak: int  # of tensors, since the peak was forgotten
    reserved: int  # of the device, free blocks included
    retries: int  # how often the allocator was emptied for want of memory


def allocator_bytes(device: torch.device) -> AllocatorBytes:
    """Return what the allocator counts, without the names of its 170 other figures: those take 0.4 ms to write out."""
    found = torch.cuda.memory_stats_as_nested_dict(device)
    if not found:  # the device was not used yet
        return AllocatorBytes(0, 0, 0, 0)
    tensors, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
    return AllocatorBytes(tensors["current"], tensors["peak"], reserved["current"], found["num_alloc_retries"])


class BesideAllocator:
    """Measures what this process holds of a device beside its allocator: the most that was seen."""

    def __init__(self, device: torch.device, nvml: Any = None) -> None:
        """`nvml` is NVIDIA's management library, as the module pynvml has it; None imports that when it is needed."""
        self._device, self._processes = device, ProcessesOnDevice(device, nvml)
        self._own = 0  # the most that was known to be this process's
        self._most = -1  # the most of the device that anybody held beside this process's allocator
        self._read_at = -READ_SECONDS

    def bytes(self, at_once: bool = False) -> int:
        """Return the bytes; the device is looked at now and then, or `at_once`."""
        now = time.monotonic()
        if at_once or now - self._read_at >= READ_SECONDS:
            self._read_at = now
            self._look()
        return self._own or int(CUDA_RUNTIME_BYTES.value)

    def forget(self) -> None:
        """Measure anew from here on: what a world that is over had taken may be free."""
        self._own, self._most, self._read_at = 0, -1, -READ_SECONDS

    def _look(self) -> None:
        beside, reserved = beside_allocator(self._device)
        if beside <= self._most:
            return
        self._most = beside
        own, alone = self._processes.held()
        if own is not None and not alone:
            self._own = max(self._own, own - reserved)
        elif beside <= MOST_BESIDE:
            self._own = max(self._own, beside)
        elif own is not None:
            self._own = max(self._own, own - reserved)
        # Else others hold an unknown part of it, and what was known before counts.


def beside_allocator(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device in use beside this process's allocator, whose ever they are, and the allocator's."""
    reserved = allocator_bytes(device).reserved
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - reserved), reserved


class ProcessesOnDevice:
    """Asks NVIDIA's management library which processes compute on a device. It is absent, or refuses, in many places:

    in a container it may know processes by other numbers, and parts of a device (MIG) have no such list.
    """

    def __init__(self, device: torch.device, nvml: Any = None) -> None:
        self._device, self._nvml = device, nvml
        self._handle: Any = None
        self._is_closed = False

    def held(self) -> tuple[int | None, bool]:
        """Return the bytes that this process holds, None where nobody knows, and whether it is alone on the device.

        Where nobody knows it is taken to be alone.
        """
        if self._is_closed or not self._opened():
            return None, True
        try:
            listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            self._is_closed = True
            return None, True
        own = [each.usedGpuMemory for each in listed if each.pid == os.getpid() and each.usedGpuMemory]
        return (int(own[0]), len(listed) == 1) if own else (None, True)

    def _opened(self) -> bool:
        """Return whether the library has the device. It stays open: opening it takes tens of milliseconds."""
        if self._handle is not None:
            return True
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            self._is_closed = True
            return False
        try:
            self._nvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(self._device).uuid
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError:
            self._is_closed = True
        return self._handle is not None
