"""One pass over a file: what is hashed is what lies in the tensors, and nothing stays of what was refused."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import laid_out, save_sample, write_document, write_listed
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import fingerprint, load, load_checkpoint, load_latest, save_checkpoint
from paceline.checkpoint.files import destinations, pieces, read_back
from paceline.checkpoint.files.destinations import BytesInPlace, Comers, Destination, Destinations, read_spread
from paceline.checkpoint.manifest import MANIFEST_NAME, TABLE_NAME, FileEntry, read_manifest
from paceline.errors import StorageError

SHARD = "shard-00000-of-00001.safetensors"
PIECE = 2**8
VALUES = {
    "weights": torch.arange(700, dtype=torch.float32).view(7, 100), "half": torch.arange(130, dtype=torch.bfloat16),
    "step": torch.tensor(7.0), "count": torch.arange(300), "waves": torch.full((3, 2), 1 + 2j),
    "mask": torch.arange(77) % 2 == 0, "turned": torch.arange(60, dtype=torch.float64).view(6, 10),
    "wide": torch.full((5,), 1 - 1j, dtype=torch.complex128), "one": torch.tensor(3 + 1j, dtype=torch.complex128),
}  # fmt: skip


def blank() -> dict[str, torch.Tensor]:
    """Return places for VALUES, of which one does not lie in memory as in the file."""
    made = {name: torch.full_like(value, 5) for name, value in VALUES.items()}
    return made | {"turned": torch.full((10, 6), 5.0, dtype=torch.float64).t()}


def is_empty(tensor: torch.Tensor) -> bool:
    """Return whether nothing stays in a tensor: no number in a floating one, zero in another."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return bool(tensor.isnan().all()) if floats else not tensor.any()


def without_fingerprints(path: Path) -> None:
    """Make of a checkpoint one of a release that took no fingerprints."""
    table, body = json.loads((path / TABLE_NAME).read_text()), json.loads((path / MANIFEST_NAME).read_text())["body"]
    for entry in table.values():
        entry.pop("fingerprint", None)
    write_listed(path, body["files"], TABLE_NAME, json.dumps(table).encode())
    write_document(path, 4, body)


@pytest.fixture(params=["a little at a time", "whole, hashed beside that"])
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Return a checkpoint of many pieces, each of which is read a little at a time, or whole."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(read_back, "READ_BYTES", 100 if request.param == "a little at a time" else PIECE)
    monkeypatch.setattr(read_back, "FEW_BYTES", 2**20 if request.param == "a little at a time" else 0)
    return save_checkpoint(tmp_path, 1, VALUES, {}, keep_last=1).path


