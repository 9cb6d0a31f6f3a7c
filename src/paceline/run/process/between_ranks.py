"""The connections between this process and some others of this machine, which are shut where these wait for ever.

Groups that a script has made itself are not noted (`sockets.py`): torch says nothing of their connections, and the
system does (Linux). A connection that is shut is an error at both ends at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.supervise.pulses.system import ESTABLISHED

TABLES = ("tcp", "tcp6")


@dataclass(frozen=True)
class TcpEnd:
    """One end of a connection: its own address and its peer's, as the system writes them, and the end's inode."""

    own: str
    peer: str
    inode: str


def shut_between(others: Collection[int]) -> int:
    """Shut this process's connections to other processes of this machine, by their numbers; return how many there were.

    Their descriptors are closed by whoever opened them. Nothing is shut where the system does not list connections.
    """
    ends = list(_ends())
    theirs = {inode for process in others for inode in _sockets_of(process)}
    addresses = {(end.peer, end.own) for end in ends if end.inode in theirs}
    meant = {end.inode for end in ends if (end.own, end.peer) in addresses}
    shut = 0
    for inode, descriptor in _sockets_of(os.getpid()).items() if meant else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if inode in meant:
                connection.shutdown(socket.SHUT_RDWR)
                shut += 1
    return shut


def _ends() -> Iterator[TcpEnd]:
    """Give the ends of the connections that are open on this machine."""
    for name in TABLES:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == ESTABLISHED:
                    yield TcpEnd(fields[1], fields[2], fields[9])


def _sockets_of(process: int) -> dict[str, int]:
    """Return the sockets of a process by their inodes: the descriptors; none where it is not this user's, or gone."""
    found = {}
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                name = str(path.readlink())
                if name.startswith("socket:["):
                    found[name.removeprefix("socket:[").removesuffix("]")] = int(path.name)
    return found
