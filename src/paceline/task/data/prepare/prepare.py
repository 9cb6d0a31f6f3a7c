"""Preparing a corpus: its documents tokenised by several processes into a folder of token shards.

The parts of the corpus follow from its files alone, and each part makes its own shards: any number of workers writes
the same bytes. A part that is done leaves a receipt in OUT/.work, so that a preparation that was interrupted goes on
where it stopped. `shards.json` is written last: without it a folder is not finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import numpy as np

from paceline.durable import write_text
from paceline.errors import ConfigError, DataError, StorageError, WorkerDied
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.card import make_card
from paceline.task.data.prepare.corpus_parts import PART_BYTES, CorpusPart, documents_of, parts_of
from paceline.task.data.prepare.earlier import write_earlier
from paceline.task.data.prepare.work import (
    WORK,
    PrepareJob,
    Receipt,
    begin_worker,
    hashes_path,
    keep_path,
    save,
    survey,
    tokenise,
)
from paceline.task.data.sources.documents import Damaged
from paceline.task.data.sources.files import list_files
from paceline.task.data.sources.held_out import document_hash, split_limit, split_value
from paceline.task.data.sources.listing import CorpusFiles
from paceline.task.data.sources.shards.folder import INDEX, TOKENIZER, ShardIndex, read_index, with_more, write_index
from paceline.task.data.sources.shards.opened import storage_of
from paceline.task.data.sources.tokenizer import ByteTokenizer, Tokenizer, from_json, load_tokenizer, train_bpe
from paceline.task.data.sources.tokens import SPLITS
from paceline.task.data.storage.locked import unlock
from paceline.units import plural

LOCK = "lock"  # the file of a folder of work that a preparation holds while it writes there
FORMAT = 1  # raise it when the same documents would give other shards
Result = TypeVar("Result")
SaysProgress = Callable[[str, float], None]  # what is done, and how much of it: 0..1


class PreparationBusy(StorageError):
    """Another process writes to the folder."""


@dataclass(frozen=True)
class PreparedShards:
    """A folder of shards, which may be a URL. `made` is False where it was there already."""

    folder: Path | str
    index: ShardIndex
    made: bool


def prepare(
    data: DataSpec,
    folder: Path,
    workers: int = 1,
    dedup: bool = False,
    append: bool = False,
    part_bytes: int = PART_BYTES,
    progress: SaysProgress = lambda what, share: None,
) -> PreparedShards:
    """Write the documents of `data` as token shards into `folder` and return what is there then.

    `dedup` keeps the first of equal documents. `append` adds to a folder that is finished, with its tokenizer; with
    `dedup` documents that the folder holds are not added again. Raises DataError for documents that cannot be read,
    ConfigError for a folder that holds something else and for a mixture, StorageError for a folder that cannot be
    written, and WorkerDied where a process of the work was ended from outside.
    """
    if data.mix:  # task.data.source is none of its sources, and would be read in their place
        raise ConfigError(
            "prepare of a mixture", f"one source is read, and it has {', '.join(each.source for each in data.mix)}",
            "each of them by itself; a mixture may be of prepared folders",
        )  # fmt: skip
    listing = list_files(data)
    before = _before(data, folder, append)
    limit = _limit(data, listing, part_bytes, append)
    job_key = _key(data, listing, dedup, part_bytes, limit)
    if before is not None and job_key in before.card.get("jobs", []):
        _clear(folder)
        return PreparedShards(folder, before, False)
    if before is not None and not append:
        raise ConfigError(
            f"{folder} holds other shards",
            f"they are from {', '.join(before.card.get('source', []))}, or made by other options",
            "name another folder, or --append to add to these",
        )  # fmt: skip
    with _told(folder), _alone(folder):
        if _before(data, folder, append) == before:
            parts = parts_of(listing, part_bytes, is_whole=data.max_bytes > 0)
            first = int(before.card.get("parts", 0)) if before else 0
            job = PrepareJob(data, replace(listing, files=()), len(listing.files), str(folder), limit, dedup, first)
            return PreparedShards(folder, _written(job, parts, before, job_key, workers, progress), True)
        _remove(folder / WORK)  # another preparation has ended since the look, and left nothing in it
    return prepare(data, folder, workers, dedup, append, part_bytes, progress)


def _written(
    job: PrepareJob, parts: Sequence[CorpusPart], before: ShardIndex | None, key: str, workers: int,
    progress: SaysProgress,
) -> ShardIndex:  # fmt: skip
    """Write the shards of a job, or what of them is missing, and return the index. The folder's lock is held."""
    data, folder, work = job.data, Path(job.folder), job.work
    _begin(work, f"{key} {before.fingerprint if before else ''}")
    tokenizer = _tokenizer(data, job, parts, folder if before else None, progress)
    with _pool(workers) as pool:
        if job.dedup:
            _each(pool, survey, job, parts, "reading", progress)
            _choose(work, parts)
            if before is not None:
                write_earlier(work, folder, before, storage_of(data))
        receipts = _each(pool, tokenise, job, parts, "tokenising", progress)
    index = _index(job, tokenizer, receipts, before, key)
    write_text(folder / TOKENIZER, tokenizer.to_json())
    write_index(folder, index)
    _remove(work)
    return index


