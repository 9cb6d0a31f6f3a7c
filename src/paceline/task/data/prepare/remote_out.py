"""Preparing into remote storage: shards are made in the cache folder, and copied when all of them are there.

`shards.json` is copied last: without it a remote folder is not finished. What was made and not copied yet is kept, so
that the same command copies the rest.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, DataError, StorageError
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import PreparedShards, SaysProgress, prepare
from paceline.task.data.sources.cache import cache_root
from paceline.task.data.sources.shards.folder import INDEX, TOKENIZER
from paceline.task.data.sources.shards.layout import HEADER
from paceline.task.data.storage.bytes import beside
from paceline.task.data.storage.remote import RemoteFiles


def prepare_remote(
    data: DataSpec, url: str, progress: SaysProgress = lambda what, share: None, **options: Any
) -> PreparedShards:
    """Write the documents of `data` as token shards below a URL and return what is there then.

    `options` are those of `prepare`, whose errors are raised; StorageError where the storage cannot be written, and
    ConfigError for shards to be added: the data card tells the lengths of all documents, those of other shards too.
    """
    if options.pop("append", False):
        raise ConfigError(
            f"--append with {url}", "the card of a folder tells of all its shards, which would be fetched",
            "add to a local folder, and copy it",
        )  # fmt: skip
    files = RemoteFiles(url)
    folder = cache_root(data) / "prepared" / hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    if not (folder / INDEX).is_file() and files.exists(beside(url, INDEX)):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for name in (TOKENIZER, INDEX):  # these say what a folder holds: the same, or it is refused
                (folder / name).write_bytes(files.read_all(beside(url, name)))
            done = prepare(data, folder, progress=progress, **options)
        finally:
            shutil.rmtree(folder)
        return PreparedShards(url, done.index, False)
    done = prepare(data, folder, progress=progress, **options)
    _copy(folder, files, url, progress)
    shutil.rmtree(folder)
    return PreparedShards(url, done.index, done.made)


def _copy(folder: Path, files: RemoteFiles, url: str, progress: SaysProgress) -> None:
    """Copy the files of a folder that are not there, the index last."""
    last = [folder / TOKENIZER, folder / INDEX]
    shards = sorted(set(folder.iterdir()) - set(last))
    whole, done = sum(path.stat().st_size for path in shards) or 1, 0
    try:
        there = {file.name: file.size for file in files.below()}
        for path in (*shards, *last):
            size = path.stat().st_size
            if path in last or there.get(path.name) != size or not _begins_alike(files, beside(url, path.name), path):
                files.write(beside(url, path.name), path)
            done += size
            progress("copying", min(1.0, done / whole))
    except DataError as error:
        raise StorageError(f"{url} cannot be written", error.because, error.try_) from error


def _begins_alike(files: RemoteFiles, url: str, path: Path) -> bool:
    """Return whether a remote shard has the header of a local one: it holds a checksum of all checksums of the tokens.

    One of other documents may be as long: an earlier preparation has left it.
    """
    with path.open("rb") as stream:
        return files.read(url, 0, HEADER.size) == stream.read(HEADER.size)