def test_all_kinds_come_into_place_in_one_pass(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, preadv = list[int](), os.preadv

    def counted(file: int, rooms: Any, at: int, flags: int = 0) -> int:
        count = preadv(file, rooms, at, flags)
        is_shard = Path(f"/proc/self/fd/{file}").readlink().suffix == ".safetensors"
        read.append(count if is_shard and not flags else 0)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    target = blank()
    load_checkpoint(saved, target)
    assert all(torch.equal(target[name], value) for name, value in VALUES.items())
    assert sum(read) == (saved / SHARD).stat().st_size


@pytest.mark.parametrize("at", [0, 0.3, 0.6, -1])
def test_nothing_stays_of_a_damaged_file(saved: Path, at: float) -> None:
    content = bytearray((saved / SHARD).read_bytes())
    content[-1 if at < 0 else 8 + int.from_bytes(content[:8], "little") + int(at * len(content) / 2)] ^= 1
    (saved / SHARD).write_bytes(content)
    target = blank()
    with pytest.raises(StorageError, match=f"{SHARD} is damaged"):
        load_checkpoint(saved, target)
    assert [name for name, tensor in target.items() if not is_empty(tensor)] == []


def test_a_flip_of_any_byte_is_found_where_slices_of_rows_are_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was well is summed as it came: slices end where rows do, and zero-sized tensors have no bytes."""
    monkeypatch.setattr(read_back, "SLICE_BYTES", 24)
    values = {
        "rows": torch.arange(21.0).view(3, 7),
        "none": torch.zeros(0, 4),
        "long": torch.arange(40).to(torch.int16),
    }
    path, whole = save_checkpoint(tmp_path, 1, values, {}, keep_last=1).path, list[int | None]()
    take = fingerprint.SumOfPart.whole

    def noted(part: fingerprint.SumOfPart) -> int | None:
        whole.append(take(part))
        return whole[-1]

    monkeypatch.setattr(fingerprint.SumOfPart, "whole", noted)
    target = {name: torch.ones_like(value) for name, value in values.items()}
    load_checkpoint(path, target)
    assert all(torch.equal(target[name], value) for name, value in values.items())
    assert len(whole) == 2 and None not in whole, "not summed again of all bytes"
    content, files = (path / SHARD).read_bytes(), {SHARD: read_manifest(path).files[SHARD]}
    rows = Destination(len(content) - 164, memoryview(bytearray(84)), row_bytes=28)
    for at in range(len(content)):
        (path / SHARD).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(StorageError, match=f"{SHARD} is damaged"):
            read_back.verify_files(path, files, {SHARD: Destinations([rows])})


@pytest.mark.parametrize("older", [False, True])
def test_a_disk_that_errs_once_is_found_whenever_it_does(
    saved: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """What is hashed is what lies in the tensor: no second read of the file can be another, fingerprints or none."""
    if older:
        without_fingerprints(saved)
    preadv, calls, wrong = os.preadv, [itertools.count(1)], [-1]

    def erring(file: int, rooms: Any, at: int, flags: int = 0) -> int:
        count = preadv(file, rooms, at, flags)
        if not flags and next(calls[0]) == wrong[0]:
            rooms[0][0] ^= 4
        return count

    monkeypatch.setattr(os, "preadv", erring)
    straight = {name: tensor for name, tensor in blank().items() if name != "turned"}
    load_checkpoint(saved, straight, may_skip=("turned",))
    whole, found = next(calls[0]) - 1, 0
    assert whole > 20
    for wrong[0] in range(1, whole + 1):
        calls[0], target = itertools.count(1), {name: torch.full_like(tensor, 5) for name, tensor in straight.items()}
        with pytest.raises(StorageError, match="damaged"):
            load_checkpoint(saved, target, may_skip=("turned",))
        found += all(map(is_empty, target.values()))
    assert found == whole


@pytest.mark.parametrize("at", [0.1, 0.9])
def test_an_older_checkpoint_comes_whole_after_what_was_half_read(saved: Path, at: float) -> None:
    """Half of the newer values lie in the tensors when the flip is found."""
    newer = save_checkpoint(saved.parent, 2, {name: ~value if value.dtype == torch.bool else value + 1
                                              for name, value in VALUES.items()}, {}, keep_last=2).path  # fmt: skip
    content = bytearray((newer / SHARD).read_bytes())
    content[int(at * len(content))] ^= 8
    (newer / SHARD).write_bytes(content)
    target = blank()
    loaded = load_latest(saved.parent, target)
    assert loaded is not None and loaded.path == saved and "is damaged" in loaded.skipped[0]
    assert all(torch.equal(target[name], value) for name, value in VALUES.items())


def test_one_thread_reads_a_file_from_its_beginning_to_its_end_and_others_hash_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads that read it in turns left a disk idle whenever one waited for another: half of its rate."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2**16)
    values = {str(number): torch.arange(2**16) + number for number in range(8)}
    path, reads, hashed, preadv = save_checkpoint(tmp_path, 1, values, {}, keep_last=1).path, [], set[int](), os.preadv
    digest = read_back._digest

    def noted(file: int, rooms: Any, at: int) -> int:
        if Path(f"/proc/self/fd/{file}").readlink().suffix == ".safetensors":
            reads.append((threading.get_ident(), at))
        return preadv(file, rooms, at)

    monkeypatch.setattr(os, "preadv", noted)
    monkeypatch.setattr(read_back, "_digest", lambda *given: (hashed.add(threading.get_ident()), digest(*given))[1])
    target = {name: torch.zeros_like(value) for name, value in values.items()}
    load_checkpoint(path, target)
    assert all(torch.equal(target[name], value) for name, value in values.items())
    assert len(reads) > 50 and {thread for thread, _ in reads} == {threading.get_ident()}
    assert [at for _, at in reads] == sorted(at for _, at in reads)
    assert hashed and threading.get_ident() not in hashed


def test_the_first_of_two_bad_files_is_named_though_the_second_is_read_before_the_first_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_back, "FEW_BYTES", 0)
    good, files, preadv = bytes(range(200)), {}, os.preadv
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(good if name == "b" else good[:-1] + b"!")
        files[name] = FileEntry(len(good), hashlib.sha256(good).hexdigest())
    started, update = threading.Event(), read_back._digest

    def failing(file: int, rooms: Any, at: int) -> int:
        if Path(f"/proc/self/fd/{file}").readlink().name == "b":
            started.set()
            raise OSError(errno.EIO, "as a test wants")
        return preadv(file, rooms, at)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(read_back, "_digest", lambda *given: (started.wait(60), update(*given))[1])
    with pytest.raises(StorageError, match="a is damaged"):
        read_back.verify_files(tmp_path, files)
    (tmp_path / "a").write_bytes(good)
    with pytest.raises(StorageError, match=r"cannot read .*b"):
        read_back.verify_files(tmp_path, files)


def refused(root: str) -> list[str]:
    """Load a damaged checkpoint into shards; return what holds something after it."""
    state = laid_out("shard", blank=True)
    for tensor in state.values():
        tensor.fill_(1)
    with pytest.raises(StorageError, match="is damaged"):
        load_checkpoint(Path(root), state)
    local = {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in state.items()}
    return [name for name, tensor in local.items() if not is_empty(tensor)]


def _save(root: str) -> None:
    save_sample(Path(root), 1, "shard")


def test_no_rank_keeps_what_another_refused(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    shard = tmp_path / "step-00000001" / "shard-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    assert run_ranks(refused, 2, str(shard.parent)) == [[], []]


def test_two_tensors_in_one_place_of_a_file_are_both_filled(tmp_path: Path) -> None:
    """No save writes that; an index that says it is followed, and does not mix up what is read where."""
    values = {"a": torch.arange(50.0), "b": torch.arange(50.0)}
    path = save_checkpoint(tmp_path, 1, values, {}, keep_last=1).path
    part = path / "shard-00000-of-00001.json"
    index, body = json.loads(part.read_text()), json.loads((path / MANIFEST_NAME).read_text())["body"]
    index["b"][0]["key"] = index["a"][0]["key"]
    write_listed(path, body["files"], part.name, json.dumps(index).encode())
    write_document(path, 2, body)
    target = {"a": torch.zeros(50), "b": torch.zeros(50)}
    load_checkpoint(path, target, verify=True)
    assert torch.equal(target["a"], values["a"]) and torch.equal(target["b"], values["b"])


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(min_size=1, max_size=200), lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40))),
    piece=st.integers(1, 90), at_once=st.integers(1, 50), most=st.integers(1, 7), rooms=st.integers(1, 3),
)  # fmt: skip
def test_every_byte_goes_where_it_belongs_and_is_hashed_once(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, lengths: list[tuple[int, int]],
    piece: int, at_once: int, most: int, rooms: int,
) -> None:  # fmt: skip
    folder, filled, parts, at = tmp_path_factory.mktemp("file"), list[int](), list[Destination](), 0
    (folder / SHARD).write_bytes(content)
    for gap, length in lengths:
        if (at := at + gap) + length <= len(content):
            parts.append(Destination(at, memoryview(bytearray(length)), _noted(filled, at)))
            at += length
    digests = [hashlib.sha256(content[first : first + piece]).digest() for first in range(0, len(content), piece)]
    entry = FileEntry(len(content), hashlib.sha256(b"".join(digests)).hexdigest(), piece)
    preadv = os.preadv

    def short(file: int, into: list[memoryview], first: int) -> int:
        return preadv(file, [into[0][:most], *into[1:]] if len(into[0]) <= most else [into[0][:most]], first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", short)
        patch.setattr(read_back, "READ_BYTES", at_once)
        patch.setattr(destinations, "MOST_ROOMS", rooms)
        read_back.verify_files(folder, {SHARD: entry}, {SHARD: Destinations(parts)})
    assert sorted(filled) == [byte for part in parts for byte in range(part.begin, part.end)]
    assert all(bytes(part.room) == content[part.begin : part.end] for part in parts)


def _noted(filled: list[int], at: int) -> Callable[[int, int], None]:
    return lambda begin, end: filled.extend(range(at + begin, at + end))


@pytest.mark.parametrize("at_once", [257, 300, 2**18])
def test_sums_of_bytes_as_they_come_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Or are not taken, where words are cut: then the whole part is summed when it is there."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", at_once)
    path, whole = save_checkpoint(tmp_path, 1, VALUES, {}, keep_last=1).path, list[bool]()
    take = fingerprint.SumOfPart.whole

    def noted(part: fingerprint.SumOfPart) -> int | None:
        whole.append((total := take(part)) is not None)
        return total

    monkeypatch.setattr(fingerprint.SumOfPart, "whole", noted)
    load_checkpoint(path, blank())
    assert len(whole) == len(VALUES) - 1 and all(whole) == (at_once != 257)


def test_reading_ends_where_the_file_does(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(b"0123456789")
    first, second = memoryview(bytearray(4)), memoryview(bytearray(8))
    with (tmp_path / SHARD).open("rb") as file:
        assert read_spread(file.fileno(), 2, [first, second]) == 8
    assert bytes(first) == b"2345" and bytes(second[:4]) == b"6789"


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(0, 60), row=st.integers(1, 25), first=st.integers(0, 30), slices=st.integers(1, 20),
    reads=st.integers(1, 17),
)  # fmt: skip
def test_slices_hold_every_byte_once_and_destinations_hear_of_whole_rows(
    length: int, row: int, first: int, slices: int, reads: int
) -> None:
    """Of a row that came in two parts each part would be summed alone: three sums for each slice of a matrix."""
    heard = list[tuple[int, int]]()
    to = Destination(0, memoryview(bytes(range(first + length))), lambda *told: heard.append(told), row)
    came, held = Comers(), b""
    for at in range(first, first + length, reads):
        stretch = BytesInPlace(to.room[at : min(at + reads, first + length)], to, at)
        for part in stretch.in_slices(slices):
            assert (
                len(part.content) <= max(slices, row) and part.content == to.room[part.at : part.at + len(part.content)]
            )
            held += part.content
            came.add(part)
    came.tell()
    assert held == bytes(to.room[first:])
    assert [at for begin, end in heard for at in range(begin, end)] == list(range(first, first + length))
    assert all(end % row == 0 for _, end in heard[:-1]), "rows end where what is heard of ends"


def test_bytes_that_come_elsewhere_are_told_apart() -> None:
    heard = list[str]()
    one, other = (Destination(at, memoryview(bytes(6)), lambda *told, at=at: heard.append(f"{at}: {told}"), 4)
                  for at in (0, 6))  # fmt: skip
    came = Comers()
    for stretch in (BytesInPlace(one.room[:5], one, 0), BytesInPlace(memoryview(b"gap")),
                    BytesInPlace(other.room[2:4], other, 2), BytesInPlace(other.room[4:], other, 4)):  # fmt: skip
        came.add(stretch)
    came.tell()
    assert heard == ["0: (0, 5)", "6: (2, 4)", "6: (4, 6)"]


def test_the_disk_begins_with_a_file_before_it_is_known_where_its_tensors_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, began = save_checkpoint(tmp_path, 1, VALUES, {}, keep_last=1).path, threading.Event()
    advise, reader = os.posix_fadvise, load.IndexReader

    def noted(file: int, at: int, length: int, advice: int) -> None:
        named = Path(f"/proc/self/fd/{file}").readlink().name
        advise(file, at, length, advice)
        if (named, at, advice) == (SHARD, 0, os.POSIX_FADV_WILLNEED):
            began.set()

    def after(*given: Any) -> Any:
        assert began.wait(60), "the disk has nothing to do while a load plans"
        return reader(*given)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    monkeypatch.setattr(load, "IndexReader", after)
    target = blank()
    load_checkpoint(path, target)
    assert all(torch.equal(target[name], value) for name, value in VALUES.items())


def test_a_system_is_asked_to_read_ahead_in_parts_that_it_reads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads no more of a request than a disk takes at once, or 128 KiB: of one for 64 MiB it read 8."""
    asked, most = list[tuple[Path, int, int]](), 2**17
    monkeypatch.setattr(read_back, "AHEAD_BYTES", 4 * most)
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda file, at, length, advice: asked.append((Path(f"/proc/self/fd/{file}").readlink(), at, length)),
    )
    files = {name: FileEntry(size, "") for name, size in (("a", 2 * most + 5), ("b", 9 * most), ("c", 7))}
    for name in files:
        (tmp_path / name).touch()
    read_back.read_ahead(tmp_path, files)
    assert [(path.name, at // most) for path, at, _ in asked] == [
        ("a", 0),
        ("a", 1),
        ("a", 2),
        ("b", 0),
        ("b", 1),
    ]
    assert {length for *_, length in asked} == {most}


def test_weights_of_equal_parts_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {str(number): torch.randn(30, 40) for number in range(50)}
    path, made = save_checkpoint(tmp_path, 1, values, {}, keep_last=1).path, list[Any]()
    product = fingerprint.PlaceWeights.product
    monkeypatch.setattr(
        fingerprint.PlaceWeights, "product", lambda self, *given: (made.append(given), product(self, *given))[1]
    )
    target = {name: torch.zeros(30, 40) for name in values}
    load_checkpoint(path, target)
    assert all(torch.equal(target[name], value) for name, value in values.items())
    assert len(made) == 2, "of a row, and of rows: a load of many small tensors made them anew for each"
