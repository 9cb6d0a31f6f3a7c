"""The connections of this process's gloo groups, which are shut where a world is given up.

Aborting a gloo group ends nothing (torch 2.13): its connections stay open as long as anything holds the group, and a
peer that waits at the other end waits for its time-out. A connection that is shut is an error at both ends at once.

Where what a rank was receiving into has gone before the rest of it comes, gloo reads that connection no more, and the
system tells gloo's thread of its end again and again: a core is busy for as long as the group is held. gloo must find
the connection in its epoll when it closes it, or it ends the process. So it stays there, and is told of once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

OPEN = Path("/proc/self/fd")
EPOLL = "anon_inode:[eventpoll]"
WATCHED = re.compile(r"tfd: *(?P<descriptor>\d+) .*data: *(?P<data>[0-9a-f]+) .*ino:(?P<inode>[0-9a-f]+) ")
CHANGE = 3  # EPOLL_CTL_MOD
EVENT = "=IQ" if platform.machine() in ("x86_64", "i686") else "=I4xQ"  # the system's `epoll_event`

Connection = tuple[int, str]  # a descriptor, and the name that the system has for what it leads to

# Which descriptors belong to groups is a fact about the process, as is the list of groups that torch keeps.
_OPENED: set[Connection] = set()
_SHUT: set[Connection] = set()


@contextlib.contextmanager
def noted(backend: str) -> Iterator[None]:
    """Note the connections that are opened in the block, where it makes a group of gloo's."""
    before = _connections()
    yield
    if backend == "gloo":
        _OPENED.update(_connections() - before)


def shut_connections() -> None:
    """Shut the noted connections that are still there. Their descriptors are closed by whoever opened them."""
    for descriptor, name in _OPENED & _connections():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo's listener ends the process for it
                end.shutdown(socket.SHUT_RDWR)
                _SHUT.add((descriptor, name))
    _OPENED.clear()


def quiet_connections() -> None:
    """Have gloo be told once more of the end of each connection that was shut and is still open, and not again.

    Called when nothing waits in the world that was given up: what gloo does with that one look is not waited for.
    """
    _SHUT.intersection_update(_connections())
    for path in OPEN.iterdir() if _SHUT else ():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if str(path.readlink()) == EPOLL:
                for watched in WATCHED.finditer(Path("/proc/self/fdinfo", path.name).read_text()):
                    descriptor = int(watched["descriptor"])
                    if (descriptor, f"socket:[{int(watched['inode'], 16)}]") in _SHUT:
                        _tell_once(int(path.name), descriptor, int(watched["data"], 16))


def _tell_once(epoll: int, descriptor: int, data: int) -> None:
    """Have an epoll tell of a descriptor when something changes, and not for as long as something is there.

    `data` is what it tells with it, gloo's pointer; Python's own `epoll` would put the descriptor in its place.
    """
    event = struct.pack(EVENT, select.EPOLLIN | select.EPOLLET, data)
    ctypes.CDLL(None).epoll_ctl(epoll, CHANGE, descriptor, event)  # which does nothing where it is closed meanwhile


def _connections() -> set[Connection]:
    """Return this process's sockets: descriptors, and the names that the system has for what they lead to."""
    found = set()
    for path in OPEN.iterdir() if OPEN.is_dir() else ():
        with contextlib.suppress(OSError):  # it was the descriptor of this look
            name = str(path.readlink())
            if name.startswith("socket:"):
                found.add((int(path.name), name))
    return found
