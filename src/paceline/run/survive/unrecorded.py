"""What a step has decided and the journal does not have yet, where its duties were cut short by the loss of a peer.

Ranks that go on in another world build anew what had decided it, so they bring it along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.run.loop.under_plan import UnderPlan
from paceline.spec.journal.kinds import DecisionRecord, SelectionRecord


@dataclass(frozen=True)
class Unrecorded:
    """The choice among a step's candidates, and what the step, and those that it asks, have decided."""

    selection: SelectionRecord | None = None
    decisions: tuple[DecisionRecord, ...] = ()


def unrecorded_under(under: UnderPlan) -> Unrecorded:
    """Return what a rank has not recorded, and have it forget that."""
    chosen = under.selection.take() if under.selection is not None else None
    return Unrecorded(chosen, tuple(take_decided(under)))


def take_decided(under: UnderPlan) -> list[DecisionRecord]:
    """Return what the step at hand, the guard and the slots of experts have decided since the last call."""
    stepper, decided = under.built.stepper, under.decided
    under.decided = []
    return [*decided, *(found for each in (stepper.guard, stepper.slots) if each is not None for found in each.take())]


def give_back(unrecorded: Unrecorded, under: UnderPlan) -> None:
    """Have the duties of the step that are made up record it, under whatever plan that is."""
    if under.selection is not None:
        under.selection.give_back(unrecorded.selection)
    under.decided += unrecorded.decisions


def of_all(first: Unrecorded | None, undone: Sequence[Unrecorded]) -> Unrecorded:
    """Return what the next world is to record: what its first rank brings, since that one knows what it has recorded.

    Where the first rank has come anew it is what one of those brings whose duties are not done.
    """
    return first or next(iter(undone), Unrecorded())
