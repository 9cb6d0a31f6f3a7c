"""Damaged, cut, missing and hostile checkpoints are found, named, and passed over."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_samples import check_equal, laid_out, load_sample, save_sample, write_document, write_listed
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import (
    Manifest,
    find_latest,
    list_checkpoints,
    load_checkpoint,
    load_latest,
    read_index,
    read_manifest,
    verify_checkpoint,
)
from paceline.checkpoint.manifest import MANIFEST_NAME, TABLE_NAME, FileEntry
from paceline.errors import StorageError

SHARD, PART = "shard-00000-of-00001.safetensors", "shard-00000-of-00001.json"


def _flip_last_bit(path: Path) -> None:
    data = bytearray((path / SHARD).read_bytes())
    data[-1] ^= 1
    (path / SHARD).write_bytes(data)


def _cut_shard(path: Path) -> None:
    (path / SHARD).write_bytes((path / SHARD).read_bytes()[:-3])


def _cut_manifest(path: Path) -> None:
    (path / MANIFEST_NAME).write_bytes((path / MANIFEST_NAME).read_bytes()[:-20])


def _edit_step(path: Path) -> None:
    text = (path / MANIFEST_NAME).read_text()
    (path / MANIFEST_NAME).write_text(text.replace('"step":2', '"step":9', 1))


def _rename_tensor(file: Path) -> None:
    file.write_text(file.read_text().replace("fp32", "fp23"))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (_flip_last_bit, f"{SHARD} is damaged"),
    "a cut shard": (_cut_shard, f"{SHARD} has"),
    "an edited table": (lambda path: _rename_tensor(path / TABLE_NAME), "its content changed after it was written"),
    "an edited index": (lambda path: _rename_tensor(path / PART), "its content changed after it was written"),
    "a missing table": (lambda path: (path / TABLE_NAME).unlink(), f"{TABLE_NAME} is missing"),
    "a missing index": (lambda path: (path / PART).unlink(), f"{PART} is missing"),
    "a missing shard": (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
    "no manifest": (lambda path: (path / MANIFEST_NAME).unlink(), "manifest.json is missing"),
    "an empty folder": (lambda path: [file.unlink() for file in path.iterdir()], "manifest.json is missing"),
    "a cut manifest": (_cut_manifest, "manifest.json: "),
    "an edited manifest": (_edit_step, "does not match its digest"),
    "a manifest of bytes": (lambda path: (path / MANIFEST_NAME).write_bytes(b"\xff\x00" * 9), "manifest.json: "),
    "a deeply nested manifest": (lambda path: (path / MANIFEST_NAME).write_text("[" * 10**5), "manifest.json: "),
    "a manifest that is a folder": (
        lambda path: ((path / MANIFEST_NAME).unlink(), (path / MANIFEST_NAME).mkdir()),
        "manifest.json: ",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_passed_over(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    older, newer = save_sample(tmp_path, 1).path, save_sample(tmp_path, 2).path
    damage(newer)
    with pytest.raises(StorageError, match=message):
        verify_checkpoint(newer)
    state = laid_out("plain", blank=True)
    loaded = load_latest(tmp_path, state)
    assert loaded is not None
    path, extra, skipped, _ = loaded
    assert path == older and extra["step"] == 1
    assert len(skipped) == 1 and message in skipped[0] and "step-00000002" in skipped[0]
    check_equal(state, "plain")


def test_a_flipped_bit_is_seen_only_by_reading(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 2).path
    _flip_last_bit(path)
    assert find_latest(tmp_path) == path  # lengths agree
    with pytest.raises(StorageError, match=r"no checkpoint in .* is sound"):
        load_latest(tmp_path, laid_out("plain", blank=True))


def test_no_checkpoint_at_all_is_not_an_error(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "nowhere", {}) is None
    assert find_latest(tmp_path) is None
    (tmp_path / ".partial-step-00000007-abcd").mkdir()
    (tmp_path / "step-7").mkdir()
    assert list_checkpoints(tmp_path) == list_checkpoints(tmp_path / "nowhere")


def test_a_name_alone_counts_for_nothing(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 5).path
    (tmp_path / "step-00000099").mkdir()
    assert find_latest(tmp_path) == path
    (reason,) = list_checkpoints(tmp_path).skipped
    assert "step-00000099" in reason and "manifest.json is missing" in reason


def test_newest_is_the_last_published_not_the_highest_step(tmp_path: Path) -> None:
    save_sample(tmp_path, 300)
    rolled_back = save_sample(tmp_path, 150).path
    assert find_latest(tmp_path) == rolled_back


def _fall_back(root: str) -> tuple[str, list[str]]:
    state = laid_out("shard", blank=True)
    loaded = load_latest(Path(root), state)
    assert loaded is not None
    check_equal(state, "shard")
    return loaded.path.name, loaded.skipped


def test_ranks_agree_on_the_one_they_fall_back_to(tmp_path: Path) -> None:
    run_ranks(_save_two, 2, str(tmp_path))
    shard = tmp_path / "step-00000002" / "shard-00001-of-00002.safetensors"  # rank 1 reads this one
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    answers = run_ranks(_fall_back, 2, str(tmp_path))
    assert answers[0] == answers[1]
    name, (reason,) = answers[0]
    assert name == "step-00000001" and "shard-00001-of-00002.safetensors is damaged" in reason


def _save_two(root: str) -> None:
    for step in (1, 2):
        save_sample(Path(root), step, "shard")


def _forge(path: Path, change: Callable[[dict, dict], Any], version: int = 2) -> None:
    """Rewrite manifest and index with matching digests, as someone who knows the format can.

    `change` gets every tensor with its chunks; in version 1 of the format they are written so, now in two files.
    """
    body = json.loads((path / MANIFEST_NAME).read_text())["body"]
    tensors, part = (json.loads((path / name).read_text()) for name in (TABLE_NAME, PART))
    for name, chunks in part.items():
        tensors[name]["chunks"] = chunks
    change(body, tensors)
    gone = {
        name: entry.pop("chunks" if version == 2 else "parts")
        for name, entry in tensors.items()
        if isinstance(entry, dict)
    }
    if version == 2:
        write_listed(path, body["files"], PART, json.dumps(gone).encode())
    elif isinstance(body["files"], dict):
        del body["files"][PART]
    write_listed(path, body["files"], TABLE_NAME, json.dumps(tensors).encode())
    write_document(path, version, body)


def _rename_file(name: str) -> Callable[[dict, dict], None]:
    def change(body: dict, tensors: dict) -> None:
        body["files"][name] = body["files"].pop(SHARD)
        for tensor in tensors.values():
            for chunk in tensor["chunks"]:
                chunk["file"] = name

    return change


def _tensor(**fields: Any) -> Callable[[dict, dict], None]:
    return lambda body, tensors: tensors["fp32"].update(fields)


def _chunk(**fields: Any) -> Callable[[dict, dict], None]:
    return lambda body, tensors: tensors["fp32"]["chunks"][0].update(fields)


HUGE = {"dtype": "float64", "shape": [2**50], "parts": [0, 0], "chunks": [
    {"offsets": [0], "sizes": [2**50], "file": SHARD, "key": "x"}]}  # fmt: skip
FORGERIES: dict[str, tuple[Callable[[dict, dict], Any], str]] = {
    "parent folder": (_rename_file("../../etc/passwd"), "is not the name of a shard"),
    "absolute path": (_rename_file("/etc/passwd"), "is not the name of a shard"),
    "newline in name": (_rename_file(SHARD + "\n"), "is not the name of a shard"),
    "no index": (lambda body, tensors: body["files"].pop(TABLE_NAME), "the manifest does not list it"),
    "files as a list": (lambda body, tensors: body.update(files=[]), "'files' is not a dict"),
    "step as a text": (lambda body, tensors: body.update(step="1"), "'step' is not a int"),
    "digest of another kind": (lambda body, tensors: body["files"][SHARD].update(sha256="x"), "its sha256 is not one"),
    "unlisted file": (_chunk(file="other"), "is not among the shards"),
    "index as a shard": (_chunk(file=TABLE_NAME), "is not among the shards"),
    "negative offset": (_chunk(offsets=[-1, 0]), "is not a count"),
    "float size": (_chunk(sizes=[8.0, 6]), "is not a count"),
    "true as a size": (_chunk(sizes=[True, 6]), "is not a count"),
    "size beyond 64 bits": (_tensor(shape=[2**70, 6]), "is not a count"),
    "chunk outside": (_chunk(offsets=[1, 0]), "reaches outside"),
    "too few dimensions": (_chunk(offsets=[0], sizes=[48]), "number of dimensions"),
    "hole": (_chunk(sizes=[7, 6]), "do not add up"),
    "no chunks": (_tensor(chunks=[]), "do not add up"),
    "unknown dtype": (_tensor(dtype="__class__"), "unknown dtype"),
    "huge shape": (lambda body, tensors: tensors.update(x=dict(HUGE)), "bytes of tensors in a file of"),
    "chunk as a number": (_tensor(chunks=[3]), "'offsets' is not a list"),
    "tensor as a number": (lambda body, tensors: tensors.update(x=3), "'dtype' is not a str"),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", FORGERIES)
def test_a_forgery_is_refused(tmp_path: Path, kind: str, version: int) -> None:
    change, message = FORGERIES[kind]
    path = save_sample(tmp_path, 1).path
    _forge(path, change, version)
    with pytest.raises(StorageError, match=message):
        read_index(path, read_manifest(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body, tensors: body["files"].pop(PART), "the manifest does not list it"),
        (_tensor(parts=[0, 1]), "are not the first and the last rank"),
        (_tensor(parts=[0]), "are not the first and the last rank"),
        (_tensor(parts=[1, 0]), "are not the first and the last rank"),
        (_tensor(parts=[-1, 0]), "is not a count"),
        (lambda body, tensors: tensors["fp32"].pop("parts"), "'chunks' is not a list"),
    ],
)
def test_forged_parts_of_the_index_are_refused(tmp_path: Path, change: Callable, message: str) -> None:
    path = save_sample(tmp_path, 1).path
    _forge(path, change)
    with pytest.raises(StorageError, match=message):
        read_index(path, read_manifest(path))


def test_an_index_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 1).path
    for content in (b"[]", b"3", b"[" * 10**5):
        (path / TABLE_NAME).write_bytes(content)
        body = json.loads((path / MANIFEST_NAME).read_text())["body"]
        files = {TABLE_NAME: FileEntry(len(content), hashlib.sha256(content).hexdigest())}
        with pytest.raises(StorageError, match=TABLE_NAME):
            read_index(path, Manifest(1, 1, body["created"], 1, files, {}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_chunk(key="whole"), r"it holds F32\[3, 5\], not float32\[8, 6\]"),
        (_chunk(key="absent"), "absent"),
    ],
)
def test_a_manifest_that_lies_about_a_shard_is_refused(tmp_path: Path, change: Callable, message: str) -> None:
    path = save_sample(tmp_path, 1).path
    _forge(path, change)
    with pytest.raises(StorageError, match=message):
        load_sample(path)


def test_a_shard_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 1).path
    garbage = b"\xff" * (path / SHARD).stat().st_size
    (path / SHARD).write_bytes(garbage)
    _forge(path, lambda body, tensors: body["files"][SHARD].update(sha256=hashlib.sha256(garbage).hexdigest()))
    with pytest.raises(StorageError, match=f"cannot read .*{SHARD}"):
        load_sample(path)


def _cuts(length: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, length), max_size=3).map(lambda inner: sorted({0, length, *inner}))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_any_grid_of_chunks_is_accepted_and_any_shifted_one_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple[int, int]
) -> None:
    path = tmp_path_factory.mktemp("grid") / "step-00000001"
    rows, columns = data.draw(_cuts(shape[0])), data.draw(_cuts(shape[1]))
    chunks = [
        {"offsets": [top, left], "sizes": [bottom - top, right - left], "file": SHARD, "key": f"{top},{left}"}
        for top, bottom in itertools.pairwise(rows)
        for left, right in itertools.pairwise(columns)
    ]
    path.mkdir()
    shard = {"bytes": 4 * shape[0] * shape[1], "sha256": "0" * 64}
    body = {"step": 1, "sequence": 1, "created": "", "world_size": 1, "extra": {},
            "files": {SHARD: shard, PART: {}, TABLE_NAME: {}}}  # fmt: skip
    (path / MANIFEST_NAME).write_text(json.dumps({"body": body}))
    (path / TABLE_NAME).write_text(json.dumps({"x": {"dtype": "float32", "shape": list(shape), "parts": [0, 0]}}))
    (path / PART).write_text(json.dumps({"x": data.draw(st.permutations(chunks))}))
    _forge(path, lambda body, tensors: None)
    assert read_index(path, read_manifest(path))["x"].shape == shape

    moved = data.draw(st.sampled_from(chunks))
    fits = [step for step in (-1, 1) if 0 <= moved["offsets"][0] + step <= shape[0] - moved["sizes"][0]]
    if fits:
        moved["offsets"] = [moved["offsets"][0] + data.draw(st.sampled_from(fits)), moved["offsets"][1]]
        _forge(path, lambda body, tensors: tensors["x"].update(chunks=chunks))
        with pytest.raises(StorageError, match="two chunks overlap"):
            read_index(path, read_manifest(path))
    shutil.rmtree(path)


def test_verify_false_loads_without_hashing(tmp_path: Path) -> None:
    path = save_sample(tmp_path, 1).path
    _flip_last_bit(path)
    state = laid_out("plain", blank=True)
    load_checkpoint(path, state, verify=False)
    assert sum(not torch.equal(state[name], tensor) for name, tensor in laid_out("plain").items()) == 1
