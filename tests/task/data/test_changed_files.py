"""A file that is cut, written to, replaced or taken away while it is read is an error: no SIGBUS, and no other data.

Each read runs in the process of the test: without the watch it is ended by a signal, or the batch is another one.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from paceline.errors import DamagedData, DataError
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards.megatron import HEAD, MAGIC
from paceline.task.data.storage.watch import WatchedFile

Opened = tuple[Any, Path]  # a source, and the file that it reads


def corpus(folder: Path, **options: Any) -> Opened:
    (folder / "a.txt").write_text("many words follow each other here. " * 4000)
    data = DataSpec(str(folder / "a.txt"), seq_len=64, cache_dir=str(folder / "cache"), validation_fraction=0.0,
                    **options)  # fmt: skip
    source, _ = open_sources(data, 7)
    return source, next((folder / "cache").rglob("train.tokens"))


def shards(folder: Path, **options: Any) -> Opened:
    (folder / "a.txt").write_text("many words follow each other here. " * 4000)
    prepare(DataSpec(str(folder / "a.txt"), validation_fraction=0.0), folder / "shards")
    data = DataSpec(str(folder / "shards"), seq_len=64, cache_dir=str(folder / "cache"), on_bad="skip", **options)
    return open_sources(data, 7)[0], next((folder / "shards").glob("*.shard"))


def megatron(folder: Path, count: int = 140_000, **options: Any) -> Opened:
    tokens = np.random.default_rng(1).integers(0, 250, count).astype("<u2")
    tokens.tofile(folder / "t.bin")
    head = HEAD.pack(MAGIC, 1, 8, 1, 2)
    index = [np.array([len(tokens)], "<i4"), np.array([0], "<i8"), np.array([0, 1], "<i8")]
    (folder / "t.idx").write_bytes(head + b"".join(each.tobytes() for each in index))
    data = DataSpec(
        f"megatron:{folder / 't'}", seq_len=64, arguments={"vocab": 256}, validation_fraction=0.0, **options
    )
    return open_sources(data, 7)[0], folder / "t.bin"


def table(folder: Path, **options: Any) -> Opened:
    lines = [{"text": f"row {number} of a table " * 90, "label": number % 2} for number in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataSpec(f"table:{folder / 'a.jsonl'}", seq_len=64, cache_dir=str(folder / "cache"), validation_fraction=0.0)
    return open_sources(data, 7)[0], next((folder / "cache").rglob("train.tokens"))


def picture(number: int) -> bytes:
    image, content = pytest.importorskip("PIL.Image"), io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    image.fromarray(pixels).save(content, "png")
    return content.getvalue()


def images(folder: Path, images_in_memory: int = 0) -> Opened:
    for number in range(4):
        (folder / "images" / str(number % 2)).mkdir(parents=True, exist_ok=True)
        (folder / "images" / str(number % 2) / f"{number}.png").write_bytes(picture(number))
    data = DataSpec(f"images:{folder / 'images'}", image_size=8, validation_fraction=0.0, on_bad="skip",
                    images_in_memory=images_in_memory)  # fmt: skip
    return open_sources(data, 7)[0], folder / "images" / "1" / "3.png"


def tar(folder: Path, images_in_memory: int = 0) -> Opened:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number in range(4):
            member = tarfile.TarInfo(f"{number % 2}/{number}.png")
            member.size = len(picture(number))
            archive.addfile(member, io.BytesIO(picture(number)))
    data = DataSpec(f"images:{folder / 'a.tar'}", image_size=8, validation_fraction=0.0, on_bad="skip",
                    images_in_memory=images_in_memory)  # fmt: skip
    return open_sources(data, 7)[0], folder / "a.tar"


KINDS: dict[str, Callable[..., Opened]] = {
    "windows": corpus,
    "packed rows": lambda folder: corpus(folder, rows="packed"),
    "shards": shards,
    "packed shards": lambda folder: shards(folder, rows="packed"),
    "megatron": megatron,
    "packed megatron": lambda folder: megatron(folder, rows="packed"),
    "table": table,
    "images": images,
    "tar": tar,
}


def later(path: Path) -> None:
    """Have a file's time be another one: clocks of file systems are coarse."""
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))


