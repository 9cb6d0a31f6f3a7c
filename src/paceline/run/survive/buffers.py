"""Buffers as they were before a step: a step that is broken off in its passes has moved running statistics already.

Weights change in the update alone, and running statistics in every forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BufferName = tuple[nn.Module, str]
SMALL_BYTES = 2**16  # of a buffer that is copied in every step: such as running statistics, and no mask


class BuffersBefore:
    """Copies of those of a model's buffers that passes may change, from the beginning of a step to its end."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[BufferName, tuple[Tensor, int]] = {}  # and how often each had been changed in place
        self._moved: set[BufferName] = set()
        self._before: dict[BufferName, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Note that a step begins. Large buffers are copied in the first one, and where they have ever changed."""
        now = {
            (module, name): buffer
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        for place, (known, version) in self._known.items():
            if now.get(place) is not known or version != known._version:
                self._moved.add(place)
        wanted = self._moved if self._known else now.keys()
        self._known = {place: (buffer, buffer._version) for place, buffer in now.items()}
        self._before = {
            place: buffer.detach().clone()
            for place, buffer in now.items()
            if place in wanted or buffer.nbytes <= SMALL_BYTES
        }

    def end(self) -> None:
        """Note that the step is made."""
        self._before = {}

    @torch.no_grad()
    def put_back(self) -> None:
        """Give buffers the values from before the step, where one was broken off."""
        for (module, name), before in self._before.items():
            held = module._buffers[name]
            if held is not None and held.shape == before.shape:
                held.copy_(before)
            else:
                module._buffers[name] = before
        self._before = {}
