"""What survivors hold together: whether the whole state of one moment is left in the ranks that are, and is sound.

Copies of a part have the same bits. Where one of them is lost in the very step in which a bit of the other has flipped,
nothing could tell that later; so what survivors hold is held to the comparisons that the run would have made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from paceline.spec.plan import Plan
from paceline.supervise.again.held_state import AGREED, DUE, HeldState


@dataclass(frozen=True)
class LeftState:
    """The last step after which survivors hold the whole state, None where they do not, or where it cannot be used.

    `because` says why not; or, where there is a step, what is not used, and what of it was compared with nothing.
    `holders` are, for each part of that state, the ranks that hold it, and `world` is the one in which they made it.
    """

    step: int | None
    because: str = ""
    holders: tuple[tuple[int, ...], ...] = ()
    world: int = 0

    @property
    def one_of_each(self) -> frozenset[int]:
        """Ranks that hold the whole state between them, one for each part."""
        return frozenset(min(ranks) for ranks in self.holders)

    def brought_by(self, seated: Collection[int]) -> LeftState:
        """Return what of it a next world has in which `seated` go on: the state where they hold the whole of it.

        A world may have fewer ranks than there are survivors, and who has no rank there brings nothing.
        """
        if self.step is None or all(not set(ranks).isdisjoint(seated) for ranks in self.holders):
            return self
        parts = len(self.holders)
        missing = sum(set(ranks).isdisjoint(seated) for ranks in self.holders)
        because = f"{len(seated)} of the ranks go on, which do not hold {missing} of the {parts} parts of the state"
        return LeftState(None, "; ".join(filter(None, (self.because, f"{because} after step {self.step}"))))


def state_left(plan: Plan, held: Mapping[int, HeldState], has_checkpoint: bool) -> LeftState:
    """Return what is left of the state in some ranks, by what each says of its own.

    Copies of the model hold the same, so of each part any copy will do; copies that keep something of their own do not
    replace one another. A state that was to be compared with a lost rank's is used only where there is no checkpoint.
    """
    wanted = {_part(plan, rank) for rank in range(plan.layout.devices)}
    refused = [f"{each.changed} of rank {rank} is not what the ranks had agreed on" for rank, each in held.items()
               if each.changed]  # fmt: skip
    for step in sorted({each.step for each in held.values() if each.step >= 0}, reverse=True):
        holders: dict[tuple[int, ...], dict[int, HeldState]] = defaultdict(dict)
        for rank, each in held.items():
            if each.step == step:
                holders[_part(plan, rank)][rank] = each
        if set(holders) != wanted:
            continue
        because = _apart(step, holders) or _not_compared(step, holders, has_checkpoint)
        if not because:
            doubt = _alone(step, holders) if len(held) < plan.layout.devices else ""  # else nobody was lost
            held_by = tuple(tuple(sorted(copies)) for copies in holders.values())
            return LeftState(step, "; ".join(filter(None, (*refused, doubt))), held_by)
        refused.append(because)
    return LeftState(None, "; ".join(refused))


def state_of_worlds(
    plans: Mapping[int, Plan], newest: int, held: Mapping[int, HeldState], has_checkpoint: bool
) -> LeftState:
    """Return `state_left` of what ranks hold of one world, which need not be the `newest`, by the plan of that world.

    `plans` are those of worlds by their numbers. What ranks hold of several worlds is not brought together: where a
    world fell as it was being formed some have entered it, and others hold the state of the world before. The latest
    step counts that the ranks of one world hold the whole of.
    """
    of_worlds: dict[int, dict[int, HeldState]] = defaultdict(dict)
    for rank, each in held.items():
        of_worlds[each.generation or newest][rank] = each
    made = sorted(world for world, ranks in of_worlds.items() if any(each.step >= 0 for each in ranks.values()))
    found = [_state_of(world, plans, ranks, has_checkpoint) for world, ranks in sorted(of_worlds.items())]
    best = max(found, key=lambda left: (-1 if left.step is None else left.step, left.world), default=LeftState(None))
    if len(made) < 2:
        return best
    apart = f"ranks hold states of different worlds: {', '.join(map(str, made))}"
    apart += f", of which that of world {best.world} is used" if best.step is not None else ""
    return replace(best, because="; ".join(filter(None, (apart, best.because))))


def _state_of(world: int, plans: Mapping[int, Plan], held: Mapping[int, HeldState], has_checkpoint: bool) -> LeftState:
    """Return `state_left` of what ranks hold of a world, known by their ranks of now."""
    if world not in plans:
        return LeftState(None, f"ranks hold the state of world {world}, whose plan is not known here")
    places = {each.rank if each.generation else rank: rank for rank, each in held.items()}  # -> the rank of now
    left = state_left(plans[world], {place: held[rank] for place, rank in places.items()}, has_checkpoint)
    holders = tuple(tuple(places[place] for place in ranks) for ranks in left.holders)
    return replace(left, holders=holders, world=world)


StateHolders = Mapping[tuple[int, ...], Mapping[int, HeldState]]


def _apart(step: int, holders: StateHolders) -> str:
    """Return which copies of a part differ, if any do."""
    for copies in holders.values():
        (first, known), *others = copies.items()
        for rank, each in others:
            if each.digest != known.digest:
                return (
                    f"ranks {first} and {rank} hold the same part of the state after step {step}, and its bits differ"
                )
    return ""


def _not_compared(step: int, holders: StateHolders, has_checkpoint: bool) -> str:
    """Return that a part was to be compared after the step, and its ranks or others were lost before, if one was.

    Copies that are left may be alike and wrong: what a lost rank has added to their gradients is known to it alone.
    """
    for copies in holders.values() if has_checkpoint else ():
        compared = {each.compared for each in copies.values()}
        if DUE in compared and AGREED not in compared:
            return f"the state after step {step} was to be compared with that of ranks that are lost"
    return ""


def _alone(step: int, holders: StateHolders) -> str:
    """Return which rank alone has a part that was not compared after the step, and when it was last, if any has."""
    for copies in holders.values():
        rank, each = next(iter(copies.items()))
        if len(copies) == 1 and each.compared != AGREED:
            last = f"last after step {each.agreed_step}" if each.agreed_step else "not yet"
            return f"rank {rank} alone has its part of the state after step {step}, which was compared {last}"
    return ""


def _part(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return which part of the state a rank holds."""
    place = plan.layout.coordinates(rank)
    return tuple(at for axis, at in sorted(place.items()) if axis != "dp_replicate" or not plan.sync.is_plain)
