"""The coordinator's links to all nodes: which have told something, which are lost, and one beat for all of them.

A coordinator whose main thread hangs beats no more: its nodes lose it, and another takes its place. One that waits for
the system, as for storage that does not answer, goes on beating: it keeps the run's lock until that is over, so nobody
could take its place.
A look costs what has been told, not what there is: the links that are silent are asked ten times a second for how long.
"""

from __future__ import annotations

import math
import selectors
import socket
import threading
import time
from contextlib import suppress

from paceline.patience import Patience
from paceline.supervise.nodes.link import beat_seconds
from paceline.supervise.nodes.member import Member
from paceline.supervise.pulses.system import state_of_thread

SILENCE_SECONDS = 0.1  # between two looks at the links that tell nothing
STUCK_SECONDS = 120.0  # of an idle machine, that nobody looks at the links while ranks are looked after
WAITS_FOR_THE_SYSTEM = "D"  # state of /proc


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
        self._main, self._patience = threading.get_native_id(), Patience(math.inf)
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
        # Nobody is there; or no descriptor is to be had now, or the network has failed, which is told here on Linux.
        with suppress(OSError):
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

    def look_after(self) -> None:
        """Note that this process's main thread looks after ranks: it is to come back here soon, or it hangs."""
        self._patience = Patience(STUCK_SECONDS)

    def rest(self) -> None:
        """Note that it does something else for as long as that takes, such as a plan."""
        self._patience = Patience(math.inf)

    def close(self) -> None:
        """Tell the nodes of nothing any more, and let no other node in."""
        self._closed.set()
        for member in list(self._members.values()):
            self.drop(member)
        self._waiting.close()
        self._server.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_seconds):
            if self._patience.is_over and state_of_thread(self._main) != WAITS_FOR_THE_SYSTEM:
                continue
            for member in list(self._members.values()):
                if not member.link.because:
                    member.link.beat()
