"""Activations in host memory: what a block keeps for its backward pass leaves the device until it is needed.

Autograd's hooks on saved tensors do it. A storage that several saved tensors are views of travels once, each way. On
CUDA the copies run beside the computation, on a stream of their own, from and to pinned memory, and a block's
backward pass calls for what the block before it will need. On a CPU the same code makes plain copies.

Weights stay where they are, and so does what is too small to be worth a copy.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.task.models.held import is_spread, local_of

SMALLEST_BYTES = 1024  # below, a copy takes longer than the memory is worth


def keep_on_host(blocks: list[nn.Module]) -> None:
    """Make the blocks' forward passes keep on the host what backward passes need. Numbers do not change.

    The blocks run in the order in which they are given.
    """
    link, last = HostCopies(), _Last()
    for number, block in enumerate(blocks):
        block.forward = functools.partial(_forward, block.forward, block, link, last, number == 0)


@dataclass
class _Last:
    """The block that ran last, as long as its backward pass is to come."""

    visit: weakref.ReferenceType[Visit] | None = None


def _forward(
    forward: Any, block: nn.Module, link: HostCopies, last: _Last, is_first: bool, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = last.visit() if last.visit is not None and not is_first else None
    visit = Visit(block, link, before)
    last.visit = weakref.ref(visit)
    try:
        with saved_tensors_hooks(visit.pack, visit.unpack):
            return forward(*args, **kwargs)
    finally:
        visit.end()


class HostCopies:
    """Copies between a device and the host; beside the computation where the device has streams."""

    def __init__(self) -> None:
        self._stream: Any = None
        self.bytes_to_host = 0
        self.bytes_to_device = 0

    def to_host(self, values: Tensor) -> Tensor:
        """Return a copy of a flat tensor in host memory, which may still be on its way."""
        self.bytes_to_host += values.nbytes
        if values.device.type != "cuda":
            return values.clone()
        stream = self._beside(values.device)
        stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(stream):
            copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            copy.copy_(values, non_blocking=True)
        values.record_stream(stream)  # its memory is not used again before the copy is done
        return copy

    def to_device(self, values: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        """Return a copy on the device, and the event after which it is complete (None: it is)."""
        self.bytes_to_device += values.nbytes
        if device.type != "cuda":
            return values.clone(), None
        stream = self._beside(device)  # behind the copy to the host, which is on the same one
        with torch.cuda.stream(stream):
            copy = torch.empty(values.shape, dtype=values.dtype, device=device)
            copy.copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        return copy, arrived

    def _beside(self, device: torch.device) -> Any:
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream


class _Moved:
    """One storage that saved tensors are views of."""

    def __init__(self, values: Tensor, link: HostCopies) -> None:
        self.source: Tensor | None = values  # held until the block ends: no other storage takes its address
        self._host, self._link, self._device = link.to_host(values), link, values.device
        self._copy: Tensor | None = None
        self._arrived: Any = None
        self.users = self._left = 0

    def add_user(self) -> None:
        """Count one more saved tensor that is a view of it."""
        self.users += 1
        self._left = self.users

    def fetch(self) -> None:
        """Start the copy back, where it has not been started."""
        if self._copy is None:
            self._copy, self._arrived = self._link.to_device(self._host, self._device)

    def use(self) -> Tensor:
        """Return the values on the device, for one of the users; after the last one they are dropped there."""
        self.fetch()
        values = self._copy
        assert values is not None
        if self._arrived is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._arrived)
            values.record_stream(stream)
        self._left -= 1
        if not self._left:
            self._copy, self._arrived, self._left = None, None, self.users  # whole again for another backward pass
        return values


@dataclass(frozen=True)
class _View:
    """A saved tensor: its place in a storage on the host."""

    moved: _Moved
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Visit:
    """One forward pass of one block, and what it keeps. `before` is the visit whose backward pass comes next."""

    block: nn.Module
    link: HostCopies
    before: Visit | None
    _moved: dict[tuple[int, int, torch.dtype], _Moved] = field(default_factory=dict)
    _returning: bool = False

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Return what autograd keeps in place of a tensor."""
        if not self._leaves(tensor):
            return tensor
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor._version, tensor.dtype)
        if key not in self._moved:
            length = storage.nbytes() // tensor.element_size()
            self._moved[key] = _Moved(tensor.as_strided((length,), (1,), 0), self.link)
        moved = self._moved[key]
        moved.add_user()
        return _View(moved, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, kept: Tensor | _View) -> Tensor:
        """Return the tensor that `pack` was given."""
        if isinstance(kept, Tensor):
            return kept
        if not self._returning:
            self._returning = True
            if kept.moved.source is None and torch.cuda.is_available():
                self.fetch()
                if self.before is not None:
                    self.before.fetch()
        return kept.moved.use().as_strided(kept.size, kept.stride, kept.offset)

    def fetch(self) -> None:
        """Start to copy back all that the block keeps."""
        for moved in self._moved.values():
            moved.fetch()

    def end(self) -> None:
        """Let go of the device's memory: the forward pass of the block is over."""
        for moved in self._moved.values():
            moved.source = None

    def _leaves(self, tensor: Tensor) -> bool:
        """Return whether a saved tensor is moved: it is no weight, is dense, and is worth it."""
        if is_spread(tensor) or tensor.layout != torch.strided or tensor.device.type == "meta":
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= SMALLEST_BYTES and storage.data_ptr() not in self._weights()

    def _weights(self) -> set[int]:
        """Return the addresses of the block's weights as they are now: gathered, cast or at rest."""
        local = (local_of(p) for p in self.block.parameters())
        return {weight.untyped_storage().data_ptr() for weight in local}
