"""The newest checkpoint of several folders: a run's tiers, memory and disk, count their checkpoints together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paceline.checkpoint.folder import Found, Listing, has_share, list_checkpoints
from paceline.checkpoint.ranks import Ranks


def newest_first(roots: Sequence[Path]) -> Listing:
    """Return the checkpoints under all of the roots, newest first; of one state saved in several, in the roots' order.

    They are those with a sound manifest; whether their files are there, ranks see together. Newest is the highest
    sequence number, which every save draws above those of all roots. A run may have gone back to an earlier step, so
    the step does not decide; but where the newest ones are of one step, they are one state, and the root that comes
    first is read first.
    """
    found: list[tuple[int, Found]] = []
    skipped: list[str] = []
    for place, root in enumerate(roots):
        listing = list_checkpoints(root, lengths=False)
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


def newest_whole(roots: Sequence[Path], ranks: Ranks) -> Path | None:
    """Return the newest checkpoint whose files are all there. Every rank calls it, and looks for its share of them."""
    places = " or ".join(map(str, roots))
    paths = ranks.from_first(f"cannot list {places}", partial(_paths, roots))
    return next((path for path in paths if not ranks.any_of([not has_share(path, ranks.rank, ranks.size)])[0]), None)


def _paths(roots: Sequence[Path]) -> list[Path]:
    return [found.path for found in newest_first(roots).complete]


def next_sequence(roots: Sequence[Path], lengths: bool = False) -> int:
    """Return the number after those of all checkpoints in the roots that have a sound manifest, or are complete."""
    listed = (each.manifest.sequence for root in roots for each in list_checkpoints(root, lengths).complete)
    return 1 + max(listed, default=0)
