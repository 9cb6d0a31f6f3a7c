"""What has ended of a world of ranks, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import of_rank
from paceline.spec.journal.timing.clock import clock_here, on_clock, passed_seconds
from paceline.spec.plan import Plan
from paceline.supervise.again.machines import Stander
from paceline.supervise.blame import WELL_UNTIL, Ending, Outcome
from paceline.supervise.groups import Process
from paceline.supervise.ranks_lost import RanksLost
from paceline.supervise.told.generation import JudgedSoFar


@dataclass(frozen=True)
class Fallen:
    """A world that has failed: how it ended, when, and which of its ranks are left and stand by."""

    outcome: Outcome
    moments: Mapping[str, float]
    out_of_memory: bool
    standing: Mapping[int, Stander] = field(default_factory=dict)
    called: str = ""  # why the ranks were called to another world, where nothing has failed
    clock: Mapping[str, object] = field(default_factory=clock_here)  # of the machine that noted the moments


@dataclass(frozen=True)
class TakenOver:
    """A world whose coordinator was lost, as the next one finds the world: ranks that stand by, and processes."""

    number: int
    plan: Plan
    standing: Mapping[int, Stander]
    processes: Mapping[int, Process]
    since: float  # the moment of the loss, in `passed_seconds`
    nodes: tuple[int, ...] = ()  # of that world, which are lost with it
    spent: tuple[float, float] = (0.0, 0.0)  # seconds and money, since the first coordinator began
    judged: JudgedSoFar = field(default_factory=JudgedSoFar)  # the failures so far
    left: str = ""  # why it has gone with ranks that are not there any more, where that was at a notice


def lost_with(taken: TakenOver, what: str) -> RanksLost:
    """Return what is told of a coordinator that was lost, with its node and that node's ranks where they are too."""
    ranks = tuple(sorted(rank for rank in taken.processes if rank not in taken.standing))
    names = f"{'s' if len(taken.nodes) > 1 else ''} {', '.join(map(str, taken.nodes))}"
    return RanksLost(ranks, f"{what}{f' with node{names}' if taken.nodes else ''}", "", on_clock(taken.since))


def moments_of(endings: list[Ending], outcome: Outcome) -> dict[str, float]:
    """Return when all processes were last seen to be well, and when the first of them was seen to have failed.

    A rank that hung, or whose node fell silent, was well until then, however long it took to end it.
    """
    failed = [ending for ending in endings if ending.code] or [Ending(0, 0, passed_seconds(), passed_seconds())]
    error = outcome.error or {}
    told = error.get(WELL_UNTIL, error.get("time"))
    since = [told] if isinstance(told, float) else []
    return {
        "fault": min([*(ending.after for ending in failed), *since]),
        "noticed": min(ending.by for ending in failed),
    }


def with_reason(outcome: Outcome, because: str) -> Outcome:
    """Return an outcome that also says why the run does not go on."""
    if not because or outcome.error is None:
        return outcome
    known = str(outcome.error["because"])
    error = {**outcome.error, "because": f"{known}; {because}" if known else because}
    return Outcome(outcome.exit_code, error)


def told_in_a_line(error: Mapping[str, object]) -> str:
    """Return a fault that is survived in one line."""
    what = str(error["what"])
    if "rank" in error:
        what = of_rank(what, error["rank"], bool(error.get("names_ranks")))
    return f"{what}" + (f": {error['because']}" if error["because"] else "")
