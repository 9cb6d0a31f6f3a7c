"""Lines of JSON over a socket, between a supervisor and its processes."""

from __future__ import annotations

import json
import math
import select
import socket
from collections.abc import Mapping
from typing import Any

CHUNK_BYTES = 1 << 16


class Lines:
    """One end of a pair of sockets: sends and takes lines of JSON."""

    def __init__(self, end: socket.socket, takes_descriptors: bool = False) -> None:
        """With `takes_descriptors` the other end, a process of this machine, may send some beside a message."""
        self.end, self._takes_descriptors = end, takes_descriptors
        self.descriptors: list[int] = []  # that have come, and are this process's own
        self._rest = b""
        self._taken: list[dict[str, object]] = []

    @property
    def has_more(self) -> bool:
        """Whether a message has come that is not taken: nothing more of it is to be seen at the socket."""
        return bool(self._taken)

    def send(self, message: Mapping[str, object]) -> None:
        """Send one message. Raises OSError where the other end is gone."""
        self.end.sendall(json.dumps(message).encode() + b"\n")

    def send_descriptor(self, message: Mapping[str, object], descriptor: int) -> None:
        """Send one message, and a descriptor beside it. Raises OSError where the other end is gone."""
        content = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self.end, [content], [descriptor])
        self.end.sendall(content[sent:])

    def beat(self) -> None:
        """Send an empty message if there is room for it, else nothing. Raises OSError where the other end is gone."""
        if is_ready(self.end, select.POLLOUT, 0.0):
            self.end.send(b"\n")

    def take(self, timeout_seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message, or None where none comes in time. Raises EOFError where the other end is gone."""
        while not self._taken:
            if not is_ready(self.end, select.POLLIN, timeout_seconds):
                return None
            try:
                found = self._received()
            except BlockingIOError:  # somebody else has read it meanwhile, as a signal handler
                continue
            except ConnectionError as error:
                raise EOFError from error
            if not found:
                raise EOFError
            *lines, self._rest = (self._rest + found).split(b"\n")
            self._taken += [json.loads(line) if line else {} for line in lines]
        return self._taken.pop(0)

    def _received(self) -> bytes:
        if not self._takes_descriptors:
            return self.end.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
        found, descriptors, _, _ = socket.recv_fds(self.end, CHUNK_BYTES, 1, socket.MSG_DONTWAIT)
        self.descriptors += descriptors
        return found


def is_ready(end: socket.socket, event: int, timeout_seconds: float | None) -> bool:
    """Return whether a socket can be read from (POLLIN) or written to (POLLOUT), at once or within some seconds.

    `select.select` takes no descriptor from 1,024 on, and the supervisor of many nodes has more.
    """
    waiting = select.poll()
    waiting.register(end, event)
    return bool(waiting.poll(None if timeout_seconds is None else math.ceil(1e3 * timeout_seconds)))
