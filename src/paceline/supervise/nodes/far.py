"""What a coordinator knows of ranks on other machines: processes, those that stand by, and their pulses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.patience import programs_per_core
from paceline.run.survive.health.pulse import Pulse
from paceline.run.survive.health.system import UNKNOWN
from paceline.supervise.again.held import HeldState

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
    """The pulses of ranks on all nodes, as their supervisors tell them."""

    def __init__(self, ask: Callable[[Pulse, bool], None]) -> None:
        self._pulses: dict[int, Pulse] = {}
        self._states: dict[int, tuple[str, float]] = {}
        self._stacks: dict[int, str] = {}
        self._loads: dict[int, float] = {}
        self._ask = ask

    def told(self, node: int, load: float, pulses: list[Mapping[str, Any]]) -> None:
        """Take what a node tells of its ranks: their pulses, of which `since` is an age, and their states."""
        self._loads[node] = load
        for each in pulses:
            pulse = Pulse(**{**each["pulse"], "since": time.monotonic() - each["pulse"]["since"]})
            self._pulses[pulse.rank] = pulse
            self._states[pulse.rank] = each["state"], each["cpu_seconds"]

    def wrote(self, rank: int, stack: str) -> None:
        """Take the stacks that a rank has written."""
        self._stacks[rank] = stack

    def load(self) -> float:
        """Return how many programs want each core of the machine that is loaded most."""
        return max([programs_per_core(), *self._loads.values()])

    def pulse(self, rank: int) -> Pulse | None:
        """Return a rank's pulse, None where it has none yet."""
        return self._pulses.get(rank)

    def state(self, pulse: Pulse) -> str:
        """Return the state of a rank's process as its system names it."""
        return self._states.get(pulse.rank, (UNKNOWN, 0.0))[0]

    def cpu_seconds(self, pulse: Pulse) -> float:
        """Return for how long a rank's process has computed."""
        return self._states.get(pulse.rank, (UNKNOWN, 0.0))[1]

    def ask(self, pulse: Pulse, by_signal: bool = False) -> None:
        """Have a rank write its stacks; `by_signal` where its threads have not."""
        self._ask(pulse, by_signal)

    def stack(self, rank: int) -> str:
        """Return the stacks that a rank has written, empty where it has not."""
        return self._stacks.get(rank, "")
