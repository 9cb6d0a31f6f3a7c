"""Files in pieces: written, read back and hashed by several threads; what a disk says once is not lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from checkpoint_samples import write_document
from runs import run_patiently

from paceline.checkpoint import find_latest, load_checkpoint, read_manifest, save, save_checkpoint, verify_checkpoint
from paceline.checkpoint.files import copies, past_caches, pieces
from paceline.checkpoint.files.digests import best_kind, new_digest
from paceline.checkpoint.files.past_caches import Rooms
from paceline.checkpoint.files.read_back import PiecesDigest
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.checkpoint.readers import fill
from paceline.errors import ConfigError, StorageError

SHARD, PIECE = "shard-00000-of-00001.safetensors", 2**12
HANGS = """
import os, sys, threading
from pathlib import Path

import torch

from paceline.checkpoint.beside.flight import SaveInFlight, SaveTo
from paceline.checkpoint.beside.stage import HostStage
from paceline.checkpoint.files import past_caches

reached = threading.Event()


def hang(*given):
    reached.set()
    threading.Event().wait()


setattr(os, sys.argv[2], hang)
if sys.argv[2] == "fdatasync":
    past_caches.open_past_caches = lambda path, writes: None
staged = HostStage().take(1, {"weight": torch.zeros(12 * 2**20)}, {})
flight = SaveInFlight([SaveTo(Path(sys.argv[1]), 1)], staged, None, 0.1)
reached.wait()
assert not flight.wait()
flight.abandon(0.1)
print("ends")
"""


def state() -> dict[str, torch.Tensor]:
    """Return tensors of odd lengths, so that pieces hold parts of several and begin anywhere in one."""
    sizes = {"large": 5001, "odd": 1, "small": 7, "empty": 0, "middle": 1024}
    values = {name: torch.arange(size, dtype=torch.float32) for name, size in sizes.items()}
    return values | {"bytes": torch.arange(4999).to(torch.uint8), "zero": torch.tensor(-0.0)}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)


def saved(root: Path, step: int = 1) -> Path:
    return save_checkpoint(root, step, state(), {"step": step}, keep_last=9).path


def check_loads(path: Path) -> None:
    """Assert that the checkpoint holds `state()`, bit for bit."""
    blank = {name: torch.full_like(tensor, 1) for name, tensor in state().items()}
    load_checkpoint(path, blank)
    assert all(torch.equal(blank[name], tensor) for name, tensor in state().items())


def blake3_of(content: bytes) -> bytes:
    found: bytes = blake3(content).digest()
    return found


def sha256_of(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@pytest.mark.parametrize(
    ("kind", "digest_of", "version"), [("sha256", sha256_of, 4), ("blake3", blake3_of, 5)], ids=["sha256", "blake3"]
)
@pytest.mark.usefixtures("small")
def test_the_digest_is_that_of_the_pieces_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, digest_of: Callable[[bytes], bytes], version: int
) -> None:
    """BLAKE3 where it is there; whoever has it reads what was written without it."""
    monkeypatch.setattr(pieces, "best_kind", lambda: kind)
    path = saved(tmp_path)
    monkeypatch.undo()
    content, entry = (path / SHARD).read_bytes(), read_manifest(path).files[SHARD]
    assert len(content) > 3 * PIECE and (entry.bytes, entry.piece_bytes) == (len(content), PIECE)
    of_pieces = [digest_of(content[at : at + PIECE]) for at in range(0, len(content), PIECE)]
    assert entry.sha256 == hashlib.sha256(b"".join(of_pieces)).hexdigest() and entry.piece_digest == kind
    assert json.loads((path / MANIFEST_NAME).read_text())["version"] == version
    check_loads(path)
    for step in (1, 1000, PIECE, PIECE + 1, len(content)):  # as a remote storage gives it
        digest = PiecesDigest(entry)
        for at in range(0, len(content), step):
            digest.update(content[at : at + step])
        assert digest.hexdigest() == entry.sha256, step


def test_digests_of_blake3_are_those_of_its_authors() -> None:
    """Their test vectors: bytes that count from 0 to 250 and again."""
    for length, begins in ((0, "af1349b9f5f9a1a6"), (1, "2d3adedff11b61f1"), (1024, "42214739f095a406")):
        digest = new_digest("blake3")
        digest.update(bytes(at % 251 for at in range(length)))
        assert digest.digest().hex().startswith(begins), length


@pytest.mark.usefixtures("small")
def test_without_its_package_blake3_is_not_written_and_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs it is not damaged: no older checkpoint is taken in silence for it."""
    there = saved(tmp_path)
    monkeypatch.setitem(sys.modules, "blake3", None)
    best_kind.cache_clear()
    try:
        path = saved(tmp_path / "without")
        assert read_manifest(path).files[SHARD].piece_digest == "sha256"
        check_loads(path)
        with pytest.raises(ConfigError, match=r"'blake3' is not installed(.|\n)*pip install blake3"):
            check_loads(there)
        with pytest.raises(ConfigError, match="pip install blake3"):
            verify_checkpoint(there)
    finally:
        best_kind.cache_clear()
    monkeypatch.undo()
    check_loads(there)


