"""Writes checkpoints in three calls that every rank makes: snapshot, write, publish.

`take_snapshot` (snapshot.py) copies the state and sends nothing. `write` and `publish` touch nothing that trains: they
may run beside the next steps, in a thread and on a process group of their own. `save_checkpoint` is all three at once.
A checkpoint has its name as soon as the disk has it; then it is read back, and withdrawn where it is not what was
written. Older ones go after that. Nothing is pickled to a file.
"""

from __future__ import annotations

import datetime
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.checkpoint import folder
from paceline.checkpoint.beside.sums import SumsBeside
from paceline.checkpoint.files.flushes import Flushes
from paceline.checkpoint.files.read_back import verify_files
from paceline.checkpoint.index import IndexReader, encode_kinds, encode_part
from paceline.checkpoint.manifest import (
    MANIFEST_NAME,
    TABLE_NAME,
    FileEntry,
    Manifest,
    encode_manifest,
    files_of,
    read_manifest,
    shard_name,
    unchanged_name,
)
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.save_plan import KeptPlan, SavePlan
from paceline.checkpoint.shards import Chunk, TensorToWrite, compare_shard, write_file, write_shard
from paceline.checkpoint.snapshot import Part, Snapshot, take_snapshot
from paceline.checkpoint.tiers.newest import next_sequence
from paceline.checkpoint.tiers.retention import Retention
from paceline.checkpoint.tiers.unchanged import Unchanged
from paceline.checkpoint.untrusted import content, refusal
from paceline.checkpoint.writers.clear import clear
from paceline.checkpoint.writers.lists import KnownFiles, tell_of_files
from paceline.errors import StorageError, exhausted_by


@dataclass(frozen=True)
class CheckpointInfo:
    """A published checkpoint: its folder, the length of its files, and this rank's time for the whole call.

    `removed` names the old checkpoints deleted after it; `kept` says why something that should go stayed. Of the time
    are `after_seconds` those in which it was durable under its name already: it was read back, and old ones removed.
    """

    path: Path
    bytes: int
    seconds: float
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    after_seconds: float = 0.0


@dataclass
class Written:
    """A checkpoint whose values are on disk, in a partial folder that no load reads. The first lines are every rank's.

    `own` is what this rank has written, by file, to be compared with what the disk gives back, and `listed` what it
    knows of files in the folder `unfinished`. `table` and `partial` are rank 0's: the table of tensors, and the folder.
    """

    root: Path
    step: int
    ranks: Ranks
    extra: Mapping[str, object] = field(default_factory=dict)
    unchanged: Unchanged = field(default_factory=Unchanged)
    own: dict[str, Sequence[TensorToWrite]] = field(default_factory=dict)
    listed: KnownFiles = field(default_factory=KnownFiles)
    unfinished: Path = Path()
    table: bytes = b""
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
    extra: Mapping[str, object],
    *,
    keep_last: int | Retention,
    process_group: dist.ProcessGroup | None = None,
    fence: Callable[[], None] | None = None,
    kept: KeptPlan | None = None,
    alone: bool = False,
    beside: Sequence[Path] = (),
    unchanged: Unchanged | None = None,
) -> CheckpointInfo:
    """Save `tensors` (plain or DTensor, on any device) and `extra` (JSON; rank 0's counts) as a checkpoint of `step`.

    Every rank of the group calls it. Ranks may hold different names; of a plain tensor or shard that several ranks
    hold one copy is written, by whichever rank has least to write. Old checkpoints beyond `keep_last` are removed
    after publication. A step that exists already is left alone: the new one is published beside it and is newer.
    `fence`, if given, is called on rank 0 just before publication and raises where this world has been replaced.
    `kept` and `unchanged`, the same for each save of a training (to this root), spare the work of planning one like the
    last, and writing again what it holds. A process that is
    `alone` saves for itself, whatever group it is in.

    Raises the same StorageError on all ranks where any of them fails; earlier checkpoints are then untouched. A rank
    that died surfaces on the others as a StorageError caused by the communication error.
    """
    started = time.perf_counter()
    written = Written(Path(root), step, Ranks(process_group, alone))
    with giving_up(written):
        taken = written.ranks.attempt(written.what, lambda: take_snapshot(step, tensors, extra, copy=False))
    written = write(Path(root), taken, process_group=process_group, kept=kept, alone=alone, unchanged=unchanged)
    info = publish(written, keep_last=keep_last, fence=fence, beside=beside)
    return replace(info, seconds=time.perf_counter() - started)


