"""Reads checkpoints in place into tensors of any layout, on any number of ranks.

DCP's load planner works out which part of which stored chunk each local shard needs; only those parts are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from paceline.errors import ConfigError, StorageError, suggestion
from paceline.run.checkpoint.fingerprint import parts_held, whole_fingerprints
from paceline.run.checkpoint.folder import check_lengths, list_checkpoints, verify_files
from paceline.run.checkpoint.manifest import Index, Manifest, TensorEntry, read_index, read_manifest
from paceline.run.checkpoint.ranks import Ranks, as_storage_error, single_process_is_meant
from paceline.run.checkpoint.shards import ShardReader, dtype_name


class Loaded(NamedTuple):
    """The checkpoint that was loaded, its `extra`, why newer ones were passed over, and tensors without fingerprint."""

    path: Path
    extra: dict[str, Any]
    skipped: list[str]
    unchecked: tuple[str, ...] = ()


def load_latest(
    root: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    may_skip: tuple[str, ...] = (),
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> Loaded | None:
    """Load the newest checkpoint under `root` that is sound in every byte; return None where there is none at all.

    Every rank calls it; rank 0 decides the order and all take the same one. A process that is `alone` loads for itself,
    whatever group it is in. Raises StorageError where there are
    checkpoints and none is sound, and ConfigError where the newest sound one does not hold these tensors.
    """
    root = Path(root)
    ranks = Ranks(process_group, alone)

    def names_and_reasons() -> tuple[list[str], list[str]]:
        if ranks.rank:
            return [], []
        listing = list_checkpoints(root)
        return [found.path.name for found in listing.complete], list(listing.skipped)

    names, skipped = ranks.agree(f"cannot list {root}", names_and_reasons)[0]
    for name in names:
        path = root / name
        try:
            extra, unchecked = _load(path, tensors, may_skip=may_skip, process_group=process_group, ranks=ranks)
        except StorageError as error:
            skipped.append(f"{error.what}: {error.because}")
        else:
            return Loaded(path, extra, skipped, unchecked)
    if skipped:
        raise StorageError(
            f"no checkpoint in {root} is sound",
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
) -> dict[str, Any]:
    """Load the checkpoint `path` in place into `tensors` (plain or DTensor, on any device) and return its `extra`.

    Every rank of the group calls it, each with its own names. Together they must name every stored tensor, except
    names that begin with one of `may_skip`. With `verify` all files are read and hashed first, shared out over the
    ranks, so that no tensor is touched by a damaged checkpoint; and the values that were loaded are held against the
    fingerprints taken before they were saved, where there are any.

    Raises on all ranks alike: ConfigError where a name, shape or dtype differs, StorageError where bytes or values do.
    """
    ranks = Ranks(process_group)
    return _load(Path(path), tensors, verify=verify, may_skip=may_skip, process_group=process_group, ranks=ranks)[0]


def _load(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    verify: bool = True,
    may_skip: tuple[str, ...] = (),
    process_group: dist.ProcessGroup | None,
    ranks: Ranks,
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Load as `load_checkpoint` does; return `extra` and the names of the tensors without a fingerprint."""
    what = f"{path} was not loaded"
    manifest, index = _open_for(path, tensors, may_skip, ranks)
    if verify:
        share = sorted(manifest.files)[ranks.rank :: ranks.size]
        ranks.agree(what, lambda: verify_files(path, manifest, share))
    try:
        with torch.no_grad(), single_process_is_meant():
            dcp.load(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_reader=_Reader(path, index),
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=process_group,
                no_dist=ranks.alone,
            )
    except CheckpointException as error:
        raise as_storage_error(what, {rank: wrapped[0] for rank, wrapped in error.failures.items()}) from error
    if verify:
        _check_values(path, tensors, index, ranks)
    return dict(manifest.extra), tuple(name for name, entry in index.items() if not entry.fingerprint)


def _check_values(path: Path, tensors: Mapping[str, torch.Tensor], index: Index, ranks: Ranks) -> None:
    """Raise StorageError on all ranks, naming the tensor, where one is not what it was before it was saved."""
    held = ranks.collect(parts_held(tensors))

    def compare() -> None:
        found = whole_fingerprints(held, {name: entry.shape for name, entry in index.items()})
        wrong = [name for name, value in found.items() if index[name].fingerprint not in ("", value)]
        if wrong:
            name, also = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            now = f"their fingerprint is {found[name]}" if found[name] else "ranks hold different copies"
            raise StorageError(
                f"the values of '{name}'{also} loaded from {path} are not those that were saved",
                f"{now}, and was {index[name].fingerprint} before the save: they were written or read wrongly",
                "use an earlier checkpoint, and report the layouts that saved and loaded it",
            )

    ranks.agree(f"{path} was not loaded", compare)


def _open_for(
    path: Path, tensors: Mapping[str, torch.Tensor], may_skip: tuple[str, ...], ranks: Ranks
) -> tuple[Manifest, Index]:
    """Return manifest and index once all ranks can read them and they hold what the ranks ask for."""
    here: list[tuple[Manifest, Index]] = []

    def open_here() -> set[str]:
        manifest = read_manifest(path)
        check_lengths(path, manifest)
        index = read_index(path, manifest)
        for name, tensor in tensors.items():
            _check_tensor(path, name, tensor, index)
        here.append((manifest, index))
        return set(tensors)

    asked = set().union(*ranks.agree(f"{path} cannot be read", open_here))
    unread = sorted(name for name in here[0][1] if name not in asked and not name.startswith(may_skip))
    if unread:
        also = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        raise ConfigError(
            f"{path} holds '{unread[0]}'{also}, which nothing asks for",
            "it was saved from another model or optimizer, or the optimizer's state does not exist yet",
            "call materialise_optimizer_state(optimizer) before training_state(model, optimizer)",
        )
    return here[0]


def _check_tensor(path: Path, name: str, tensor: torch.Tensor, index: Index) -> None:
    """Raise ConfigError where the checkpoint does not hold this tensor as it is."""
    stored = index.get(name)
    if stored is None:
        raise ConfigError(
            f"{path} holds no tensor '{name}'", "it was saved from another model or optimizer",
            suggestion(name, index) if index else "load another checkpoint",
        )  # fmt: skip
    has = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if has != (stored.dtype, stored.shape):
        raise ConfigError(
            f"'{name}' in {path} is another tensor",
            f"it is {stored.dtype}{list(stored.shape)} there and {has[0]}{list(has[1])} here",
            "load it with the model and precision it was saved from",
        )
    if tensor.is_meta:
        raise ConfigError(f"'{name}' cannot be loaded", "it is on the meta device", "give it storage first (to_empty)")


@dataclass
class _Reader(StorageReader):
    """Reads one checkpoint for DCP, from an index that has been checked."""

    path: Path
    index: Index

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: a reader serves one load."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Return True; the folder is given to the constructor."""
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in DCP's terms."""
        return Metadata({name: _metadata(entry) for name, entry in self.index.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the index is at hand."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every part in the plan into its place, file by file."""
        parts = []
        for item in plan.items:
            entry = self.index[item.storage_index.fqn]
            assert item.storage_index.index is not None
            if math.prod(item.lengths):
                parts.append((entry.chunks[item.storage_index.index], entry.dtype, item))
        shards = ShardReader(self.path)
        for chunk, dtype, item in sorted(parts, key=lambda part: part[0].file):
            target = planner.resolve_tensor(item)
            target.copy_(shards.read(chunk, dtype, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.shape), chunks)