@pytest.mark.parametrize(
    ("changes", "because"),
    [({"piece_digest": "md5"}, "digests of kind 'md5'"), ({"piece_digest": 3}, "'piece_digest' is not a str"),
     ({"piece_bytes": 0}, "digests of kind 'blake3' of pieces of 0 bytes")],
)  # fmt: skip
@pytest.mark.usefixtures("small")
def test_digests_that_no_release_writes_are_refused(tmp_path: Path, changes: dict[str, Any], because: str) -> None:
    path = saved(tmp_path)
    body = json.loads((path / MANIFEST_NAME).read_text())["body"]
    body["files"][SHARD].update(changes)
    write_document(path, 5, body)
    with pytest.raises(StorageError, match=because):
        verify_checkpoint(path)


def test_a_short_file_goes_through_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pieces for each thread were 16 MiB at the peak of a run whose weights took 4."""
    made: list[int] = []
    monkeypatch.setattr(pieces, "Rooms", lambda length: (made.append(length), Rooms(length))[1])
    values = {"w": torch.randn(pieces.PIECE_BYTES // 2)}  # two pieces
    path = save_checkpoint(tmp_path / "short", 1, values, {}, keep_last=1).path
    assert made and max(made) <= pieces.SHORT_ROOM_BYTES
    monkeypatch.setattr(pieces, "SHORT_BYTES", 0)
    long = save_checkpoint(tmp_path / "long", 1, values, {}, keep_last=1).path
    assert max(made) == pieces.AT_ONCE_BYTES
    assert read_manifest(path).files[SHARD] == read_manifest(long).files[SHARD]
    assert (path / SHARD).read_bytes() == (long / SHARD).read_bytes()


def test_a_file_of_one_piece_has_a_plain_digest_that_earlier_releases_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    document = json.loads((path / MANIFEST_NAME).read_text())
    assert document["version"] == 2 and set(document["body"]["files"][SHARD]) == {"bytes", "sha256"}
    assert document["body"]["files"][SHARD]["sha256"] == hashlib.sha256((path / SHARD).read_bytes()).hexdigest()


@pytest.mark.usefixtures("small")
def test_a_long_file_with_a_plain_digest_loads_as_earlier_releases_wrote_it(tmp_path: Path) -> None:
    path = saved(tmp_path)
    body = json.loads((path / MANIFEST_NAME).read_text())["body"]
    for name, entry in body["files"].items():
        body["files"][name] = {
            "bytes": entry["bytes"], "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest()
        }  # fmt: skip
    write_document(path, 2, body)
    check_loads(path)
    with (path / SHARD).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    with pytest.raises(StorageError, match=f"{SHARD} is damaged"):
        verify_checkpoint(path)


def test_threads_that_share_copies_out_load_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "FEW_BYTES", 1)
    monkeypatch.setattr(fill, "host_bytes", lambda tensor: None)  # or all of it were read while it is checked
    path = saved(tmp_path)
    for task in (1, 64, 4096):
        monkeypatch.setattr(copies, "TASK_BYTES", task)
        check_loads(path)


@pytest.mark.usefixtures("small")
def test_a_changed_byte_in_any_piece_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path)
    content = (path / SHARD).read_bytes()
    for at in [*range(0, len(content), PIECE // 2), len(content) - 1]:
        (path / SHARD).write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(StorageError, match=f"{SHARD} is damaged"):
            verify_checkpoint(path)
    swapped = content[PIECE : 2 * PIECE] + content[:PIECE] + content[2 * PIECE :]
    (path / SHARD).write_bytes(swapped)
    with pytest.raises(StorageError, match=f"{SHARD} is damaged"):
        verify_checkpoint(path)
    (path / SHARD).write_bytes(content)
    check_loads(path)


@pytest.mark.parametrize("length", [0, 1, 2**8 - 1, 2**31])
@pytest.mark.usefixtures("small")
def test_pieces_of_a_length_that_no_release_writes_are_refused(tmp_path: Path, length: int) -> None:
    path = saved(tmp_path)
    body = json.loads((path / MANIFEST_NAME).read_text())["body"]
    body["files"][SHARD]["piece_bytes"] = length
    del body["files"][SHARD]["piece_digest"]
    write_document(path, 4, body)
    with pytest.raises(StorageError, match="is damaged" if length == 0 else f"pieces of {length} bytes"):
        verify_checkpoint(path)


@pytest.mark.usefixtures("small")
def test_a_system_that_writes_and_reads_a_part_of_what_it_is_asked_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: pwrite(file, content[:1001], at))
    monkeypatch.setattr(os, "preadv", lambda file, into, at, *flags: preadv(file, [into[0][:999]], at, *flags))
    check_loads(saved(tmp_path))


@pytest.mark.usefixtures("small")
def test_a_file_is_the_same_past_the_caches_and_through_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = saved(tmp_path / "past")
    monkeypatch.setattr(past_caches, "open_past_caches", lambda path, writes: None)
    through = saved(tmp_path / "through")
    assert (past / SHARD).read_bytes() == (through / SHARD).read_bytes()
    assert read_manifest(past).files[SHARD] == read_manifest(through).files[SHARD]
    check_loads(past)


@pytest.mark.parametrize("refusals", range(1, 12))
@pytest.mark.usefixtures("small")
def test_a_file_system_that_refuses_in_the_middle_gets_the_rest_through_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Some accept the flag when a file is opened, and not the calls, or not each of them."""
    calls, direct, opened = [0], set[int](), past_caches.open_past_caches

    def noted(path: Path, writes: bool) -> int | None:
        if (descriptor := opened(path, writes)) is not None:
            direct.add(descriptor)
        return descriptor

    def refusing(call: Any) -> Any:
        def refused(file: int, *given: Any) -> Any:
            calls[0] += file in direct
            if file in direct and calls[0] == refusals:
                raise OSError(errno.EINVAL, "as a test wants")
            return call(file, *given)

        return refused

    monkeypatch.setattr(past_caches, "open_past_caches", noted)
    monkeypatch.setattr(os, "pwrite", refusing(os.pwrite))
    monkeypatch.setattr(os, "preadv", refusing(os.preadv))
    path = saved(tmp_path)
    assert not direct or calls[0] >= refusals, "or nothing was refused"
    monkeypatch.undo()
    check_loads(path)


