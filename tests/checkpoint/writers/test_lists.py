"""Large worlds: who hears of a save's files, who writes their lists, and who looks after old checkpoints."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_samples import load_sample, save_sample, write_document
from distributed import run_ranks

from paceline.checkpoint import list_checkpoints, manifest, read_manifest, verify_checkpoint
from paceline.checkpoint.manifest import (
    MANIFEST_NAME,
    TABLE_NAME,
    list_counts,
    list_name,
    lists_in_a_list,
    ranks_in_a_list,
)
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.tiers.newest import newest_whole
from paceline.checkpoint.tiers.remote import RemoteStore
from paceline.checkpoint.writers.lists import FILE_ROW, LIST_ROW, bring
from paceline.checkpoint.writers.talk import carry
from paceline.errors import StorageError

RANKS = 5  # lists of 3 ranks, where two ranks are many already: of 0, 1 and 2, and of 3 and 4


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 64, 100])
def test_the_first_of_some_ranks_has_the_rows_of_all_in_order(size: int) -> None:
    rows = [f"{place:04d}".encode() for place in range(size)]
    talks = [bring(rows[place], place, size, 0) for place in range(size)]
    found, _ = carry(talks)
    assert found[0] == rows
    for place, held in enumerate(found):
        assert held == rows[place : place + len(held)], "what others have are rows from their own on"


@pytest.mark.parametrize(
    ("ranks", "counts"), [(256, (16,)), (1024, (32,)), (16_384, (512, 16)), (2**20, (2**15, 2**10, 32))]
)
def test_nobody_hears_of_more_than_a_list_and_some_lists_of_each_level(ranks: int, counts: tuple[int, ...]) -> None:
    of_a_list = ranks_in_a_list(ranks)
    assert list_counts(ranks, of_a_list, lists_in_a_list(ranks)) == counts
    own, told = bytes(3 * FILE_ROW.size), bytes(LIST_ROW.size)
    _, within = carry([bring(own, place, of_a_list, 0) for place in range(of_a_list)])  # each list has one such talk
    size = min(32, counts[0])
    _, among = carry([bring(told, place, size, 0) for place in range(size)])
    assert max(within) + len(counts) * max(among) <= 4_700 + 1_600 * len(counts)


def counting(root: str, steps: int) -> tuple[Counter[str], Counter[str]]:
    """Save in lists; return of which files this rank asks for the length, and which it deletes, by their kinds."""
    asked, deleted = Counter[str](), Counter[str]()
    ask, delete = Path.stat, os.unlink

    def stat(self: Path, **how: Any) -> os.stat_result:
        asked[self.name.partition("-")[0]] += 1
        return ask(self, **how)

    def unlink(path: Any, *more: Any, **how: Any) -> None:
        deleted[Path(path).name.partition("-")[0]] += 1
        delete(path, *more, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "INLINE_RANKS", 1)
        for step in range(1, steps):
            save_sample(Path(root), step, "shard", keep_last=1)
        patch.setattr(Path, "stat", stat)
        patch.setattr(os, "unlink", unlink)
        save_sample(Path(root), steps, "shard", keep_last=1)
    return asked, deleted


def test_the_first_ranks_of_lists_look_after_old_checkpoints(tmp_path: Path) -> None:
    counted = run_ranks(counting, RANKS, str(tmp_path), 3)
    newest = read_manifest(tmp_path / "step-00000003")
    shards = sum(name.startswith("shard-") for name in newest.files)
    assert [each.path.name for each in list_checkpoints(tmp_path).complete] == ["step-00000003"]
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []
    assert sum(deleted["shard"] for _, deleted in counted) == shards, "of the checkpoint before"
    for rank, (asked, deleted) in enumerate(counted):
        first = rank in (0, 3)
        assert (deleted["shard"] > 0) == first and deleted["shard"] <= 3 * shards / RANKS
        most = 2 * 3 * shards / RANKS if first else 0  # its list's of the new one, and its share of the old one
        assert asked["shard"] <= most + 1, "and the part of the index that it has just written"


def looking(root: str) -> tuple[Path | None, int]:
    """Return the newest checkpoint that all ranks find whole, and of how many shards this one asked for the length."""
    asked = Counter[str]()
    ask = Path.stat

    def stat(self: Path, **how: Any) -> os.stat_result:
        asked[self.name.partition("-")[0]] += 1
        return ask(self, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "INLINE_RANKS", 1)
        for step in (1, 2):
            save_sample(Path(root), step, "shard")
        if dist.get_rank() == 0:
            (Path(root) / "step-00000002" / "shard-00004-of-00005.json").unlink()
        dist.barrier()
        patch.setattr(Path, "stat", stat)
        found = newest_whole([Path(root)], Ranks())
    return found, asked["shard"]


def test_a_start_looks_for_the_files_of_a_checkpoint_by_all_ranks(tmp_path: Path) -> None:
    for found, asked in run_ranks(looking, RANKS, str(tmp_path)):
        assert found == tmp_path / "step-00000001"
        assert asked <= 2 * 2, "the two files of one rank, of two checkpoints"


def damage_one(root: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "INLINE_RANKS", 1)
        for step in range(1, 5):
            save_sample(Path(root), step, "shard", keep_last=2 if step == 4 else 9)
            if step == 3:
                (Path(root) / "step-00000002" / "shard-00004-of-00005.json").unlink(missing_ok=True)


def test_a_checkpoint_that_lacks_a_file_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    """Of three sound ones the last two stay, and the one that is not sound is left to whoever looks into it."""
    run_ranks(damage_one, RANKS, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-0000000{step}" for step in (2, 3, 4)]
    assert [each.manifest.step for each in list_checkpoints(tmp_path).complete] == [4, 3]
    verify_checkpoint(tmp_path / "step-00000004")


def spoilt(root: str, what: str) -> str:
    """Return the error of a save whose second list, or whose file of that list, cannot be had."""
    from paceline.checkpoint.writers import lists

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "INLINE_RANKS", 1)
        save_sample(Path(root), 1, "shard")
        if what == "list":
            write = lists.write_file

            def fails(path: Path, *more: Any) -> Any:
                if path.name == list_name(1):
                    raise OSError(28, "No space left on device")
                return write(path, *more)

            patch.setattr(lists, "write_file", fails)
        else:
            tell = lists.tell_of_files

            def loses(files: Any, ranks: Any, said: str, folder: Path) -> Any:
                known = tell(files, ranks, said, folder)
                if ranks.rank == 4:
                    (folder / "shard-00004-of-00005.json").unlink()
                ranks.any_of([True])  # nobody looks for it before
                return known

            patch.setattr("paceline.checkpoint.save.tell_of_files", loses)
        with pytest.raises(StorageError) as caught:
            save_sample(Path(root), 2, "shard")
    return f"{caught.value.what}: {caught.value.because}"


@pytest.mark.parametrize("what", ["list", "file"])
def test_what_the_first_rank_of_a_list_meets_ends_the_save_on_all_ranks(tmp_path: Path, what: str) -> None:
    told = set(run_ranks(spoilt, RANKS, str(tmp_path), what))
    assert len(told) == 1
    assert ("No space left" if what == "list" else "shard-00004-of-00005.json is missing") in told.pop()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert load_sample(tmp_path / "step-00000001")["step"] == 1


def test_the_manifest_of_lists_names_them_and_the_table_alone(tmp_path: Path) -> None:
    run_ranks(counting, RANKS, str(tmp_path), 1)
    path = tmp_path / "step-00000001"
    found = read_manifest(path)
    assert set(found.lists()) == {list_name(0), list_name(1)}
    assert found.total_bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST_NAME)
    assert TABLE_NAME in found.files


def saved_below_lists(root: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "INLINE_RANKS", 1)
        patch.setattr(manifest, "MOST_IN_A_LIST", 2)
        for step in (1, 2):
            save_sample(Path(root), step, "shard", keep_last=1)


def loaded(path: str) -> int:
    return load_sample(Path(path), "shard")["step"]


def test_lists_of_lists_have_every_file_and_load_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Two lists of two ranks and one of the fifth; above them a list of two lists and one of the third."""
    run_ranks(saved_below_lists, RANKS, str(tmp_path))
    (path,) = tmp_path.iterdir()
    found = read_manifest(path)
    assert json.loads((path / MANIFEST_NAME).read_text())["version"] == 6
    upper = ["lists-1-00000.json", "lists-1-00001.json"]
    assert [*found.lists()] == [*upper, *(list_name(number) for number in range(3))]
    assert {*found.files} == {file.name for file in path.iterdir()} - {MANIFEST_NAME}
    assert found.total_bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST_NAME)
    assert verify_checkpoint(path).step == 2
    assert run_ranks(loaded, 2, str(path)) == [2, 2]
    far = RemoteStore(f"file://{tmp_path}/far")
    far.copy(path, keep_last=1)
    fetched = far.fetch_newest(tmp_path / "here", 0)
    assert fetched is not None and {*read_manifest(fetched).files} == {*found.files}
    document = json.loads((path / MANIFEST_NAME).read_text())
    for lists in (1, -1, "2", 2.5, 3):
        write_document(path, 6, {**document["body"], "lists_in_a_list": lists})
        with pytest.raises(StorageError):
            verify_checkpoint(path)
    write_document(path, 6, document["body"])
    swapped = (path / list_name(1)).read_bytes()
    (path / list_name(1)).write_bytes(swapped.replace(b"00002", b"00003"))
    with pytest.raises(StorageError, match=r"files-00001\.json"):
        verify_checkpoint(path)
