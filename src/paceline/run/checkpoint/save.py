"""Writes checkpoints: safetensors shards planned by torch.distributed.checkpoint, and a manifest that comes last.

All ranks plan together; rank 0 makes the folder, every rank writes and flushes its shard, rank 0 writes the manifest,
publishes by one rename and then removes old checkpoints. Nothing is pickled to a file: DCP contributes the planning
and the agreement on failures, its StorageWriter is ours.
"""

from __future__ import annotations

import datetime
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from paceline.errors import StorageError
from paceline.run.checkpoint import folder
from paceline.run.checkpoint.fingerprint import parts_held, whole_fingerprints
from paceline.run.checkpoint.manifest import (
    DTYPES,
    INDEX_NAME,
    MANIFEST_NAME,
    Chunk,
    FileEntry,
    Manifest,
    TensorEntry,
    encode_index,
    encode_manifest,
)  # fmt: skip
from paceline.run.checkpoint.ranks import Ranks, as_storage_error, single_process_is_meant
from paceline.run.checkpoint.shards import TensorToWrite, dtype_name, write_file, write_shard


@dataclass(frozen=True)
class CheckpointInfo:
    """A published checkpoint: its folder, the length of its files, and this rank's time for the whole call.

    `removed` names the old checkpoints deleted after it; `kept` says why something that should go stayed.
    """

    path: Path
    bytes: int
    seconds: float
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def save_checkpoint(
    root: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    *,
    keep_last: int,
    process_group: dist.ProcessGroup | None = None,
    fence: Callable[[], None] | None = None,
) -> CheckpointInfo:
    """Save `tensors` (plain or DTensor, on any device) and `extra` (JSON; rank 0's counts) as a checkpoint of `step`.

    Every rank of the group calls it. Ranks may hold different names; of a plain tensor or shard that several ranks
    hold one copy is written, by whichever rank has least to write. Old checkpoints beyond `keep_last` are removed
    after publication. A step that exists already is left alone: the new one is published beside it and is newer.
    `fence`, if given, is called on rank 0 just before publication and raises where this world has been replaced.

    Raises the same StorageError on all ranks where any of them fails; earlier checkpoints are then untouched. A rank
    that died surfaces on the others as a StorageError caused by the communication error.
    """
    assert keep_last >= 1, keep_last
    started = time.perf_counter()
    ranks = Ranks(process_group)
    writer = _Writer(Path(root), step, tensors, extra, keep_last, ranks.size, fence)
    what = f"the checkpoint of step {step} was not saved in {root}"
    try:
        with torch.no_grad(), single_process_is_meant():
            metadata = dcp.save(
                dict(tensors),
                storage_writer=writer,
                planner=_BalancedPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=process_group,
                no_dist=ranks.alone,
            )
    except CheckpointException as error:
        writer.abandon()
        failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
        own = failures.get(ranks.rank)
        if own is not None and not isinstance(own, Exception):
            raise own from None  # KeyboardInterrupt or SystemExit: DCP has told the others
        raise as_storage_error(what, failures) from error
    except RuntimeError as error:  # from a collective: torch has no narrower type for a lost peer
        writer.abandon()
        raise StorageError(  # rank 0 may have published before it was lost
            f"the save of step {step} in {root} did not finish",
            f"a rank stopped answering: {error}",
            "restart from the newest checkpoint there, which is intact",
        ) from error
    except BaseException:
        writer.abandon()
        raise
    return replace(metadata.storage_data, seconds=time.perf_counter() - started)


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise StorageError(f"'{name}' cannot be saved", f"it is a {type(tensor).__name__}, not a tensor", "use `extra`")
    if dtype_name(tensor.dtype) not in DTYPES or tensor.is_meta or tensor.layout != torch.strided:
        kind = f"it is a {tensor.layout} {tensor.dtype} tensor on {tensor.device}"
        raise StorageError(f"'{name}' cannot be saved", kind, f"dense, not on meta, one of: {', '.join(DTYPES)}")
    return tensor.detach()