@pytest.mark.parametrize("place", [0, PIECE, 3 * PIECE + 5, -1])
@pytest.mark.usefixtures("small")
def test_what_a_disk_takes_otherwise_than_it_is_given_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    first, pwrite = saved(tmp_path), os.pwrite
    wrong = place % (first / SHARD).stat().st_size

    def write(file: int, content: Any, at: int) -> int:
        if at <= wrong < at + len(content):
            content = bytearray(content)
            content[wrong - at] ^= 1
        return pwrite(file, content, at)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(StorageError, match=f"{SHARD} is damaged"):
        save_checkpoint(tmp_path, 2, state(), {}, keep_last=1)
    assert [found.name for found in tmp_path.iterdir()] == [first.name]
    check_loads(first)


@pytest.mark.parametrize("ends", ["longer", "shorter", "gone"])
@pytest.mark.usefixtures("small")
def test_a_file_that_is_not_as_long_as_it_was_written_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    first, compare = saved(tmp_path), save.compare_shard

    def changed(path: Path, entries: Any) -> None:
        length = path.stat().st_size
        path.unlink() if ends == "gone" else os.truncate(path, length + {"longer": 1, "shorter": -1}[ends])
        compare(path, entries)

    monkeypatch.setattr(save, "compare_shard", changed)
    with pytest.raises(StorageError, match="step 2 was not saved" if ends == "gone" else f"{SHARD} is damaged"):
        save_checkpoint(tmp_path, 2, state(), {}, keep_last=1)
    assert [found.name for found in tmp_path.iterdir()] == [first.name]


@pytest.mark.usefixtures("small")
def test_no_older_checkpoint_goes_before_the_newer_one_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is interrupted while it is read has both: the newer one is durable, and nobody knows yet how sound it is."""
    first = saved(tmp_path)

    def interrupted(path: Path, entries: Any) -> None:
        assert path.parent.name == "step-00000002" and find_latest(tmp_path) == path.parent, "it has its name"
        raise KeyboardInterrupt

    monkeypatch.setattr(save, "compare_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 2, state(), {}, keep_last=1)
    check_loads(first)
    check_loads(tmp_path / "step-00000002")
    monkeypatch.undo()
    info = save_checkpoint(tmp_path, 3, state(), {}, keep_last=1)
    assert sorted(info.removed) == [first.name, "step-00000002"] and 0 < info.after_seconds < info.seconds


@pytest.fixture
def through_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no file system with a way past the caches."""
    monkeypatch.setattr(past_caches, "open_past_caches", lambda path, writes: None)


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.usefixtures("through_caches")
def test_an_error_that_a_disk_tells_once_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The kernel tells a descriptor of a failed write once: by the flush that comes first, and not by the last one."""
    calls = [0]

    def told_once(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise OSError(errno.EIO, "as a test wants")

    monkeypatch.setattr(os, "fdatasync", told_once)
    large = {str(number): torch.zeros(2**20) for number in range(30)}
    with pytest.raises(StorageError, match="as a test wants"):
        save_checkpoint(tmp_path, 1, large, {}, keep_last=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["fdatasync", "fsync", "pwrite", "preadv"])
def test_a_process_ends_though_its_storage_never_answers(tmp_path: Path, call: str) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    done = run_patiently([sys.executable, tmp_path / "hangs.py", tmp_path, call])
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
