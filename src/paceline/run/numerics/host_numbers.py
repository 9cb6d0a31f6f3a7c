"""The numbers of a step that the host must know: one small vector, copied once, while host and device go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.task.models.held import whole_of


def one_vector(numbers: Sequence[Any], more: Tensor | None, device: torch.device) -> Tensor:
    """Return numbers and tensors of one element as one fp64 vector on the device, and `more` of them behind.

    Waits for nothing: a number of the host is written by the device, a tensor of the host is copied behind its work.
    """
    parts = [_element(number, device) for number in numbers]
    return torch.cat(parts if more is None else [*parts, more.to(device, torch.float64, non_blocking=True)])


def _element(number: Any, device: torch.device) -> Tensor:
    if not isinstance(number, Tensor):
        return torch.full((1,), float(number), dtype=torch.float64, device=device)
    whole = whole_of(number)
    return whole.detach().to(device, torch.float64, non_blocking=True).reshape(1)


class NumbersOnTheWay:
    """A vector on its way to the host. The host may do something else until it asks for the numbers."""

    def __init__(self, vector: Tensor) -> None:
        self._event: Any = None
        self._host = vector
        if vector.device.type == "cuda":
            self._host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._host.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> list[float]:
        """Return the numbers once they are here: the one time in a step that the host waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
