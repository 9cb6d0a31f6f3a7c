"""The index in parts: what grows with ranks, what a load reads, and checkpoints of releases that had none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_samples import (
    KINDS,
    as_version_1,
    check_equal,
    full,
    laid_out,
    load_sample,
    save_sample,
    write_document,
    write_listed,
)
from distributed import run_ranks
from listed import write_lists

from paceline.checkpoint import (
    IndexReader,
    Manifest,
    full_tensors,
    list_checkpoints,
    load_latest,
    read_index,
    read_manifest,
    verify_checkpoint,
)
from paceline.checkpoint import manifest as manifest_module
from paceline.checkpoint.files.flushes import Flushes
from paceline.checkpoint.index import encode_kinds, encode_part
from paceline.checkpoint.manifest import (
    INLINE_RANKS,
    MANIFEST_NAME,
    TABLE_NAME,
    FileEntry,
    ListedFiles,
    encode_manifest,
    list_name,
    part_name,
    shard_name,
)
from paceline.checkpoint.shards import Chunk, write_file
from paceline.checkpoint.snapshot import Part
from paceline.checkpoint.writers.spread import kinds_of, spread
from paceline.errors import StorageError

ROWS = 4096


def sharded(ranks: int, layers: int = 6) -> list[list[Part]]:
    """Return what `ranks` ranks hold of weights sharded by rows and of the optimizer's counters, which all hold."""
    share = ROWS // ranks
    return [
        [
            part
            for layer in range(layers)
            for part in (
                Part(f"model.layers.{layer}.weight", "float32", (ROWS, 8), (rank * share, 0), (share, 8), rank),
                Part(f"optim.layers.{layer}.weight.step", "float32", (), (), (), 1),
            )
        ]
        for rank in range(ranks)
    ]


def write_index(folder: Path, of_ranks: list[list[Part]]) -> Manifest:
    """Write manifest, table and parts of the index as ranks would that hold these; no shards."""
    folder.mkdir()
    ranks, writers = len(of_ranks), spread(of_ranks)
    files = {shard_name(rank, ranks): FileEntry(10**6, "0" * 64) for rank in range(ranks)}
    with Flushes() as flushes:
        for rank, parts in enumerate(of_ranks):
            chunks = {
                part.name: [Chunk(part.offsets, part.sizes, shard_name(writers[part.name, part.box], ranks), part.key)]
                for part in parts
            }
            files[part_name(rank, ranks)] = write_file(folder / part_name(rank, ranks), encode_part(chunks), flushes)
        files[TABLE_NAME] = write_file(folder / TABLE_NAME, encode_kinds(kinds_of(of_ranks)), flushes)
        write_lists(folder, files, ranks, flushes)
        write_file(folder / MANIFEST_NAME, encode_manifest(Manifest(1, 1, "", ranks, files, {})), flushes)
    return read_manifest(folder)


def test_what_rank_0_writes_grows_with_files_alone(tmp_path: Path) -> None:
    sizes = {}
    for ranks in (16, 256, 1024):
        write_index(tmp_path / str(ranks), sharded(ranks))
        sizes[ranks] = {file.name: file.stat().st_size for file in (tmp_path / str(ranks)).iterdir()}
    tables = [of_ranks[TABLE_NAME] for of_ranks in sizes.values()]
    assert max(tables) - min(tables) <= 12 * 4, "the table has a few digits more, and no line"
    for ranks, of_ranks in sizes.items():
        if ranks <= INLINE_RANKS:
            assert of_ranks[MANIFEST_NAME] < 2 * 180 * (ranks + 2), "a manifest has two files for each rank"
        else:
            lists = [size for name, size in of_ranks.items() if name.startswith("files-")]
            assert len(lists) == ranks**0.5 and max(lists) < 2 * 180 * len(lists), "lists are as long as they are many"
            assert of_ranks[MANIFEST_NAME] < 180 * (len(lists) + 3), "a manifest has the lists"
        largest = max(size for name, size in of_ranks.items() if name.startswith("shard-"))
        assert largest < 12 * 180, "a part lists what one rank holds"


@pytest.mark.parametrize("rank", [0, 100, 255])
def test_a_rank_of_the_same_layout_reads_its_own_part_alone(tmp_path: Path, rank: int) -> None:
    of_ranks = sharded(256)
    index = IndexReader(tmp_path / "x", write_index(tmp_path / "x", of_ranks))
    assert index.parts_read == set()
    found = index.find({part.name: [part.box] for part in of_ranks[rank]}, near=rank)
    assert index.parts_read == {rank}
    assert all([chunk.offsets for chunk in found[part.name]] == [part.offsets] for part in of_ranks[rank])


