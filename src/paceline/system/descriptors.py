"""Descriptors: how many files and connections a process may open, which grows with the ranks that it serves."""

from __future__ import annotations

import contextlib
import resource

SPARE = 256  # for what a process opens besides


def make_room(connections: int) -> None:
    """Let this process open so many connections, as far as its system lets it: a limit of 1,024 is the usual one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say: whoever connects is told
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
