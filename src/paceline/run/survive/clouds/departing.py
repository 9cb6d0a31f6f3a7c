"""Departures: a machine of several is about to be taken away, so its node leaves the run, and the others go on.

No fault has happened then: ranks save, those of the node end with the code of a run that is to be started again, and
the others stand by for a smaller world. Where the coordinator is on that node another one takes its place, and where
the first rank is, that of the smaller world begins records of its own. A new node that is started meanwhile joins as
any other does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.run.process.world import World
from paceline.spec.survive.recovery import LEAVE, RecoverySpec
from paceline.supervise.nodes.meeting import find_meeting
from paceline.supervise.parent import NODE_VARIABLE


@dataclass(frozen=True)
class Departing:
    """What a rank tells before a stop that was asked for: its node, and why it stops."""

    node: int | None  # None where there is but one
    notice: str  # of its own machine's end, or ""
    other: bool  # whether it was asked to stop for anything else
    stands_by: bool  # whether it could go on in another world
    coordinator: int | None = None  # the node of the coordinator, as the first rank knows it


@dataclass(frozen=True)
class Departure:
    """Nodes that leave a run: their numbers, their ranks, and the notice."""

    nodes: tuple[int, ...]
    ranks: tuple[int, ...]
    because: str

    def __str__(self) -> str:
        return f"node{'s' if len(self.nodes) > 1 else ''} {', '.join(map(str, self.nodes))}"


def departing(world: World, run_dir: Path, notice: str, asked: str, stands_by: bool) -> Departing:
    """Return what this rank tells. `notice` is its machine's, and `asked` why it was asked to stop; "" for neither."""
    node = os.environ.get(NODE_VARIABLE)
    meeting = find_meeting(run_dir) if world.is_first else None
    return Departing(
        int(node) if node else None,
        notice,
        bool(asked) and asked != notice,
        stands_by,
        meeting.node if meeting else None,
    )


def departure_of(told: list[Departing], policy: RecoverySpec) -> Departure | None:
    """Return which nodes leave; None where the whole run is to stop. `told` is of all ranks, in their order.

    It stops where anything else has asked for it, where a rank cannot go on in its process, where it is not known which
    node has the coordinator, and where too few would be left.
    """
    nodes = {each.node for each in told if each.notice}
    leaving = tuple(rank for rank, each in enumerate(told) if each.node in nodes)
    known = {told[0].node, told[0].coordinator}
    may_leave = policy.on_notice == LEAVE and policy.reform and policy.may_go_on and nodes and None not in known | nodes
    stops = any(each.other or not each.stands_by for each in told)
    if not may_leave or stops or len(told) - len(leaving) < policy.min_devices:
        return None
    because = next(each.notice for each in told if each.notice)
    return Departure(tuple(sorted(node for node in nodes if node is not None)), leaving, because)