def test_a_rank_of_another_layout_reads_the_parts_around_its_own(tmp_path: Path) -> None:
    manifest = write_index(tmp_path / "x", sharded(256))
    for rank, parts in ((0, {0, 1, 2, 3}), (2, {8, 9, 10, 11}), (63, {252, 253, 254, 255})):
        index = IndexReader(tmp_path / "x", manifest)
        wanted = {part.name: [part.box] for part in sharded(64)[rank]}
        assert {len(chunks) for chunks in index.find(wanted, near=rank * 256 // 64).values()} == {1, 4}
        assert parts <= index.parts_read and len(index.parts_read) <= 8


def test_the_whole_index_has_each_chunk_once(tmp_path: Path) -> None:
    index = read_index(tmp_path / "x", write_index(tmp_path / "x", sharded(16)))
    assert {name: len(entry.chunks) for name, entry in index.items()} == {
        part.name: 16 if "weight.step" not in part.name else 1 for part in sharded(16)[0]
    }


# ---- lists of files --------------------------------------------------------------------------------------------------


def test_a_rank_reads_the_lists_that_it_needs_and_all_shares_are_all_files(tmp_path: Path) -> None:
    write_index(tmp_path / "x", sharded(1024))
    shared: dict = {}
    for rank in range(16):
        manifest = read_manifest(tmp_path / "x")
        assert isinstance(manifest.files, ListedFiles) and manifest.files.bytes_read == 0
        shared |= manifest.share(rank, 16)
        its_lists = [manifest.files[list_name(number)].bytes for number in (2 * rank, 2 * rank + 1)]
        assert manifest.files.bytes_read == sum(its_lists), "of 32 lists"
    assert shared == dict(read_manifest(tmp_path / "x").files)
    assert len(shared) == 2 * 1024 + 32 + 1


def test_what_a_rank_reads_of_lists_grows_with_the_logarithm_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest, lists of lists, and a list: of 16 times as many ranks one more is read."""
    read = {}
    for ranks, most in ((1024, 32), (16_384, 32), (4096, 64)):
        folder, entry = tmp_path / str(ranks), FileEntry(10**6, "0" * 64)
        folder.mkdir()
        files = {name: entry for rank in range(ranks) for name in (shard_name(rank, ranks), part_name(rank, ranks))}
        with Flushes() as flushes, monkeypatch.context() as patch:
            patch.setattr(manifest_module, "MOST_IN_A_LIST", most)  # 64 of 64, as earlier releases wrote
            write_lists(folder, files, ranks, flushes)
            files[TABLE_NAME] = write_file(folder / TABLE_NAME, b"{}", flushes)
            write_file(folder / MANIFEST_NAME, encode_manifest(Manifest(1, 1, "", ranks, files, {})), flushes)
        document = json.loads((folder / MANIFEST_NAME).read_text())
        assert document["version"] == (6 if ranks == 16_384 else 3)
        manifest = read_manifest(folder)
        assert isinstance(manifest.files, ListedFiles)
        assert manifest.files[part_name(ranks - 1, ranks)] == entry
        assert len(manifest.files) == 2 * ranks + 1 + len(list(manifest.lists())), "every list is a file too"
        found = read_manifest(folder)
        assert isinstance(found.files, ListedFiles) and found.share(ranks - 1, ranks)
        read[ranks] = (folder / MANIFEST_NAME).stat().st_size + found.files.bytes_read
    assert read[16_384] < read[1024] + 32 * 130, "a list of 32 lists"


def save_in_lists(root: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_module, "INLINE_RANKS", 1)
        save_sample(Path(root), 1, "shard")


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that three ranks saved as large worlds do."""
    root = tmp_path_factory.mktemp("listed")
    run_ranks(save_in_lists, 3, str(root))
    return root / "step-00000001"


def load_in_lists(path: str) -> int:
    return load_sample(Path(path), "shard")["step"]


def test_what_is_in_lists_loads_on_any_number_of_ranks(listed: Path) -> None:
    assert json.loads((listed / MANIFEST_NAME).read_text())["version"] == 3
    assert {path.name for path in listed.glob("files-*")} == {"files-00000.json", "files-00001.json"}
    assert verify_checkpoint(listed).step == load_sample(listed)["step"] == 1
    assert run_ranks(load_in_lists, 2, str(listed)) == [1, 1]


@pytest.mark.parametrize("harm", ["gone", "cut", "of other ranks"])
def test_a_list_that_is_not_as_it_was_written_is_refused(listed: Path, tmp_path: Path, harm: str) -> None:
    path = tmp_path / "step-00000001"
    shutil.copytree(listed, path)
    found = path / "files-00001.json"
    if harm == "gone":
        found.unlink()
    elif harm == "cut":
        found.write_bytes(found.read_bytes()[:-9])
    else:
        body = json.loads((path / MANIFEST_NAME).read_text())["body"]
        write_listed(path, body["files"], found.name, (path / "files-00000.json").read_bytes())
        write_document(path, 3, body)
    with pytest.raises(StorageError, match=r"files-00001\.json"):
        load_sample(path)
    assert not list_checkpoints(tmp_path).complete


# ---- releases before the index had parts -----------------------------------------------------------------------------


def _save(root: str) -> None:
    save_sample(Path(root), 3, "shard")


def _load(root: str) -> tuple[int, tuple[str, ...]]:
    state = laid_out("shard", blank=True)
    loaded = load_latest(Path(root), state)
    assert loaded is not None
    check_equal(state, "shard")
    return loaded.extra["step"], loaded.unchecked


def test_a_checkpoint_of_version_1_loads_into_any_layout(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path))
    path = tmp_path / "step-00000003"
    as_version_1(path)
    assert json.loads((path / MANIFEST_NAME).read_text())["version"] == 1
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json", "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors", "tensors.json"
    ]  # fmt: skip
    verify_checkpoint(path)
    assert load_sample(path)["step"] == 3
    assert run_ranks(_load, 3, str(tmp_path)) == [(3, ("empty",))] * 3
    whole = dict(full_tensors(path, prefix=""))
    assert all((whole[name] == full(name)).all() for name in KINDS)
    run_ranks(_save, 2, str(tmp_path))  # beside it, in the format of today
    assert verify_checkpoint(tmp_path / "step-00000003.1").sequence == 2
