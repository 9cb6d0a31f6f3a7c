"""The coordinator's links to all nodes: which have told something, which are lost, and one beat for all of them.

A look costs what has been told, not what there is: the links that are silent are asked ten times a second for how long.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import suppress

from paceline.supervise.nodes.link import beat_seconds
from paceline.supervise.nodes.member import Member

SILENCE_SECONDS = 0.1  # between two looks at the links that tell nothing


class NodeLinks:
    """The links of a coordinator, and the socket at which nodes connect."""

    def __init__(self, server: socket.socket, lost_after: float) -> None:
        self._server, self._beat_seconds = server, beat_seconds(lost_after)
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(server, selectors.EVENT_READ)
        self._members: dict[int, Member] = {}  # by descriptor
        self._new: list[Member] = []  # what came with their first words is not to be seen at the socket any more
        self._looked = -float("inf")
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="paceline-beat", daemon=True).start()

    def add(self, member: Member) -> None:
        """Have a node's link looked at from now on."""
        self._members[self._waiting.register(member.link.end, selectors.EVENT_READ, member).fd] = member
        self._new.append(member)

    def drop(self, member: Member) -> None:
        """Close a node's link and look at it no more."""
        if self._members.get(member.link.end.fileno()) is member:
            del self._members[self._waiting.unregister(member.link.end).fd]
        self._new = [one for one in self._new if one is not member]
        member.link.close()

    def knocking(self) -> list[socket.socket]:
        """Return the connections that somebody has made since the last look."""
        found = []
        with suppress(BlockingIOError):
            while True:
                found.append(self._server.accept()[0])
        return found

    def ready(self) -> list[Member]:
        """Return the nodes whose links may have something to take, or are lost."""
        now = time.monotonic()
        if now - self._looked >= SILENCE_SECONDS:
            self._looked = now
            found = list(self._members.values())
        else:
            told = {id(key.data): key.data for key, _ in self._waiting.select(0) if key.data is not None}
            found = list((told | {id(member): member for member in self._new}).values())
        self._new = []
        return found

    def close(self) -> None:
        """Tell the nodes of nothing any more, and let no other node in."""
        self._closed.set()
        for member in list(self._members.values()):
            self.drop(member)
        self._waiting.close()
        self._server.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_seconds):
            for member in list(self._members.values()):
                if not member.link.because:
                    member.link.beat()