def cut(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(64)


def empty(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(0)


def written_to(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as stream:
        stream.seek(size // 2)
        stream.write(b"1" * (size // 4))
    later(path)


def grown(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"1" * 100)
    later(path)


def replaced(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(bytes(path.stat().st_size))
    beside.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "was cut while": cut, "was cut while it": empty, "changed while": written_to, "changed while it": grown,
    "was replaced while": replaced, "went away while": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", CHANGES)
def test_a_file_that_changes_under_a_run_is_an_error_that_names_it(tmp_path: Path, kind: str, what: str) -> None:
    source, path = KINDS[kind](tmp_path)
    ids = np.arange(source.samples)[:4]
    if what != "was cut while":  # that one was never read before
        source.read(ids)
    CHANGES[what](path)
    with pytest.raises(DataError, match=what) as caught:
        source.read(ids)
    assert not isinstance(caught.value, DamagedData) and caught.value.exit_code == 5
    assert str(path) in caught.value.what and caught.value.try_
    if CHANGES[what] in (cut, empty, Path.unlink):  # in another process that receives the source
        with pytest.raises(DataError):
            pickle.loads(pickle.dumps(source)).read(ids)


@pytest.mark.parametrize("kind", ["images", "tar"])
@pytest.mark.parametrize("what", CHANGES)
def test_images_in_memory_stay_what_they_were(tmp_path: Path, kind: str, what: str) -> None:
    """What was read once is not read again: a change of its file is no change of what trains."""
    ids = np.arange(4)
    source, path = KINDS[kind](tmp_path, images_in_memory=2**20)
    before = source.read(ids)
    CHANGES[what](path)
    again = source.read(ids)
    assert before.keys() == again.keys() and all(np.array_equal(before[name], again[name]) for name in before)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_system_that_has_lost_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As a network file system tells it whose server has removed the file: its pages would end the process."""
    source, _ = corpus(tmp_path)

    def lost(*_: object, **__: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("paceline.task.data.storage.watch.os.stat", lost)
        with pytest.raises(DataError, match="went away") as caught:
            source.read(np.arange(4))
    assert os.strerror(number) in caught.value.because


def test_a_piece_of_the_block_cache_that_is_cut_is_fetched_again(tmp_path: Path) -> None:
    _, path = shards(tmp_path)
    store = fsspec.filesystem("memory")
    for each in path.parent.iterdir():
        if each.is_file():
            store.pipe(f"/changed/{each.name}", each.read_bytes())
    data = DataSpec("memory://changed", seq_len=64, cache_dir=str(tmp_path / "other"))
    source, _ = open_sources(data, 7)
    ids = np.arange(source.samples)
    before = source.read(ids)
    for piece in (tmp_path / "other").rglob("*.block"):
        cut(piece)
    after = source.read(ids)
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.parametrize("longer", [False, True])
def test_a_remote_file_without_checksums_that_changes_under_a_run_is_an_error(tmp_path: Path, longer: bool) -> None:
    """Pieces of two versions had been read as one file. What is kept of the first one is still read."""
    megatron(tmp_path, 6_000_000)  # more than the pieces that the fingerprint is of
    store = fsspec.filesystem("memory")
    for name in ("t.bin", "t.idx"):
        store.pipe(f"/{tmp_path.name}/{name}", (tmp_path / name).read_bytes())
    data = DataSpec(f"megatron:memory://{tmp_path.name}/t", seq_len=64, arguments={"vocab": 256},
                    validation_fraction=0.0, cache_dir=str(tmp_path / "cache"))  # fmt: skip
    source = pickle.loads(pickle.dumps(open_sources(data, 7)[0]))
    first = np.arange(4)
    before = source.read(first)
    other = np.zeros(6_000_000, dtype="<u2").tobytes()
    store.pipe(f"/{tmp_path.name}/t.bin", other + (b"00" if longer else b""))
    with pytest.raises(DataError, match=r"t\.bin' changed while it was read") as caught:
        source.read(np.arange(0, source.samples, 100))
    assert "12,000,002" in caught.value.because if longer else "its tag" in caught.value.because
    assert not isinstance(caught.value, DamagedData), "it is not left out either"
    assert np.array_equal(source.read(first)["tokens"], before["tokens"])


def test_what_a_watch_says(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(100))
    watch = WatchedFile(str(path))
    watch.hold(0, 100)
    cut(path)
    with pytest.raises(DataError) as caught:
        watch.hold(70, 80)
    assert caught.value.what == f"'{path}' was cut while it was read"
    assert caught.value.because == "it had 100 bytes when it was opened, and has 64; its bytes 70 to 80 were to be read"
