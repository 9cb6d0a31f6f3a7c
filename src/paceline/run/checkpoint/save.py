"""Writes checkpoints in three calls that every rank makes: snapshot, write, publish.

`take_snapshot` (snapshot.py) copies the state and sends nothing. `write` and `publish` touch nothing that trains: they
may run beside the next steps, in a thread and on a process group of their own. `save_checkpoint` is all three at once.
Nothing is pickled to a file.
"""

from __future__ import annotations

import datetime
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.errors import StorageError
from paceline.run.checkpoint import folder
from paceline.run.checkpoint.index import IndexReader, TensorKind, encode_kinds, encode_part
from paceline.run.checkpoint.manifest import (
    MANIFEST_NAME,
    TABLE_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
    part_name,
    read_manifest,
    shard_name,
)
from paceline.run.checkpoint.ranks import Ranks
from paceline.run.checkpoint.shards import Chunk, TensorToWrite, write_file, write_shard
from paceline.run.checkpoint.snapshot import Part, Snapshot, take_snapshot
from paceline.run.checkpoint.spread import kinds_of, spread
from paceline.run.checkpoint.untrusted import content, refusal


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


class ToWrite(NamedTuple):
    """What a rank is told to write: into which folder, and for each of its parts the rank that writes it."""

    folder: Path
    writers: list[int]  # -1 for a part that is not written at all


@dataclass
class Written:
    """A checkpoint whose files are on disk, in a partial folder that no load reads. All but `ranks` is rank 0's."""

    root: Path
    step: int
    ranks: Ranks
    extra: Mapping[str, Any] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    partial: folder.Partial | None = None

    @property
    def what(self) -> str:
        """Return what has happened where the save fails."""
        return f"the checkpoint of step {self.step} was not saved in {self.root}"

    def abandon(self) -> None:
        """Remove the files where this rank made the folder: they will not be published."""
        if self.partial is not None:
            self.partial.discard()
            self.partial = None


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
    started = time.perf_counter()
    taken: list[Snapshot] = []
    written = Written(Path(root), step, Ranks(process_group))
    with _giving_up(written):
        take = partial(_append, taken, lambda: take_snapshot(step, tensors, extra, copy=False))
        written.ranks.settle(written.what, take, _nothing)
    written = write(Path(root), taken[0], process_group=process_group)
    info = publish(written, keep_last=keep_last, fence=fence)
    return replace(info, seconds=time.perf_counter() - started)


def write(root: Path, taken: Snapshot, *, process_group: dist.ProcessGroup | None = None) -> Written:
    """Write each rank's shard and its part of the index into a new partial folder, and read both back.

    Every rank of the group calls it, with its own snapshot of one step. Raises as `save_checkpoint` does.
    """
    written = Written(Path(root), taken.step, Ranks(process_group), taken.extra)
    with _giving_up(written):
        kinds: dict[str, TensorKind] = {}
        share = written.ranks.settle(written.what, lambda: list(taken.values), partial(_begin, written, kinds))
        rank, size = written.ranks.rank, written.ranks.size
        written.ranks.settle(
            written.what, partial(_write_share, share, taken, rank, size), partial(_collect, written, kinds)
        )
    return written


def publish(written: Written, *, keep_last: int, fence: Callable[[], None] | None = None) -> CheckpointInfo:
    """Give what was written its final name, and remove old checkpoints beyond `keep_last`. Every rank calls it.

    Before that rank 0 reads manifest and table back and looks for every file: what cannot be read is not published.
    """
    assert keep_last >= 1, keep_last
    with _giving_up(written):
        finish = partial(_finish, written, keep_last, fence)
        return written.ranks.settle(written.what, lambda: None, lambda _: [finish()] * written.ranks.size)


@contextmanager
def _giving_up(written: Written) -> Iterator[None]:
    """Abandon what was written where something fails; say so where a collective fails for the lack of a peer."""
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:  # torch has no narrower type for a lost peer
        written.abandon()
        raise StorageError(  # rank 0 may have published before it was lost
            f"the save of step {written.step} in {written.root} did not finish",
            f"a rank stopped answering: {error}",
            "restart from the newest checkpoint there, which is intact",
        ) from error
    except BaseException:
        written.abandon()
        raise


