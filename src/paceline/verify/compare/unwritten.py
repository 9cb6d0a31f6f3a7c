"""Memory that nobody wrote, with other contents than a proof's: a program that reads it then gives other numbers.

In a proof torch fills what it allocates (with NaN, and the largest whole numbers), in every process and every call
alike, so that two layouts which read it may agree. Of what libraries allocate without torch, the C library can fill
what it hands out; one that cannot leaves it as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

M_PERTURB = -6  # mallopt(3): memory is filled with the complement of this byte as it is handed out; 0 fills nothing
BYTE = 0x80  # its complement, 0x7f in every byte, is a number near the largest in all formats


@contextlib.contextmanager
def other_contents() -> Iterator[None]:
    """Have memory that nobody wrote hold other values for a while: torch fills none, and the C library does."""
    settings: Any = torch.utils.deterministic  # its class has the switch, and torch's types do not know it
    fills = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    _perturb(BYTE)
    try:
        yield
    finally:
        _perturb(0)
        settings.fill_uninitialized_memory = fills


def _perturb(byte: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's alone
    if mallopt is not None:
        mallopt(M_PERTURB, byte)
