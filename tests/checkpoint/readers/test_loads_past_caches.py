"""Loads past the system's caches: the same values, the same refusals, and only where nobody reads the files as well."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import load_sample, save_sample
from distributed import run_ranks

from paceline.checkpoint import load_checkpoint, load_latest, save_checkpoint
from paceline.checkpoint.files import read_back
from paceline.checkpoint.files.in_memory import is_in_memory
from paceline.checkpoint.files.past_caches import open_past_caches
from paceline.checkpoint.readers import fill
from paceline.errors import StorageError

SHARD = "shard-00000-of-00001.safetensors"


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several pieces, of which most begin and end within a block, and one is turned."""
    drawn = torch.Generator().manual_seed(seed)
    return {
        "weights": torch.randn(1500, 1024, generator=drawn),
        "bytes": torch.randint(0, 256, (1_000_003,), generator=drawn).to(torch.uint8),
        "half": torch.randn(700, 901, generator=drawn).bfloat16(),
        "turned": torch.randn(300, 500, generator=drawn),
        "step": torch.tensor(7.0 + seed), "none": torch.empty(0, 4),
    }  # fmt: skip


def blank() -> dict[str, torch.Tensor]:
    """Return places for the values, of which one does not lie in memory as in the file."""
    made = {name: torch.full_like(value, 5) for name, value in values().items()}
    return made | {"turned": torch.full((500, 300), 5.0).t()}


def is_empty(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all()) if tensor.is_floating_point() else not tensor.any()


def forget(folder: Path) -> None:
    """Have the system drop a checkpoint's files from its memory."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint that the system does not have in its memory."""
    path = save_checkpoint(tmp_path, 1, values(), {}, keep_last=1).path
    descriptor = open_past_caches(path / SHARD, writes=False)
    if descriptor is None:
        pytest.skip("this file system has no way past the caches")
    os.close(descriptor)
    forget(path)
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bool, int]]:
    """Yield how many bytes of shards were read, past the caches (True) and through them."""
    counts, preadv = {True: 0, False: 0}, os.preadv

    def counted(file: int, rooms: Any, at: int) -> int:
        count = preadv(file, rooms, at)
        counts[is_direct(file)] += count if Path(f"/proc/self/fd/{file}").readlink().suffix == ".safetensors" else 0
        return count

    monkeypatch.setattr(os, "preadv", counted)
    yield counts


def test_what_is_not_in_memory_comes_past_the_caches_once_and_what_is_comes_from_there(
    saved: Path, read: dict[bool, int]
) -> None:
    length, target = (saved / SHARD).stat().st_size, blank()
    load_checkpoint(saved, target)
    assert all(torch.equal(target[name], value) for name, value in values().items())
    assert sum(read.values()) == length and read[False] < 4096, "all but the end of the last block"
    (saved / SHARD).read_bytes()
    read.update({True: 0, False: 0})
    load_checkpoint(saved, target)
    assert read == {True: 0, False: length}


def test_the_system_is_asked_what_it_has_in_memory(saved: Path) -> None:
    with (saved / SHARD).open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        assert [is_in_memory(file.fileno(), length), is_in_memory(file.fileno(), length)] == [False, False]
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert file.read(length // 4) and not is_in_memory(file.fileno(), length)
        assert file.read() and is_in_memory(file.fileno(), length)
        assert is_in_memory(file.fileno(), 0)


@pytest.mark.parametrize("at", [0.02, 0.5, 0.98, -1])
def test_a_flip_found_late_leaves_nothing_and_the_older_checkpoint_comes_whole(saved: Path, at: float) -> None:
    root = saved.parent
    newer = save_checkpoint(root, 2, values(1), {}, keep_last=2).path / SHARD
    with newer.open("r+b") as file:
        place = newer.stat().st_size - 1 if at < 0 else int(newer.stat().st_size * at)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())
    forget(newer.parent)
    target = blank()
    with pytest.raises(StorageError, match=f"{SHARD} is damaged"):
        load_checkpoint(newer.parent, target)
    assert [name for name, tensor in target.items() if tensor.numel() and not is_empty(tensor)] == []
    forget(newer.parent)
    forget(saved)
    loaded = load_latest(root, target)
    assert loaded is not None and loaded.path == saved and "is damaged" in loaded.skipped[0]
    assert all(torch.equal(target[name], value) for name, value in values().items())


def test_a_disk_that_errs_once_past_the_caches_is_found_whenever_it_does(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are hashed where they have come to, and not where they were read."""
    monkeypatch.setattr(read_back, "READ_BYTES", 2**20)
    preadv, calls, wrong = os.preadv, [itertools.count(1)], [-1]

    def erring(file: int, rooms: Any, at: int) -> int:
        count = preadv(file, rooms, at)
        if is_direct(file) and next(calls[0]) == wrong[0]:
            rooms[0][count // 2] ^= 4
        return count

    monkeypatch.setattr(os, "preadv", erring)
    load_checkpoint(saved, blank())
    whole = next(calls[0]) - 1
    assert whole > 5
    copied = read_back.copy_bytes
    for wrong[0] in range(1, whole + 1):
        calls[0] = itertools.count(1)
        with pytest.raises(StorageError, match="is damaged"):
            load_checkpoint(saved, blank())
    wrong[0] = -1

    def miscopied(to: memoryview, of: memoryview) -> None:
        copied(to, of)
        to[-1] ^= 1

    monkeypatch.setattr(read_back, "copy_bytes", miscopied)
    with pytest.raises(StorageError, match="is damaged"):
        load_checkpoint(saved, blank())


@pytest.mark.parametrize("kind", ["short", "refused", "error"])
def test_a_disk_that_gives_less_than_it_was_asked_for(saved: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The rest comes through the caches; an error is the disk's own, and names the file."""
    preadv, calls = os.preadv, itertools.count()

    def grudging(file: int, rooms: Any, at: int) -> int:
        if not is_direct(file) or next(calls) % 2 == 0:
            return preadv(file, rooms, at)
        if kind == "short":
            return preadv(file, [rooms[0][:8192]], at)
        raise OSError(errno.EINVAL if kind == "refused" else errno.EIO, "as a test wants")

    monkeypatch.setattr(os, "preadv", grudging)
    target = blank()
    if kind == "error":
        with pytest.raises(StorageError, match=f"cannot read .*{SHARD}"):
            load_checkpoint(saved, target)
        assert all(is_empty(tensor) for tensor in target.values() if tensor.numel())
    else:
        load_checkpoint(saved, target)
        assert all(torch.equal(target[name], value) for name, value in values().items())


def _loaded(root: str, layout: str) -> list[bool]:
    """Load the newest checkpoint into a layout; return whether this rank's files came past the caches."""
    told, verify = list[bool](), fill.verify_files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "verify_files", lambda *given: (told.append(given[3]), verify(*given))[1])
        load_sample(next(Path(root).glob("step-*")), layout)
    return told


def _saved(root: str, layout: str) -> None:
    save_sample(Path(root), 1, layout)


@pytest.mark.parametrize(("layout", "into", "past"), [("shard", "shard", True), ("shard", "plain", False)])
def test_files_that_another_rank_reads_too_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, into: str, past: bool
) -> None:
    run_ranks(_saved, 2, str(tmp_path), layout)
    found = run_ranks(_loaded, 2, str(tmp_path), into)
    assert found == [[past]] * 2