def _begin(written: Written, kinds: dict[str, TensorKind], of_ranks: list[list[Part]]) -> list[ToWrite]:
    """Make the partial folder, check the space, and return each rank's share. Called on rank 0."""
    writers = spread(of_ranks)
    kinds.update(kinds_of(of_ranks))
    written.partial = folder.create_partial(written.root, written.step)
    needed = {(part.name, part.box): part.bytes for parts in of_ranks for part in parts}
    _check_space(written, sum(needed.values()))
    return [
        ToWrite(written.partial.folder, [writers.get((part.name, part.box), -1) for part in parts])
        for parts in of_ranks
    ]


def _write_share(share: ToWrite, taken: Snapshot, rank: int, size: int) -> dict[str, FileEntry]:
    """Write this rank's shard, if it has anything to write, and its part of the index; return them, read back."""
    chunks: dict[str, list[Chunk]] = {}
    entries = []
    for (part, values), writer in zip(taken.values.items(), share.writers, strict=True):
        if writer >= 0:
            chunk = Chunk(part.offsets, part.sizes, shard_name(writer, size), part.key)
            chunks.setdefault(part.name, []).append(chunk)
        if writer == rank:
            entries.append(_entry(part, values))
    shard, index = shard_name(rank, size), part_name(rank, size)
    files = {}
    if entries:
        files[shard] = write_shard(share.folder / shard, entries)
    if chunks:
        files[index] = write_file(share.folder / index, encode_part(chunks))
        with refusal(share.folder, index):
            content(share.folder / index)  # no more than a load accepts
    folder.verify_files(share.folder, files)
    return files


def _entry(part: Part, values: torch.Tensor) -> TensorToWrite:
    return TensorToWrite(part.key, part.dtype, part.sizes, lambda: values)


def _collect(written: Written, kinds: Mapping[str, TensorKind], of_ranks: list[dict[str, FileEntry]]) -> list[None]:
    """Note the files of all ranks and write the table of tensors. Called on rank 0."""
    assert written.partial is not None
    written.files = {name: entry for files in of_ranks for name, entry in files.items()}
    written.files[TABLE_NAME] = write_file(written.partial.folder / TABLE_NAME, encode_kinds(kinds))
    return [None] * len(of_ranks)


def _finish(written: Written, keep_last: int, fence: Callable[[], None] | None) -> CheckpointInfo:
    """Write the manifest, read it back with the table, publish, remove old checkpoints. Called on rank 0."""
    assert written.partial is not None
    unfinished = written.partial.folder
    complete = folder.list_checkpoints(written.root).complete
    sequence = 1 + max((found.manifest.sequence for found in complete), default=0)
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(written.step, sequence, created, written.ranks.size, written.files, written.extra)
    folder.check_lengths(unfinished, manifest)  # finds machines that do not share the folder
    write_file(unfinished / MANIFEST_NAME, encode_manifest(manifest))
    IndexReader(unfinished, read_manifest(unfinished))
    if fence is not None:
        fence()
    path = written.partial.publish(written.step)
    written.partial = None
    removed, kept = folder.remove_old(written.root, keep_last, path)
    kept += folder.clear_partials(written.root)
    return CheckpointInfo(path, manifest.total_bytes, 0.0, tuple(removed), tuple(kept))


def _check_space(written: Written, needed_bytes: int) -> None:
    """Raise StorageError where the file system says that it lacks the space; some say nothing (size 0)."""
    usage = shutil.disk_usage(written.root)
    if usage.total and usage.free < needed_bytes:
        raise StorageError(
            written.what,
            f"it needs {needed_bytes:,} bytes and {usage.free:,} are free",
            "free space, lower run.keep_last, or choose another run.dir",
        )


def _append(items: list[Any], make: Callable[[], Any]) -> None:
    items.append(make())


def _nothing(of_ranks: Sequence[Any]) -> list[None]:
    return [None] * len(of_ranks)
