"""One node of a fleet: the link to its supervisor, and the ranks that run there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.spec.journal.timing.clock import passed_seconds
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.lines import Lines
from paceline.supervise.nodes.far import FarRank
from paceline.supervise.nodes.link import NodeLink
from paceline.supervise.pulses.silences import HangLimits

KILLED = -signal.SIGKILL  # the return code of a rank that is taken for dead with its node


@dataclass
class Member:
    """A node that has joined. `was` holds what is left there of a world whose coordinator was lost."""

    number: int
    devices: int
    host: str  # its address, as other nodes reach it
    rung: str
    link: NodeLink
    poll: Callable[[], None]
    generation: int = 0  # of the world that it has ranks of
    was: Mapping[str, Any] = field(default_factory=dict)
    processes: dict[int, FarRank] = field(default_factory=dict)  # by number
    standing: dict[int, HeldState] = field(default_factory=dict)  # by rank
    lost_at: float = 0.0  # when it lost the coordinator of that world, in `passed_seconds` here
    _environ: Mapping[str, str] = field(default_factory=dict)  # of the rank that was started last in this world
    _next: int = 1
    _port: int = 0
    _pieces: list[str] | None = None

    @classmethod
    def of(cls, lines: Lines, hello: Mapping[str, Any], lost_after: float, poll: Callable[[], None]) -> Member:
        """Return the node at the other end of a connection, which has said what it is."""
        member = cls(
            int(hello["node"]), int(hello["devices"]), lines.end.getpeername()[0], str(hello["rung"]),
            NodeLink(lines, lost_after, beats=False), poll, int(hello["generation"]), hello,
        )  # fmt: skip
        for _, number, code in hello["ranks"]:
            far = member._far(number)
            far.code = code
        member.lost_at = passed_seconds() - float(hello["lost_for"])
        member.standing = {int(rank): HeldState.of(held) for rank, held in hello["standing"]}
        return member

    def start(self, environ: Mapping[str, str]) -> FarRank:
        """Start a rank on the node, which is told how the rank's environment differs from that of the rank before."""
        far, before = self._far(self._next), self._environ
        changed = bool(before) and before.keys() <= environ.keys()
        told = {name: value for name, value in environ.items() if not changed or before.get(name) != value}
        self.link.send({"start": far.pid, "environ": told, "changed": changed})
        self._environ = dict(environ)
        return far

    def enter(
        self, generation: int, members: Sequence[int], files: Mapping[str, str], limits: HangLimits | None
    ) -> None:
        """Have the node make room for a world; with `limits` it looks for ranks that hang."""
        self.generation, self.was, self._environ = generation, {}, {}
        told = asdict(limits) if limits is not None else None
        self.link.send({"world": generation, "members": in_runs(members), "files": files, "limits": told})

    def free_port(self) -> int:
        """Return a port of the node that nobody listens at; 1 where the node is lost meanwhile."""
        self._port = 0
        self.link.send({"port": True})
        while not self._port and not self.link.is_lost:
            self.poll()
            time.sleep(0.002)  # for what comes over the net
        return self._port or 1

    def pieces(self) -> list[str]:
        """Return the parts of the state that the node holds in memory; none where it is lost meanwhile."""
        self._pieces = None
        self.link.send({"pieces": True})
        while self._pieces is None and not self.link.is_lost:
            self.poll()
            time.sleep(0.002)  # for what comes over the net
        return self._pieces or []

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take what the node tells of its ranks."""
        if "port" in message:
            self._port = int(message["port"])
        elif "pieces" in message:
            self._pieces = list(message["pieces"])
        elif "standing" in message and message["generation"] == self.generation:
            self.standing = {int(rank): HeldState.of(held) for rank, held in message["standing"]}
        elif "ended" in message and message["ended"] in self.processes:
            self.processes[message["ended"]].code = message["code"]
        elif "collected" in message and message["collected"] in self.processes:
            far = self.processes.pop(message["collected"])
            far.code = message["code"] if far.code is None else far.code
            far.is_collected, far.returncode = True, far.code

    def forget(self) -> None:
        """Have the node end the ranks that it has: they are of a world that is over."""
        self.link.send({"answers": {}})
        for number in self.processes:
            self.link.send({"collect": number})
        self.generation, self.was, self.standing, self.processes = 0, {}, {}, {}

    def lost(self) -> None:
        """Note that the node is lost: nothing of it can be asked any more."""
        self.link.close()
        self.standing = {}
        for far in self.processes.values():
            far.code = KILLED if far.code is None else far.code
            far.is_collected, far.returncode = True, far.code

    def _far(self, number: int) -> FarRank:
        self._next = max(self._next, number + 1)
        far = FarRank(self.number, number, self.link.send, self.poll)
        self.processes[number] = far
        return far


def in_runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return numbers as runs, each the first and how many follow one another: [4, 5, 6, 9] as [[4, 3], [9, 1]].

    Each node is told of all nodes: one number of each would be as many as nodes, times the nodes.
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and sum(runs[-1]) == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def of_runs(runs: Iterable[Sequence[int]]) -> set[int]:
    """Return the numbers of runs."""
    return {number for first, count in runs for number in range(first, first + count)}