def _clear(folder: Path) -> None:
    """Remove the work of a preparation that ended after its last shard and before that, unless another one goes on."""
    with _told(folder), contextlib.suppress(PreparationBusy):
        if (folder / WORK).is_dir():
            with _alone(folder):
                _remove(folder / WORK)


def _remove(work: Path) -> None:
    """Remove a folder of work whose lock is held. The lock goes last: from then on the folder may be another one's."""
    for path in work.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    (work / LOCK).unlink()
    with contextlib.suppress(OSError):  # another preparation has begun in it
        work.rmdir()


def _before(data: DataSpec, folder: Path, append: bool) -> ShardIndex | None:
    """Return the index of a folder that is finished, None where it is not. Raises ConfigError for other folders."""
    if (folder / INDEX).is_file():
        return read_index(str(folder), storage_of(data))
    if append:
        raise ConfigError(
            f"{folder} holds no shards", f"it has no {INDEX}, so nothing can be added", "leave out --append"
        )
    if folder.is_dir() and not (folder / WORK).is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty", "shards are written to a folder of their own", "name another folder"
        )
    return None


def _limit(data: DataSpec, listing: CorpusFiles, part_bytes: int, append: bool) -> int:
    """Return the split value below which documents are held out: the fraction of all, or what holds out the lowest.

    A small corpus has one document held out so, as in the cache. Reads on until the first is found that the fraction
    holds out anyway. Shards that are added to others keep to the fraction.
    """
    limit, seen = int(data.validation_fraction * 2**64), set[int]()  # the lowest and the highest value
    for part in parts_of(listing, part_bytes, is_whole=data.max_bytes > 0) if limit and not append else ():
        for document in documents_of(data, listing, part, Damaged(data.on_bad == "skip")):
            if document.held_out is not None:  # as names say
                return limit
            seen.add(split_value(document_hash(document.text)))
            seen = {min(seen), max(seen)}
            if min(seen) < limit:
                return limit
    return split_limit(seen, data.validation_fraction)  # of one text alone, however often, nothing is held out


def _key(data: DataSpec, listing: CorpusFiles, dedup: bool, part_bytes: int, limit: int) -> str:
    """Return a hash of all that decides the shards, taking a file's size and time for its content."""
    tokenizer: list[object] = [data.tokenizer, data.vocab if data.tokenizer == "bpe" else 0]
    if data.tokenizer not in ("bytes", "bpe"):
        loaded = load_tokenizer(data.tokenizer)
        tokenizer = [loaded.identity, *loaded.opening]
    files = [file.decides() for file in listing.files]
    options = [data.validation_fraction, data.text_field, data.on_bad, dedup, part_bytes,
               data.document_tokens, data.score_field, data.score_min, data.score_max]  # fmt: skip
    options += [data.max_bytes] if data.max_bytes else []
    options += [limit] if limit != int(data.validation_fraction * 2**64) else []
    decides = [FORMAT, listing.kind, tokenizer, *options, files]
    return hashlib.blake2b(json.dumps(decides).encode(), digest_size=16).hexdigest()


def _begin(work: Path, key: str) -> None:
    """Make the folder of what is not finished, or see that it is that of the same work."""
    note = work / "job"
    if note.is_file() and note.read_text(encoding="utf-8") != key:
        raise ConfigError(
            f"{work.parent} holds the unfinished work of another preparation",
            "its files, its tokenizer or its options are not those of now", f"remove {work}, or name another folder",
        )  # fmt: skip
    write_text(note, key)


def _tokenizer(
    data: DataSpec, job: PrepareJob, parts: Sequence[CorpusPart], before: Path | None, progress: SaysProgress
) -> Tokenizer:
    """Return the tokenizer, learned from the corpus where it is to be; workers find it in the folder of the work."""
    path = job.work / TOKENIZER
    if path.is_file():
        return from_json(path.read_text(encoding="utf-8"), data.tokenizer)
    tokenizer: Tokenizer
    if before is not None:
        tokenizer = from_json((before / TOKENIZER).read_text(encoding="utf-8"), data.tokenizer)
    elif data.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif data.tokenizer == "bpe":
        progress("learning a tokenizer", 0.0)
        tokenizer = train_bpe(_training_texts(data, job, parts), data.vocab)
    else:
        tokenizer = load_tokenizer(data.tokenizer)
    write_text(path, tokenizer.to_json())
    return tokenizer


