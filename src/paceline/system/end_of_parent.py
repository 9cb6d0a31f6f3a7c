"""A signal for this process at the end of its parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import sys

PARENT_VARIABLE = "PACELINE_PARENT"  # the number of the process that has started this one, and that it ends with
PR_SET_PDEATHSIG = 1


def signal_at_end_of(parent: int, number: int) -> None:
    """Have the system send this process a signal when its parent dies, where the system offers that (Linux).

    A parent that is gone already counts as dying now.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
