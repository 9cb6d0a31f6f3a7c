"""A test's process as who takes orphans, as the first process of a container does, which is in their session.

Elsewhere the system itself wakes a stopped process whose parent dies (SIGHUP and SIGCONT to a group that is orphaned).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

import pytest

PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def takes_orphans() -> Iterator[None]:
    """Have processes below this one become its children when their parents die within the block."""
    if sys.platform != "linux":
        pytest.skip("only Linux lets a process take orphans")
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