def write(
    root: Path,
    taken: Snapshot,
    *,
    process_group: dist.ProcessGroup | None = None,
    kept: KeptPlan | None = None,
    alone: bool = False,
    unchanged: Unchanged | None = None,
    fence: Callable[[], None] | None = None,
) -> Written:
    """Write each rank's shard and its part of the index into a new partial folder.

    Every rank of the group calls it, with its own snapshot of one step, whose values must stay until `publish` has
    returned. `unchanged`, the same for each save of a training to this root, spares what the checkpoint before holds.
    `fence` is called on rank 0 before the first folder is made. Raises as `save_checkpoint` does.
    """
    written = Written(Path(root), taken.step, Ranks(process_group, alone), taken.extra)
    written.unchanged = unchanged or Unchanged()
    with giving_up(written):
        ranks, what = written.ranks, written.what
        plan = (kept or KeptPlan()).for_save(what, taken, ranks)
        unfinished, last = ranks.from_first(what, partial(_begin, written, plan, fence))
        written.unfinished = unfinished
        # A rank that has come anew knows no last checkpoint: then none does, or indexes would name different files.
        if ranks.any_of([written.unchanged.folder != last])[0]:
            written.unchanged.forget()
        files, taken = ranks.attempt(what, partial(_write_share, written, unfinished, plan, taken))
        fingerprints = plan.fingerprints(taken, ranks)
        written.listed = tell_of_files(files, ranks, what, unfinished)
        ranks.from_first(what, partial(_make_table, written, plan, fingerprints))
    return written


def publish(
    written: Written,
    *,
    keep_last: int | Retention,
    fence: Callable[[], None] | None = None,
    beside: Sequence[Path] = (),
) -> CheckpointInfo:
    """Give what was written its final name, read it back, and remove old checkpoints beyond `keep_last`.

    Every rank calls it. The checkpoint becomes the newest of its root and of the roots `beside`. Before that rank 0
    reads manifest and table back and looks for every file. After it every rank compares what it has written with what
    the disk gives back: a checkpoint that is otherwise is withdrawn, and costs no older one.
    """
    retention = keep_last if isinstance(keep_last, Retention) else Retention(keep_last)
    assert retention.last >= 1, retention
    ranks, what = written.ranks, written.what
    with giving_up(written):
        # Nothing has its name before every rank has called this. Machines that do not share the folder are found.
        ranks.attempt(what, partial(folder.check_lengths, written.unfinished, written.listed.own))
        path, total_bytes = ranks.from_first(what, partial(_finish, written, fence, beside))
        published = time.perf_counter()
        _read_back(written, path)
        removed, kept = clear(ranks, what, written.root, retention, path)
    written.unchanged.published(path)
    return CheckpointInfo(path, total_bytes, 0.0, removed, kept, time.perf_counter() - published)


@contextmanager
def giving_up(written: Written) -> Iterator[None]:
    """Abandon what was written where something fails; say so where a collective fails for the lack of a peer."""
    try:
        with torch.no_grad():
            yield
    except RuntimeError as error:  # torch has no narrower type for a lost peer
        written.abandon()
        if exhausted_by(error) is not None:  # its allocators have none either, and nobody else hears of this one
            raise written.ranks.exhausted(written.what, error) from error
        raise _cut_off(written) from error
    except BaseException:
        written.abandon()
        raise


def _cut_off(written: Written) -> StorageError:
    """Return the error of a save in which a rank was lost. What torch says of that is its cause, and not its text.

    Which rank it was, and why, is for the supervisor to say. Rank 0 may have published before the loss.
    """
    named = f"{folder.checkpoint_name(written.step)} in {written.root}"
    if (written.root / folder.checkpoint_name(written.step)).is_dir():
        return StorageError(
            f"{named} is published, and a rank stopped answering before all had heard of it",
            "a process of the run has ended: the supervisor says which",
            "restart: it is taken where it is sound, as far as it was written",
        )
    return StorageError(
        f"the save of step {written.step} in {written.root} did not finish: a rank stopped answering",
        "a process of the run has ended: the supervisor says which",
        "restart from the newest checkpoint there, which is intact",
    )


def _begin(written: Written, plan: SavePlan, fence: Callable[[], None] | None = None) -> tuple[Path, Path | None]:
    """Make the partial folder, check the space; return that folder and the last checkpoint's. Called on rank 0."""
    if fence is not None:
        fence()
    written.partial = folder.create_partial(written.root, written.step)
    _check_space(written, plan.bytes)
    return written.partial.folder, written.unchanged.folder


def _write_share(
    written: Written, unfinished: Path, plan: SavePlan, taken: Snapshot
) -> tuple[dict[str, FileEntry], Snapshot]:
    """Write this rank's shard, if it has anything to write, and its part of the index.

    Return these files, and the snapshot with the fingerprints of all parts.
    """
    with SumsBeside(taken) as sums:
        files = _write_files(written, unfinished, plan, taken, sums)
        return files, sums.whole()


