"""The newest checkpoint of several folders: a run's tiers, memory and disk, count their checkpoints together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.checkpoint.folder import Found, Listing, list_checkpoints


def newest_first(roots: Sequence[Path]) -> Listing:
    """Return the checkpoints under all of the roots, newest first; of one state saved in several, in the roots' order.

    Newest is the highest sequence number, which every save draws above those of all roots. A run may have gone back to
    an earlier step, so the step does not decide; but where the newest ones are of one step, they are one state, and the
    root that comes first is read first.
    """
    found: list[tuple[int, Found]] = []
    skipped: list[str] = []
    for place, root in enumerate(roots):
        listing = list_checkpoints(root)
        found += [(place, each) for each in listing.complete]
        skipped += listing.skipped
    found.sort(key=lambda pair: (pair[1].manifest.sequence, pair[1].manifest.step, -pair[0]), reverse=True)
    ordered: list[Found] = []
    while found:
        step = found[0][1].manifest.step
        count = next((number for number, (_, each) in enumerate(found) if each.manifest.step != step), len(found))
        ordered += [each for _, each in sorted(found[:count], key=lambda pair: pair[0])]
        del found[:count]
    return Listing(tuple(ordered), tuple(skipped))


def next_sequence(roots: Sequence[Path]) -> int:
    """Return the sequence number of the next checkpoint in any of the roots."""
    listed = (each.manifest.sequence for root in roots for each in list_checkpoints(root).complete)
    return 1 + max(listed, default=0)
