"""Reads checkpoints in place into tensors of any layout, on any number of ranks.

Each rank works out by itself which part of which stored chunk its own shards need, and reads only those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.checkpoint.files.read_back import read_ahead
from paceline.checkpoint.files.threads import Hands
from paceline.checkpoint.fingerprint import HeldPart, PartSums, local_part, whole_fingerprints
from paceline.checkpoint.folder import check_lengths
from paceline.checkpoint.index import Chunks, IndexReader
from paceline.checkpoint.manifest import FileEntry, Manifest, read_manifest
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.readers.fill import Kinds, emptied_where_it_fails, fill
from paceline.checkpoint.shards import dtype_name
from paceline.checkpoint.tiers.newest import newest_first
from paceline.cluster.here.collector import collector_at_rest
from paceline.errors import ConfigError, StorageError, nearest


class Loaded(NamedTuple):
    """The checkpoint that was loaded, its `extra`, why newer ones were passed over, and tensors without fingerprint."""

    path: Path
    extra: dict[str, Any]
    skipped: list[str]
    unchecked: tuple[str, ...] = ()


def load_latest(
    root: Path | Sequence[Path],
    tensors: Mapping[str, torch.Tensor],
    *,
    may_skip: tuple[str, ...] = (),
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> Loaded | None:
    """Load the newest checkpoint under `root` that is sound in every byte; return None where there is none at all.

    Of several roots the newest of all is taken, of one state in several the one of the first root. Every rank calls it;
    rank 0 decides the order and all take the same one. A process that is `alone` loads for itself, whatever group it is
    in. Raises StorageError where there are checkpoints and none is sound (tensors are then as `load_checkpoint` leaves
    them), and ConfigError where the newest sound one does not hold these tensors.
    """
    roots = [Path(root)] if isinstance(root, str | Path) else list(root)
    ranks = Ranks(process_group, alone)

    def paths_and_reasons() -> tuple[list[Path], list[str]]:
        listing = newest_first(roots)
        return [found.path for found in listing.complete], list(listing.skipped)

    places = " or ".join(map(str, roots))
    paths, skipped = ranks.from_first(f"cannot list {places}", paths_and_reasons)
    for path in paths:
        try:
            extra, unchecked = _load(path, tensors, may_skip=may_skip, ranks=ranks)
        except StorageError as error:
            skipped.append(f"{error.what}: {error.because}")
        else:
            return Loaded(path, extra, skipped, unchecked)
    if skipped:
        raise StorageError(
            f"no checkpoint in {places} is sound",
            "; ".join(skipped),
            "restore one, or start a new run in another run.dir",
        )
    return None


def load_checkpoint(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    verify: bool = True,
    may_skip: tuple[str, ...] = (),
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, object]:
    """Load the checkpoint `path` in place into `tensors` (plain or DTensor, on any device) and return its `extra`.

    Every rank of the group calls it, each with its own names. Together they must name every stored tensor, except
    names that begin with one of `may_skip`. With `verify` all files are read and hashed first, shared out over the
    ranks, so that no tensor is touched by a damaged checkpoint; and the values that were loaded are held against the
    fingerprints taken before they were saved, where there are any.

    Raises on all ranks alike: ConfigError where a name, shape or dtype differs, StorageError where bytes or values do.
    """
    return _load(Path(path), tensors, verify=verify, may_skip=may_skip, ranks=Ranks(process_group))[0]


def _load(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    verify: bool = True,
    may_skip: tuple[str, ...] = (),
    ranks: Ranks,
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Load as `load_checkpoint` does; return `extra` and the names of the tensors without a fingerprint."""
    what = f"{path} was not loaded"
    with Hands(1 if verify else 0, "ahead") as ahead:
        opened = _open_for(path, tensors, may_skip, ranks, ahead if verify else None)
        with torch.no_grad(), emptied_where_it_fails(tensors):
            checks, kinds = opened.checks if verify else {}, opened.kinds
            sums = ranks.attempt(what, lambda: fill(path, opened.held, kinds, opened.chunks, checks, verify))
            if verify:
                _check_values(path, sums, kinds, ranks)
    return dict(opened.manifest.extra), tuple(name for name, kind in kinds.items() if not kind.fingerprint)


