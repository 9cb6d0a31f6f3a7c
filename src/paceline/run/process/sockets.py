"""The connections of this process's gloo groups, which are shut where a world is given up.

Aborting a gloo group ends nothing (torch 2.13): its connections stay open as long as anything holds the group, and a
peer that waits at the other end waits for its time-out. A connection that is shut is an error at both ends at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

OPEN = Path("/proc/self/fd")

# Which descriptors belong to groups is a fact about the process, as is the list of groups that torch keeps.
_OPENED: set[tuple[int, str]] = set()


@contextlib.contextmanager
def noted(backend: str) -> Iterator[None]:
    """Note the connections that are opened in the block, where it makes a group of gloo's."""
    before = _connections()
    yield
    if backend == "gloo":
        _OPENED.update(_connections() - before)


def shut_connections() -> None:
    """Shut the noted connections that are still there. Their descriptors are closed by whoever opened them."""
    for descriptor, _ in _OPENED & _connections():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo's listener ends the process for it
                end.shutdown(socket.SHUT_RDWR)
    _OPENED.clear()


def _connections() -> set[tuple[int, str]]:
    """Return this process's sockets: descriptors, and the names that the system has for what they lead to."""
    found = set()
    for path in OPEN.iterdir() if OPEN.is_dir() else ():
        with contextlib.suppress(OSError):  # it was the descriptor of this look
            name = str(path.readlink())
            if name.startswith("socket:"):
                found.add((int(path.name), name))
    return found
