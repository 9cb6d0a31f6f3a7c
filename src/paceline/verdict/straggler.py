"""Whether steps wait for one rank that computes longer than the others."""

from __future__ import annotations

from paceline.spec.journal.rank_spread import RankSpread
from paceline.units import format_durations
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.steps_seen import StepsSeen

KIND = "straggler"


def straggler_part(seen: StepsSeen) -> BoundPart | None:
    """Return the part of a step that the slowest rank computes beyond the others; None where that is not known.

    The others are their median. On a CPU a rank's computing is its own processor time, so a rank that waits, or has no
    core, is not a slow one. On CUDA passes that last longer count as far as the other ranks wait that long for their
    reduction: where collectives run inside of the passes, no rank is seen to be slow.
    """
    if seen.ranks < 2 or not seen.whole:
        return None
    if seen.knows("computing"):
        slow = seen.spreads["computing"]
        beyond = slow.most - others(slow, seen.ranks)
    elif seen.device == "cuda" and seen.knows("forward_backward", "reduce"):
        slow = seen.spreads["forward_backward"]
        beyond = min(slow.most - others(slow, seen.ranks), seen.most("reduce") - seen.least("reduce"))
    else:
        return None
    usual = others(slow, seen.ranks)
    most, others_take = format_durations(slow.most, usual)
    evidence = [f"rank {slow.rank} computes {most} of a step, the others {others_take} in the median"]
    if usual > 0:
        evidence.append(f"that is {slow.most / usual:.1f} times as long")
    advice = (
        f"look at rank {slow.rank}: its clocks, its temperature, other processes on its cores;"
        " run.health.on_straggler = 'less_work' or 'replace' goes on without waiting for that"
    )
    return BoundPart(KIND, share_of(max(0.0, beyond), seen.whole_seconds), tuple(evidence), advice)


def others(slow: RankSpread, ranks: int) -> float:
    """Return what the other ranks take, in the median: of two ranks it is what the faster one takes."""
    return slow.least if ranks == 2 else slow.median
