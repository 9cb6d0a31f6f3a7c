"""Whether the device has made the last update: only then is it one that a rank which outlives a peer hands on.

An update may have collectives of its own: of optimizers that see whole weights, and where copies are brought together.
The host does not wait for them. NCCL's end without an error when their group is aborted, and leave what they had come
to; so an update that the device has not made by then is none.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from paceline.patience import Patience

LOOK_SECONDS = 0.01
UPDATE_SECONDS = 2.0  # more than a device takes for the end of an update, once its gradients are summed


class LastUpdate:
    """Knows when the device has passed the end of the last update. On a CPU it has when the host has."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._end: Any = None  # a CUDA event
        self.launches = 0  # how often an update was given to the device; counted of no CPU

    def launched(self) -> None:
        """Note that all of an update has been given to the device."""
        if self._on_cuda:
            end = torch.cuda.Event()
            end.record()  # first: one that is not recorded counts as passed, and another thread may ask
            self._end = end
            self.launches += 1

    def is_made(self, within_seconds: float = UPDATE_SECONDS) -> bool:
        """Return whether the device has made it, or does within the time. Any thread may ask."""
        patience = Patience(within_seconds)
        try:
            while self._end is not None and not self._end.query():
                if patience.is_over:
                    return False
                time.sleep(LOOK_SECONDS)
        except RuntimeError:  # of a device that is broken
            return False
        return True
