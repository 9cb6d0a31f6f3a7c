"""Values brought into place by several threads: read from a file, or copied out of one that is mapped."""

from __future__ import annotations

import errno
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoint.files.past_caches import read_into
from paceline.checkpoint.files.threads import Hands, at_once

TASK_BYTES = 2**22  # that a thread copies before it takes the next
FEW_BYTES = 2**18  # that are not handed to a thread: that would cost more than it spares
AHEAD = 4  # copies for each thread that wait for it


class Copies:
    """Copies under way; used in a `with`, which waits for them and raises what one of them raised.

    They are made by threads of Python's and not by those that torch computes with, which wait turning.
    """

    def __init__(self) -> None:
        self._hands: Hands | None = None
        self._pending: deque[Future[None]] = deque()

    def begin(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the values in place, now or beside the caller."""
        to, of = host_bytes(target), host_bytes(values)
        if to is None or of is None or target.dtype != values.dtype or of.size < FEW_BYTES:
            target.copy_(values)
            return
        hands = self._at_work()
        for begin in range(0, of.size, TASK_BYTES):
            piece = slice(begin, begin + TASK_BYTES)
            self._pending.append(hands.submit(np.copyto, to[piece], of[piece]))
        self._wait()

    def reads(self, target: torch.Tensor) -> bool:
        """Return whether values come into this place by reading them: where they lie one after the other, and many."""
        return target.numel() * target.element_size() >= FEW_BYTES and host_bytes(target) is not None

    def begin_reading(self, target: torch.Tensor, descriptor: int, begin: int, end: int) -> bool:
        """Read the part of a file into its place, beside the caller; return False where that must be copied instead."""
        to = host_bytes(target)
        if to is None or to.size != end - begin:
            return False
        hands = self._at_work()
        for at in range(0, to.size, TASK_BYTES):
            self._pending.append(hands.submit(_read, descriptor, begin + at, to[at : at + TASK_BYTES].data))
        self._wait()
        return True

    def _at_work(self) -> Hands:
        if self._hands is None:
            self._hands = Hands(at_once(), "copy")
        return self._hands

    def _wait(self) -> None:
        while len(self._pending) > AHEAD * at_once():
            self._pending.popleft().result()

    def __enter__(self) -> Copies:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for future in self._pending:
                future.result()
        finally:
            if self._hands is not None:
                self._hands.__exit__(kind, error, trace)


def _read(descriptor: int, at: int, into: memoryview) -> None:
    """Read a part of a file. Raises OSError, also where the file has become shorter."""
    if (count := read_into(descriptor, at, into)) != len(into):
        raise OSError(errno.EIO, f"the file ends at byte {at + count}")


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[Any] | None:
    """Return the bytes of a tensor as they lie in the host's memory; None where they lie elsewhere, or with gaps."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    view: npt.NDArray[Any] = flat.detach().reshape(-1).view(torch.uint8).numpy()
    return view
