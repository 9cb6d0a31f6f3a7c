"""What `on_bad = "skip"` leaves out is what the files decide: a storage that fails ends the reading on every path."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paceline.errors import DamagedData, DataError
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources
from paceline.task.data.sources import documents as module
from paceline.task.data.sources.files import list_files
from paceline.task.data.sources.reading import unpacked
from paceline.task.data.storage import remote
from paceline.task.data.storage.blocks import BlockCache
from paceline.task.data.storage.retries import Retries

Fails = Callable[[], None]


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Return what makes each further read of the memory file system fail. Nothing is cached, and no retry waits."""
    monkeypatch.setattr(remote, "Retries", partial(Retries, wait=lambda seconds: None))

    def fetched(self: BlockCache, keys: Sequence[str], fetch: Callable[[int, int], list[bytes]]) -> list[np.ndarray]:
        return [np.frombuffer(each, dtype=np.uint8) for each in fetch(0, len(keys))]

    monkeypatch.setattr(BlockCache, "get_row", fetched)

    def broken(*_: object, **__: object) -> bytes:
        raise ConnectionError("the network is gone")

    return lambda: monkeypatch.setattr(MemoryFileSystem, "cat_file", broken)


def put(name: str, path: Path) -> str:
    """Copy a file or the files of a folder into the memory file system and return the URL."""
    files = [(f"/{name}/{each.name}", each) for each in path.iterdir()] if path.is_dir() else [(f"/{name}", path)]
    for target, each in files:
        fsspec.filesystem("memory").pipe(target, each.read_bytes())
    return f"memory://{name}"


def write_lines(path: Path, documents: int = 40) -> Path:
    path.write_text("".join(json.dumps({"text": f"document {number} " * 9}) + "\n" for number in range(documents)))
    return path


def skipping(source: str, tmp_path: Path, **options: Any) -> DataSpec:
    return DataSpec(source, on_bad="skip", cache_dir=str(tmp_path / "cache"), **options)


def not_there(call: Callable[[], object]) -> None:
    with pytest.raises(DataError, match="the network is gone, after 6 attempts") as caught:
        call()
    assert not isinstance(caught.value, DamagedData)


@pytest.mark.parametrize("rows", ["windows", "packed"])
def test_shards_of_a_storage_that_fails_are_not_damaged(tmp_path: Path, fails: Fails, rows: str) -> None:
    near = DataSpec(str(write_lines(tmp_path / "a.jsonl")), validation_fraction=0.0)
    prepare(near, tmp_path / "shards")
    source, _ = open_sources(skipping(put("shards", tmp_path / "shards"), tmp_path, seq_len=16, rows=rows), 7)
    assert (source.read(np.arange(4))["labels"] >= 0).any()
    fails()
    not_there(lambda: source.read(np.arange(4)))
    not_there(lambda: source.read(np.arange(1)))
    assert not source.damaged  # type: ignore[attr-defined]


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("reader", ["corpus", "prepare"])
def test_documents_of_a_storage_that_fails_are_not_damaged(
    tmp_path: Path, fails: Fails, kind: str, reader: str
) -> None:
    path = write_lines(tmp_path / f"a.{kind}")
    if packed := kind.partition(".")[2]:
        pack = PACKERS.get(packed) or pytest.importorskip("pyarrow").Codec("zstd").compress
        path.write_bytes(bytes(pack(path.read_bytes())))
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": [f"document {number}" for number in range(40)]}), path)
    data = skipping(put(path.name, path), tmp_path, seq_len=16)
    fails()
    if reader == "corpus":
        not_there(lambda: open_sources(data, 7))
    else:
        not_there(lambda: prepare(data, tmp_path / "out", dedup=kind == "txt"))
        assert not (tmp_path / "out" / "shards.json").exists()


def test_images_of_a_storage_that_fails_are_not_damaged(tmp_path: Path, fails: Fails) -> None:
    image = pytest.importorskip("PIL.Image")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in range(4):
            content = io.BytesIO()
            image.fromarray(np.full((8, 8, 3), number, dtype=np.uint8)).save(content, "png")
            member = tarfile.TarInfo(f"{number % 2}/{number}.png")
            member.size = content.tell()
            tar.addfile(member, io.BytesIO(content.getvalue()))
    url = put("pictures/a.tar", tmp_path / "a.tar")
    source, _ = open_sources(skipping(url, tmp_path, image_size=8, validation_fraction=0.0, images_in_memory=0), 7)
    assert (source.read(np.arange(4))["labels"] >= 0).all()
    fails()
    not_there(lambda: source.read(np.arange(4)))


class Failing(io.BytesIO):
    """A local file of which the disk gives no byte."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def readline(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    __next__ = readline


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_disk_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    path = write_lines(tmp_path / f"a.{kind}")
    spec = skipping(str(path), tmp_path)
    listing = list_files(spec)
    monkeypatch.setattr(unpacked, "open", lambda *_: Failing(path.read_bytes()), raising=False)
    with pytest.raises(DataError, match="Input/output error") as caught:
        list(module.read_documents(spec, listing))
    assert not isinstance(caught.value, DamagedData)


def test_a_damaged_page_of_a_table_is_damage(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "data").mkdir()
    texts = np.random.default_rng(1).integers(0, 10**9, 5000).astype(str)
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "data" / "a.parquet", compression="zstd")
    content = bytearray((tmp_path / "data" / "a.parquet").read_bytes())
    content[2000:2400] = bytes(400)
    (tmp_path / "data" / "a.parquet").write_bytes(content)
    write_lines(tmp_path / "data" / "b.jsonl", 3)
    damaged = module.Damaged(True)
    spec = skipping(str(tmp_path / "data"), tmp_path)
    read = [each.origin for each in module.read_documents(spec, list_files(spec), damaged)]
    assert read[-3:] == [f"b.jsonl line {number}" for number in (1, 2, 3)] and damaged.count == 1
    assert "a.parquet is not a readable Parquet file" in damaged.first


def test_an_image_that_is_cut_off_is_damage_and_one_that_changes_under_the_run_is_not(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(2):
        (tmp_path / "images" / str(number)).mkdir(parents=True)
        image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "images" / str(number) / "a.png")
    spec = skipping(f"images:{tmp_path / 'images'}", tmp_path, image_size=8, validation_fraction=0.0)
    path = tmp_path / "images" / "0" / "a.png"
    path.write_bytes(path.read_bytes()[:40])
    source, _ = open_sources(spec, 7)
    assert source.read(np.arange(2))["labels"].tolist() == [-100, 1]
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(DataError, match="was cut while it was read") as caught:
        source.read(np.arange(2))
    assert not isinstance(caught.value, DamagedData), "another start would leave out what this one has trained on"
    path.unlink()
    with pytest.raises(DataError, match="went away"):
        pickle.loads(pickle.dumps(source)).read(np.arange(2))  # which opens the files again


def test_a_token_beyond_the_vocabulary_is_no_damage(tmp_path: Path) -> None:
    tokens = np.array([1, 2, 300, 4] * 20, dtype="<u2")
    (tmp_path / "text.bin").write_bytes(tokens.tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2) + struct.pack("<iqqq", len(tokens), 0, 0, 1)
    (tmp_path / "text.idx").write_bytes(index)
    spec = skipping(str(tmp_path / "text"), tmp_path, arguments={"vocab": 100}, seq_len=16, validation_fraction=0.0)
    with pytest.raises(DataError, match=r"token 300 is in the train data"):
        open_sources(spec, 7)[0].read(np.arange(2))