def _write_files(
    written: Written, unfinished: Path, plan: SavePlan, taken: Snapshot, sums: SumsBeside
) -> dict[str, FileEntry]:
    rank, unchanged = written.ranks.rank, written.unchanged
    chunks: dict[str, list[Chunk]] = {}
    entries: list[TensorToWrite] = []
    own: list[TensorToWrite] = []
    own_parts: list[Part] = []
    still = sums.still(unchanged)
    for (part, values), writer in zip(taken.values.items(), plan.writers, strict=True):
        if writer >= 0:
            name = unchanged_name(writer, plan.size) if part in still else shard_name(writer, plan.size)
            chunks.setdefault(part.name, []).append(Chunk(part.offsets, part.sizes, name, part.key))
        if writer == rank:
            (own if part in still else entries).append(_entry(part, values))
            own_parts += [still[part]] if part in still else []
    shard, index, kept = files_of(rank, plan.size)
    files = {}
    with Flushes() as flushes:
        if entries:
            files[shard] = write_shard(unfinished / shard, entries, flushes)
            written.own[shard] = entries
        if own:
            linked = unchanged.link(frozenset(own_parts), unfinished / kept)
            files[kept] = linked or write_shard(unfinished / kept, own, flushes)
            written.own |= {} if linked else {kept: own}
        unchanged.wrote(sums.whole().values, frozenset(own_parts), kept, files.get(kept), sums.samples)
        if chunks:
            files[index] = write_file(unfinished / index, encode_part(chunks), flushes)
            with refusal(unfinished, index):
                content(unfinished / index)  # no more than a load accepts
            verify_files(unfinished, {index: files[index]})
    return files


def _entry(part: Part, values: torch.Tensor) -> TensorToWrite:
    return TensorToWrite(part.key, part.dtype, part.sizes, lambda: values)


def _make_table(written: Written, plan: SavePlan, fingerprints: Mapping[str, str]) -> None:
    """Make the table of tensors. Called on rank 0."""
    kinds = {name: replace(kind, fingerprint=fingerprints.get(name, "")) for name, kind in plan.kinds.items()}
    kinds = {name: kind if math.prod(kind.shape) else replace(kind, fingerprint="") for name, kind in kinds.items()}
    written.table = encode_kinds(kinds)


def _finish(written: Written, fence: Callable[[], None] | None, beside: Sequence[Path]) -> tuple[Path, int]:
    """Write table and manifest, read them back, publish; return the folder and its length. Called on rank 0."""
    assert written.partial is not None
    unfinished, listed = written.partial.folder, written.listed
    sequence = next_sequence([written.root, *beside])
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with Flushes() as flushes:
        files = {**listed.of_manifest, TABLE_NAME: write_file(unfinished / TABLE_NAME, written.table, flushes)}
        manifest = Manifest(written.step, sequence, created, written.ranks.size, files, written.extra)
        folder.check_lengths(unfinished, listed.lists)  # the first ranks of lists have looked for their files
        write_file(unfinished / MANIFEST_NAME, encode_manifest(manifest, listed.version), flushes)
    IndexReader(unfinished, read_manifest(unfinished))
    if fence is not None:
        fence()
    path = written.partial.publish(written.step)
    written.partial = None
    return path, manifest.total_bytes + listed.bytes


def _read_back(written: Written, path: Path) -> None:
    """Compare what each rank wrote with what the disk gives back, and withdraw the checkpoint where any of it differs.

    Raises StorageError on all ranks then. Where a rank is interrupted meanwhile the checkpoint stays, and so do older
    ones.
    """
    ranks, what = written.ranks, written.what

    def compare() -> Exception | None:
        try:
            for name, entries in written.own.items():
                compare_shard(path / name, entries)
        except (OSError, StorageError) as error:
            return error
        finally:
            written.own.clear()  # and with it the values
        return None

    error = ranks.attempt(what, compare)
    if ranks.any_of([error is not None])[0]:
        ranks.from_first(what, partial(folder.withdraw, path))
        ranks.attempt(what, partial(_raise, error))


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _check_space(written: Written, needed_bytes: int) -> None:
    """Raise StorageError where the file system says that it lacks the space; some say nothing (size 0)."""
    usage = shutil.disk_usage(written.root)
    if usage.total and usage.free < needed_bytes:
        raise StorageError(
            written.what,
            f"it needs {needed_bytes:,} bytes and {usage.free:,} are free",
            "free space, lower run.keep_last, or choose another run.dir",
        )