def _training_texts(data: DataSpec, job: PrepareJob, parts: Sequence[CorpusPart]) -> Iterator[bytes]:
    for part in parts:
        for document in documents_of(data, job.listing, part, Damaged(data.on_bad == "skip")):
            if not document.is_held_out(job.limit):
                yield document.text


def _choose(work: Path, parts: Sequence[CorpusPart]) -> None:
    """Write which documents of each part are kept: of equal ones the first."""
    hashes = [np.load(hashes_path(work, part.number)) for part in parts]
    together = np.ascontiguousarray(np.concatenate(hashes)).view("V16").reshape(-1)
    _, firsts = np.unique(together, return_index=True)
    kept = np.zeros(len(together), dtype=bool)
    kept[firsts] = True
    ends = np.cumsum([len(each) for each in hashes])
    for part, start, stop in zip(parts, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        save(keep_path(work, part.number), kept[start:stop])


def _each(
    pool: ProcessPoolExecutor | None,
    do: Callable[[PrepareJob, CorpusPart], Result],
    job: PrepareJob,
    parts: Sequence[CorpusPart],
    what: str,
    progress: SaysProgress,
) -> list[Result]:
    """Return `do(job, part)` for each part, in order; the first error ends all."""
    total, done = max(1, sum(part.bytes for part in parts)), 0
    progress(what, 0.0)
    if pool is None:
        results = []
        for part in parts:
            results.append(do(job, part))
            done += part.bytes
            progress(what, done / total)
        return results
    coming = {pool.submit(do, job, part): part for part in parts}
    workers = multiprocessing.active_children()
    try:
        for future in as_completed(coming):
            future.result()
            done += coming[future].bytes
            progress(what, done / total)
    except BaseException as error:
        pool.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise _died(workers, what) from error
        raise
    return [future.result() for future in coming]


def _died(workers: Sequence[BaseProcess], what: str) -> WorkerDied:
    """Return the error of a process that was ended; the pool ends the others by SIGTERM."""
    codes = [code for process in workers if (code := process.exitcode) and code != -signal.SIGTERM]
    number = next((-code for code in codes if code < 0), 0)
    name = f" by {signal.Signals(number).name}" if number else ""
    return WorkerDied(
        f"a process was ended{name} at {what}",
        "it left no error; where memory runs out, the system ends a process by SIGKILL",
        "start the same command again: what is done is kept; fewer --workers take less memory",
        exit_code=128 + number if number else 1,
    )


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Give processes that are started anew, never forked, or None where this process does the work."""
    if workers == 1:
        yield None
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin_worker) as pool:
        yield pool


def _index(
    job: PrepareJob, tokenizer: Tokenizer, receipts: Sequence[Receipt], before: ShardIndex | None, key: str
) -> ShardIndex:
    found = {split: tuple(each.shards[split] for each in receipts if split in each.shards) for split in SPLITS}
    nothing_new = before is not None and any(each.duplicates for each in receipts)
    if not any(found.values()) and not nothing_new:
        first = next((each.left_out_first for each in receipts if each.left_out), "")
        raise DataError(
            f"'{job.data.source}' holds no text",
            f"{plural(job.files, 'file')} read, and no text found{f' but damaged: {first}' if first else ''}",
            "name other data",
        )
    name = job.data.tokenizer if job.data.tokenizer in ("bytes", "bpe") else tokenizer.name
    new = ShardIndex(name, tokenizer.vocab, tokenizer.end_of_document, found)
    index = new if before is None else with_more(before, found)
    return replace(index, card=make_card(job, receipts, tokenizer, index, key))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a folder against a second preparation at the same time."""
    path = folder / WORK / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        stream = path.open("w")
    except FileNotFoundError as error:  # who held it has ended since, and taken the folder away
        raise _busy(folder) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_taken = not os.path.samestat(os.fstat(stream.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError) as error:  # or the lock
            raise _busy(folder) from error
        if is_taken:
            raise _busy(folder)
        try:
            yield
        finally:
            unlock(stream)


def _busy(folder: Path) -> PreparationBusy:
    return PreparationBusy(
        f"another preparation writes to {folder}", "it holds the folder's lock", "wait for it, or end it"
    )


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written", f"{error.strerror or error}", "free space or name another folder"
        ) from error