class _BalancedPlanner(dcp.DefaultSavePlanner):
    """DefaultSavePlanner that writes each chunk once, on the rank with the fewest bytes so far, largest chunks first.

    DCP's own rule weighs a shard by its whole tensor, and lets replicas fall where the order of names puts them.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the tensors to save. Raises StorageError for one that a checkpoint cannot hold."""
        checked = {name: _checked(name, tensor) for name, tensor in state_dict.items()}
        super().set_up_planner(checked, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with each chunk on one rank, and the metadata. Called on rank 0."""
        return super().create_global_plan(spread(all_plans))


def spread(all_plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans with every chunk kept by one of the ranks that hold it, so that bytes are as even as can be.

    Chunks without elements are dropped, unless the tensor has none at all. Raises StorageError where ranks disagree
    about a tensor's shape or dtype.
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    items: dict[MetadataIndex, WriteItem] = {}
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            assert item.tensor_data is not None
            kind = (item.tensor_data.size, item.tensor_data.properties.dtype)
            if kinds.setdefault(item.index.fqn, kind) != kind:
                raise StorageError(
                    f"ranks disagree about '{item.index.fqn}'",
                    f"rank {rank} has {_kind(kind)}, a lower rank has {_kind(kinds[item.index.fqn])}",
                    "give tensors that differ between ranks different names, or make them DTensors",
                )
            if item.tensor_data.chunk.sizes.numel() or not item.tensor_data.size.numel():
                holders[item.index].append(rank)
                items[item.index] = item
    load_bytes = [0] * len(all_plans)
    chosen: dict[MetadataIndex, int] = {}
    # Chunks that one rank alone holds come first: they are no choice, and the choices then even them out.
    for index in sorted(holders, key=lambda index: (len(holders[index]) > 1, -_chunk_bytes(items[index]))):
        rank = min(holders[index], key=lambda rank: (load_bytes[rank], rank))
        chosen[index] = rank
        load_bytes[rank] += _chunk_bytes(items[index])
    return [
        replace(plan, items=[item for item in plan.items if chosen.get(item.index) == rank])
        for rank, plan in enumerate(all_plans)
    ]


def _chunk_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _kind(kind: tuple[torch.Size, torch.dtype]) -> str:
    return f"{dtype_name(kind[1])}{list(kind[0])}"


@dataclass(frozen=True)
class _Stored:
    """Where a chunk was written; travels to rank 0 inside DCP's WriteResult."""

    file: str
    key: str
    entry: FileEntry


@dataclass
class _Writer(StorageWriter):
    """Writes one checkpoint. The coordinator's copy holds the partial folder; all learn of it from their plan."""

    root: Path
    step: int
    tensors: Mapping[str, torch.Tensor]
    extra: Mapping[str, Any]
    keep_last: int
    world_size: int
    fence: Callable[[], None] | None
    partial: folder.Partial | None = field(default=None, init=False)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Do nothing: a writer serves one save."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Return True; the folder is given to the constructor."""
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: roles show in which of the calls below a rank gets."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the partial folder, check the space, and give each rank its file. Called on rank 0."""
        self._manifest(0, {})  # `extra` must be JSON: better said before gigabytes are written
        self.partial = folder.create_partial(self.root, self.step)
        self._check_space(sum(_chunk_bytes(item) for plan in plans for item in plan.items))
        shard = f"shard-{{:05d}}-of-{self.world_size:05d}.safetensors"
        return [replace(plan, storage_data=self.partial.folder / shard.format(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard, if it has anything to write."""
        done: Future[list[WriteResult]] = Future()
        path: Path = plan.storage_data
        # From the live tensors and their own places, not from the plan: what that gets wrong is to be seen.
        held = parts_held(self.tensors)
        entries = [_entry(item, planner) for item in plan.items]
        shard = write_shard(path, entries) if entries else FileEntry(0, "")
        written = [
            WriteResult(item.index, entry.bytes, _Stored(path.name, entry.key, shard))
            for item, entry in zip(plan.items, entries, strict=True)
        ]
        done.set_result([*written, WriteResult(MetadataIndex(""), 0, held)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, publish, remove old checkpoints; leave the CheckpointInfo in `metadata` for all ranks."""
        assert self.partial is not None
        stored = {result.index: result.storage_data for *of_rank, _ in results for result in of_rank}
        shapes = {
            name: entry.size
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        fingerprints = whole_fingerprints((of_rank[-1].storage_data for of_rank in results), shapes)
        index = {
            name: _tensor_entry(name, entry, stored, fingerprints.get(name, ""))
            for name, entry in metadata.state_dict_metadata.items()
        }
        files = {one.file: one.entry for one in stored.values()}
        files[INDEX_NAME] = write_file(self.partial.folder / INDEX_NAME, encode_index(index))
        complete = folder.list_checkpoints(self.root).complete
        sequence = 1 + max((found.manifest.sequence for found in complete), default=0)
        manifest, content = self._manifest(sequence, files)
        folder.check_lengths(self.partial.folder, manifest)  # finds machines that do not share the folder
        write_file(self.partial.folder / MANIFEST_NAME, content)
        if self.fence is not None:
            self.fence()
        path = self.partial.publish(self.step)
        self.partial = None
        removed, kept = folder.remove_old(self.root, self.keep_last, path)
        kept += folder.clear_partials(self.root)
        metadata.storage_data = CheckpointInfo(path, manifest.total_bytes, 0.0, tuple(removed), tuple(kept))

    def abandon(self) -> None:
        """Remove the partial folder after a failed save, where this rank made it."""
        if self.partial is not None:
            self.partial.discard()
            self.partial = None

    def _manifest(self, sequence: int, files: Mapping[str, FileEntry]) -> tuple[Manifest, bytes]:
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        manifest = Manifest(self.step, sequence, created, self.world_size, files, dict(self.extra))
        try:
            return manifest, encode_manifest(manifest)
        except (TypeError, ValueError, RecursionError) as error:
            raise StorageError("`extra` cannot be saved", f"it is not plain JSON: {error}", "spell it out") from error

    def _check_space(self, needed_bytes: int) -> None:
        """Raise StorageError where the file system says that it lacks the space; some say nothing (size 0)."""
        usage = shutil.disk_usage(self.root)
        if usage.total and usage.free < needed_bytes:
            raise StorageError(
                f"the checkpoint of step {self.step} was not saved in {self.root}",
                f"it needs {needed_bytes:,} bytes and {usage.free:,} are free",
                "free space, lower run.keep_last, or choose another run.dir",
            )


def _entry(item: WriteItem, planner: SavePlanner) -> TensorToWrite:
    """Return what to write for a plan item: its key is the tensor's name, with the slice where it is not the whole."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    key = item.index.fqn
    if chunk.sizes != item.tensor_data.size:
        slices = (f"{at}:{at + size}" for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
        key = f"{key}[{','.join(slices)}]"

    def load() -> torch.Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    return TensorToWrite(key, dtype_name(item.tensor_data.properties.dtype), tuple(chunk.sizes), load)


def _tensor_entry(name: str, metadata: Any, stored: Mapping[MetadataIndex, _Stored], fingerprint: str) -> TensorEntry:
    assert isinstance(metadata, TensorStorageMetadata)
    chunks = []
    for chunk in metadata.chunks:
        where = stored[MetadataIndex(name, chunk.offsets)]
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), where.file, where.key))
    return TensorEntry(dtype_name(metadata.properties.dtype), tuple(metadata.size), tuple(chunks), fingerprint)
