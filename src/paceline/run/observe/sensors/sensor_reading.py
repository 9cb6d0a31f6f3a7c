"""What sensors give: numbers of the node and of its ranks, and why others could not be read. Torch-free.

What cannot be read is absent, with a reason; it is never a zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class SensorReading:
    """Numbers by name: of the node, and of each of its ranks; and by name why a number is absent."""

    host: dict[str, float] = field(default_factory=dict)
    ranks: dict[int, dict[str, float]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def of_rank(self, rank: int, name: str, value: float | None) -> None:
        """Note a number of a rank's, where it is known."""
        if value is not None:
            self.ranks.setdefault(rank, {})[name] = value

    def of_host(self, name: str, value: float | None) -> None:
        """Note a number of the node's, where it is known."""
        if value is not None:
            self.host[name] = value

    def lacks(self, name: str, because: str) -> None:
        """Note why a number is absent; the first reason is kept."""
        self.absent.setdefault(name, because)


class NodeSensor(Protocol):
    """Reads a part of a node. It raises nothing: what it cannot read it says."""

    def read(self, into: SensorReading, seconds: float) -> None:
        """Add what the sensor reads; `seconds` have passed since it read before."""

    def close(self) -> None:
        """Let go of what the sensor holds."""


@dataclass(frozen=True)
class SeenRank:
    """A rank of this node: its number, its process, and the UUID of its GPU; empty on a CPU."""

    rank: int
    process: int
    device: str = ""


class RisingCounter:
    """The increase of a counter that only rises, but for wrapping at `limit` and for beginning anew."""

    def __init__(self, limit: float | None = None) -> None:
        """`limit` is where the counter wraps to zero; None where that is not known."""
        self._limit = limit
        self._before: float | None = None

    def added(self, now: float, most: float = float("inf")) -> float | None:
        """Return the counter's rise since the last call; None at the first call, and where the counter has begun anew.

        `most` is the most by which it can have risen: a wrap that would be more is a new beginning.
        """
        before, self._before = self._before, now
        if before is None:
            return None
        if now >= before:
            return now - before
        wrapped = None if self._limit is None else self._limit - before + now
        return wrapped if wrapped is not None and 0 <= wrapped <= most else None


def told_because(error: BaseException, path: object = "") -> str:
    """Return why something could not be read, in a few words."""
    where = f" ({path})" if path else ""
    if isinstance(error, PermissionError):
        return f"permission denied{where}"
    if isinstance(error, FileNotFoundError):
        return f"this machine has no such file{where}"
    return f"{str(error) or type(error).__name__}{where}"


def share_of(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole; None where one of them is not known."""
    return part / whole if part is not None and whole else None