def _check_values(path: Path, here: PartSums, kinds: Kinds, ranks: Ranks) -> None:
    """Raise StorageError on all ranks, naming the tensor, where one is not what it was before it was saved.

    Sums over all ranks, in which every copy counts, settle it where all is well and all parts have as many copies; only
    where they do not, rank 0 sees what each rank holds.
    """
    if ranks.size > 1 and _sums_agree(here, kinds, ranks):
        return

    def compare(held: list[PartSums]) -> list[None]:
        found = whole_fingerprints(held, {name: kind.shape for name, kind in kinds.items()})
        wrong = [name for name, value in found.items() if kinds[name].fingerprint not in ("", value)]
        if wrong:
            name, also = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            now = f"their fingerprint is {found[name]}" if found[name] else "ranks hold different copies"
            raise StorageError(
                f"the values of '{name}'{also} loaded from {path} are not those that were saved",
                f"{now}, and was {kinds[name].fingerprint} before the save: they were written or read wrongly",
                "use an earlier checkpoint, and report the layouts that saved and loaded it",
            )
        return [None] * len(held)

    ranks.settle(f"{path} was not loaded", lambda: here, compare)


def _sums_agree(here: PartSums, kinds: Kinds, ranks: Ranks) -> bool:
    """Return whether the sums of all that ranks hold are those of whole copies of what was saved."""
    checked = {name: math.prod(kind.shape) for name, kind in sorted(kinds.items()) if kind.fingerprint}
    values = [sum(here.get(name, {}).values()) % 2**64 for name in checked]
    elements = [sum(math.prod(sizes) for _, sizes in here.get(name, {})) for name in checked]
    totals = ranks.total([*values, *elements])
    return all(
        held % whole == 0 and held // whole * int(kinds[name].fingerprint, 16) % 2**64 == value
        for (name, whole), value, held in zip(checked.items(), totals, totals[len(checked) :], strict=False)
    )


class _Opened(NamedTuple):
    """What this rank reads of a checkpoint: files that it checks, what tensors are, and the chunks of its own parts."""

    manifest: Manifest
    checks: Mapping[str, FileEntry]
    kinds: Kinds
    held: Mapping[str, HeldPart]
    chunks: Mapping[str, Chunks]


def _open_for(
    path: Path, tensors: Mapping[str, torch.Tensor], may_skip: tuple[str, ...], ranks: Ranks, ahead: Hands | None
) -> _Opened:
    """Return what this rank reads, once no rank lacks anything; `ahead` has the disk begin with it meanwhile."""

    def open_here() -> _Opened:
        manifest = read_manifest(path)
        checks = manifest.share(ranks.rank, ranks.size)
        check_lengths(path, checks)
        if ahead is not None:
            ahead.submit(read_ahead, path, checks)
        index = IndexReader(path, manifest)
        for name, tensor in tensors.items():
            _check_tensor(path, name, tensor, index.kinds)
        held = {name: local_part(tensor) for name, tensor in tensors.items()}
        wanted = {name: places for name, (_, places) in held.items()}
        near = ranks.rank * manifest.world_size // ranks.size
        return _Opened(manifest, checks, index.kinds, held, index.find(wanted, near))

    with collector_at_rest():
        opened = ranks.attempt(f"{path} cannot be read", open_here)
    names = sorted(opened.kinds)
    asked = ranks.any_of([name in tensors for name in names])
    unread = [name for name, is_asked in zip(names, asked, strict=True) if not is_asked]
    unread = [name for name in unread if not name.startswith(may_skip)]
    if unread:
        also = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise ConfigError(
            f"{path} holds '{unread[0]}'{also}, which nothing asks for",
            "it was saved from another model or optimizer, or the optimizer's state does not exist yet",
            "call materialise_optimizer_state(optimizer) before training_state(model, optimizer)",
        )
    return opened


def _check_tensor(path: Path, name: str, tensor: torch.Tensor, kinds: Kinds) -> None:
    """Raise ConfigError where the checkpoint does not hold this tensor as it is."""
    stored = kinds.get(name)
    if stored is None:
        near = nearest(name, kinds)
        raise ConfigError(
            f"{path} holds no tensor '{name}'",
            "it was saved from another model or optimizer" + (f"; most like it is '{near}'" if near else ""),
            "the model and the optimizer that it was saved with, or another run.dir for a run that begins anew",
        )
    has = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if has != (stored.dtype, stored.shape):
        raise ConfigError(
            f"'{name}' in {path} is another tensor",
            f"it is {stored.dtype}{list(stored.shape)} there and {has[0]}{list(has[1])} here",
            "the model and precision that it was saved with, or another run.dir for a run that begins anew",
        )
    if tensor.is_meta:
        raise ConfigError(f"'{name}' cannot be loaded", "it is on the meta device", "give it storage first (to_empty)")
