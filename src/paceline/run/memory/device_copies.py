"""DeviceCopies: batches on their way to a CUDA device, beside what it computes."""

from __future__ import annotations

from collections import deque

import torch

from paceline.run.loop.loader import BatchStream, StepBatch, moved
from paceline.run.numerics.nested import leaves_of


class DeviceCopies:
    """Copies batches from pinned host memory on a stream of its own, in the order in which they are received.

    Neither the host nor the device waits for a copy before the batch is used: what is launched after `receive` comes
    after the copy. A batch that was sent and is not wanted any more is dropped with the next one that is received.
    """

    def __init__(self, batches: BatchStream) -> None:
        """`batches` are what is copied, for their device."""
        self._batches, self._device, self._stream = batches, batches.device, torch.cuda.Stream(batches.device)
        self._sent: deque[tuple[StepBatch, torch.cuda.Event]] = deque()

    def send(self, batch: StepBatch) -> StepBatch:
        """Begin to copy a batch from host memory and return it as it will be on the device."""
        with torch.cuda.stream(self._stream):
            there = moved(batch, self._batches.on_device)
            self._sent.append((there, self._stream.record_event()))
        return there

    def receive(self, batch: StepBatch) -> StepBatch:
        """Return a batch that was sent: what is launched from now on finds it whole."""
        current = torch.cuda.current_stream(self._device)
        while self._sent:
            sent, event = self._sent.popleft()
            if sent is batch:
                current.wait_event(event)
                break
        for leaf in leaves_of([micro.data for micro in batch.micro_batches]):
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(current)  # else its memory could be copied into while it is still read
        return batch
