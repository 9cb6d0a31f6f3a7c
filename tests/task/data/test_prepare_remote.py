"""Token shards written to remote storage: the bytes of local ones, and gone on with after an interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from paceline.errors import ConfigError, StorageError
from paceline.spec.task import DataSpec
from paceline.task.data.prepare import prepare as module
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.prepare.remote_out import prepare_remote
from paceline.task.data.source import open_sources
from paceline.task.data.storage import remote
from paceline.task.data.storage.retries import Retries

PART = 3000


def write(path: Path, first: int) -> DataSpec:
    path.write_text("".join(json.dumps({"text": f"document {first + number} " * 9}) + "\n" for number in range(80)))
    return DataSpec(str(path), seq_len=32, validation_fraction=0.1, cache_dir=str(path.parent / "cache"))


def content(url: str) -> dict[str, bytes]:
    memory = fsspec.filesystem("memory")
    return {path.rpartition("/")[2]: memory.cat_file(path) for path in memory.find(url.removeprefix("memory:/"))}


def test_remote_shards_are_the_local_ones(tmp_path: Path) -> None:
    data, url, folder = write(tmp_path / "a.jsonl", 0), "memory://written/here", tmp_path / "out"
    near, far = prepare(data, folder, part_bytes=PART), prepare_remote(data, url, part_bytes=PART, workers=2)
    assert far.made and far.folder == url and far.index.fingerprint == near.index.fingerprint
    assert content(url) == {path.name: path.read_bytes() for path in folder.iterdir()}
    again = prepare_remote(data, url, part_bytes=PART)
    assert not again.made and again.index.fingerprint == near.index.fingerprint
    with pytest.raises(ConfigError, match="--append with memory"):
        prepare_remote(data, url, append=True)
    with pytest.raises(ConfigError, match="holds other shards"):
        prepare_remote(DataSpec(data.source, cache_dir=data.cache_dir), url, part_bytes=PART)
    local, _ = open_sources(DataSpec(str(folder), seq_len=32), 7)
    read, _ = open_sources(DataSpec(url, seq_len=32, cache_dir=data.cache_dir), 7)
    ids = np.arange(local.samples)
    assert torch.equal(read.read(ids)["labels"], local.read(ids)["labels"])


def test_a_copy_that_is_cut_off_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, url = write(tmp_path / "a.jsonl", 0), "memory://interrupted/here"
    monkeypatch.setattr(remote, "Retries", partial(Retries, wait=lambda seconds: None))
    put, written = MemoryFileSystem.put_file, list[str]()

    def counted(self: MemoryFileSystem, source: str, target: str, **options: object) -> None:
        if len(written) == 2:
            raise ConnectionError("the network is gone")
        written.append(target.rpartition("/")[2])
        put(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", counted)
    with pytest.raises(StorageError, match="interrupted/here cannot be written"):
        prepare_remote(data, url, part_bytes=PART)
    assert sorted(content(url)) == sorted(written) and "shards.json" not in written
    monkeypatch.setattr(MemoryFileSystem, "put_file", put)
    monkeypatch.setattr(module, "tokenise", lambda *_: pytest.fail("what was made is not made again"))
    done = prepare_remote(data, url, part_bytes=PART)
    assert set(content(url)) >= {"shards.json", *(shard.file for shard in done.index.splits["train"])}
    assert not list((tmp_path / "cache" / "prepared").iterdir())


def test_a_shard_of_an_earlier_preparation_that_is_as_long_is_written_over(tmp_path: Path) -> None:
    url, memory = "memory://left/here", fsspec.filesystem("memory")
    earlier, data = (
        replace(write(tmp_path / f"{first}.jsonl", first), validation_fraction=0.0) for first in (100, 200)
    )
    prepare_remote(earlier, url)
    memory.rm("/left/here/shards.json")  # as if that had not come to its end
    near = prepare(data, tmp_path / "out")
    assert {name: len(each) for name, each in content(url).items()}.items() <= {
        path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()
    }.items(), "they are as long"
    assert prepare_remote(data, url).index.fingerprint == near.index.fingerprint
    assert content(url) == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
