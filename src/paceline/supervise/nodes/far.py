"""What a coordinator knows of ranks on other machines: processes, those that stand by, and who tells nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.patience import programs_per_core
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.nodes.lookout import Scrutiny
from paceline.supervise.pulses.silences import Overview, WatchedRank, together

LOAD_CHANGE = 0.1  # nodes are told the load again once it has changed by this share of what they were told last
LOAD_SECONDS = 1.0  # at least, between two times that nodes are told the load
Send = Callable[[Mapping[str, Any]], None]


class FarRank:
    """A rank's process on a node, with what a supervisor asks of a `subprocess.Popen`.

    It has ended where its node is lost: nobody can tell otherwise, and it can neither meet its peers nor publish.
    """

    is_child = is_near = False

    def __init__(self, node: int, pid: int, send: Send, poll: Callable[[], None]) -> None:
        """`pid` is the number by which coordinator and node know it."""
        self.node, self.pid = node, pid
        self.returncode: int | None = None
        self.code: int | None = None  # how it ended
        self.is_collected = False
        self.lost_with = ""  # what is the matter with its node, where that is lost
        self._send, self._poll = send, poll

    def poll(self) -> int | None:
        """Return how the process ended, or None while it runs as far as is known."""
        self._poll()
        return self.code

    def wait(self) -> int:
        """Return how the process ended, when nothing of it is left."""
        while self.code is None or not self.is_collected:
            self._poll()
            time.sleep(0.01)  # for what comes over the net
        return self.code

    def signal(self, number: int, group: bool) -> None:
        """Send a signal to the process, or to all that it has started as well."""
        self._send({"signal": self.pid, "number": int(number), "group": group})

    def end(self) -> None:
        """Have the node end what is left of the process and of what it has started."""
        self._send({"collect": self.pid})


@dataclass(frozen=True)
class FarStanding:
    """A rank on a node that stands by for its next world, and what it holds of the state."""

    rank: int
    held: HeldState


class FarSight:
    """The ranks of all nodes, as the nodes' supervisors tell of them: an overview of each, told again when it changes.

    A world that does well is told of by nobody, but for a node's load where that changes. Once a rank is late on some
    node, all tell how far their last rank is; once one that is late is furthest behind of all, they tell of each rank.
    """

    def __init__(
        self, tell: Callable[[Mapping[str, object]], None], ask: Callable[[Collection[int], bool], None]
    ) -> None:
        """`tell` tells all nodes of the world something; `ask` has ranks write their stacks."""
        self._tell, self._ask = tell, ask
        self._overviews: dict[int, Overview] = {}
        self._all = Overview()  # what they show together
        self._is_changed = self._any_late = False  # since that was worked out; whether a node finds a rank late
        self._seen: dict[int, WatchedRank] = {}
        self._stacks: dict[int, str] = {}
        self._loads: dict[int, float] = {}
        self._most = 1.0  # the highest of the loads
        self._scrutiny, self._load, self._load_told_at = Scrutiny.OVERVIEW, 1.0, -LOAD_SECONDS

    def told(self, node: int, message: Mapping[str, Any], now: float) -> None:
        """Take what a node tells of its ranks."""
        if "overview" in message:
            self._overviews[node] = Overview.heard(message["overview"])
            self._loads[node] = message["load"]
            self._is_changed = True
        elif "seen" in message:
            for each in message["seen"]:
                seen = WatchedRank.heard(each, now)
                self._seen[seen.pulse.rank] = seen
        elif "stack" in message:
            self._stacks[message["rank"]] = message["stack"]

    def load(self) -> float:
        """Return how many programs want each core of the machine that is loaded most."""
        return max(programs_per_core(), self._most)

    def overview(self, ended: Collection[int], passed: float, now: float, has_failed: bool = False) -> Overview:
        """Return what the ranks of all nodes show. Silences are counted where the ranks are."""
        if self._is_changed:
            self._sum_up()
        scrutiny = self._scrutiny
        if not self._any_late or has_failed:
            scrutiny = Scrutiny.OVERVIEW
        elif scrutiny is Scrutiny.OVERVIEW:
            scrutiny = Scrutiny.LAST
        load = self.load()
        is_other = abs(load - self._load) > LOAD_CHANGE * self._load and now - self._load_told_at >= LOAD_SECONDS
        if scrutiny is not self._scrutiny or is_other:
            self._attend(scrutiny, load, now)
        return self._all

    def closely(self) -> Mapping[int, WatchedRank]:
        """Return how each rank is seen, of those that nodes have told of since they were asked."""
        return self._seen

    def ask(self, ranks: Collection[int], by_signal: bool = False) -> None:
        """Have ranks write their stacks; by a signal where their threads have not."""
        if self._scrutiny is not Scrutiny.EACH:
            self._seen = {}
            self._attend(Scrutiny.EACH, self._load, self._load_told_at)
        self._ask(ranks, by_signal)

    def leave(self) -> None:
        """Look no longer at each rank: none hangs after all."""
        if self._scrutiny is Scrutiny.EACH:
            self._attend(Scrutiny.LAST, self._load, self._load_told_at)

    def is_quiet(self) -> bool:
        """Return False: what goes over the net between machines may be delayed, and nobody sees that."""
        return False

    def stack(self, rank: int) -> str:
        """Return the stacks that a rank has written, empty where it has not."""
        return self._stacks.get(rank, "")

    def _sum_up(self) -> None:
        overviews = list(self._overviews.values())
        self._any_late = any(one.is_late for one in overviews)
        self._all, self._most, self._is_changed = together(overviews), max(self._loads.values()), False
        if any(one.ranks and one.last is None for one in overviews):  # a rank there may be further behind
            self._all = replace(self._all, last_is_late=False)

    def _attend(self, scrutiny: Scrutiny, load: float, now: float) -> None:
        self._scrutiny, self._load, self._load_told_at = scrutiny, load, now
        self._tell({"scrutiny": scrutiny.value, "load": load})
