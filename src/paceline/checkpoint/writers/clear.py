"""Old checkpoints of a large world: the first ranks of lists look at the files, and every one of them deletes a share.

Rank 0 alone would ask for three lengths of every rank and checkpoint, and delete as many files: 49,152 of each
checkpoint of 16,384 ranks, where each of 512 ranks has 96.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from paceline.checkpoint import folder
from paceline.checkpoint.manifest import ranks_in_a_list, read_manifest
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.tiers.retention import Retention
from paceline.errors import StorageError

Cleared = tuple[tuple[str, ...], tuple[str, ...]]


def clear(ranks: Ranks, what: str, root: Path, retention: Retention, newest: Path) -> Cleared:
    """Remove old checkpoints and what killed saves left; return what went, and why what stays does.

    Every rank calls it. Checkpoints that are not sound are neither counted nor removed.
    """
    of_a_list = ranks_in_a_list(ranks.size)
    if not of_a_list:
        return ranks.from_first(what, partial(_alone, root, retention, newest))
    number, place = divmod(ranks.rank, of_a_list)
    share = None if place else (number, -(-ranks.size // of_a_list))
    named = ranks.from_first(what, partial(_named, root))
    broken = [share is not None and path != newest and not folder.has_share(path, *share) for path in named]
    broken = ranks.any_of(broken)
    sound = [path for path, is_broken in zip(named, broken, strict=True) if not is_broken]
    aside, kept = ranks.from_first(what, partial(_set_aside, root, retention, newest, sound))
    if share is not None:
        for hidden in aside.values():
            _delete_share(hidden, *share)
    ranks.any_of([True])  # nobody reads manifests there any more
    return ranks.from_first(what, partial(_remove_rest, root, aside, kept))


def _alone(root: Path, retention: Retention, newest: Path) -> Cleared:
    removed, kept = folder.remove_old(root, retention, newest)
    return tuple(removed), (*kept, *folder.clear_partials(root))


def _named(root: Path) -> list[Path]:
    """Return the checkpoints whose manifest is sound, newest first; no other file of them is looked at."""
    try:
        return [found.path for found in folder.list_checkpoints(root, lengths=False).complete]
    except StorageError:  # the new one is there all the same
        return []


def _set_aside(root: Path, retention: Retention, newest: Path, sound: list[Path]) -> tuple[dict[str, Path], list[str]]:
    """Put out of sight what need not stay; return where it is, and why others stay. Raises nothing of storage."""
    found = []
    for path in sound:
        with contextlib.suppress(StorageError):  # neither counted nor removed
            found.append(folder.Found(path, read_manifest(path)))
    return folder.set_aside(root, retention, newest, found)


def _delete_share(hidden: Path, number: int, count: int) -> None:
    """Delete a share of the files of a checkpoint that is out of sight; what stays is rank 0's to remove."""
    with contextlib.suppress(StorageError):
        for name in read_manifest(hidden).share(number, count):
            if name.startswith("shard-"):  # lists are still read by others
                with contextlib.suppress(OSError):
                    (hidden / name).unlink()


def _remove_rest(root: Path, aside: dict[str, Path], kept: list[str]) -> Cleared:
    removed, more = folder.remove_aside(aside)
    return tuple(removed), (*kept, *more, *folder.clear_partials(root))
