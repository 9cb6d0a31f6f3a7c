"""What a save and a load tell other ranks: sums, and no plan where the last one still holds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_samples import KINDS, check_equal, full, laid_out, load_sample
from distributed import run_ranks
from tests_shared import device_here

from paceline.checkpoint import KeptPlan, index, load_checkpoint, read_index, read_manifest, save_checkpoint
from paceline.checkpoint.fingerprint import parts_held, whole_fingerprints
from paceline.checkpoint.ranks import Ranks

# Each has a list, or an object, for every rank: on all of them, or on the first.
OF_ALL_RANKS = ("gather_object", "all_gather_object", "scatter_object_list", "all_gather", "all_to_all")


def saves(root: str) -> list[dict[str, int]]:
    """Save twice alike, then other tensors, then load; return the collectives of each that grow with the ranks."""
    counts: Counter[str] = Counter()
    found, kept = [], KeptPlan()
    with pytest.MonkeyPatch.context() as patch:
        for name in OF_ALL_RANKS:
            original = getattr(dist, name)

            def counted(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
                counts[name] += 1
                return original(*args, **options)

            patch.setattr(dist, name, counted)
        state = laid_out("shard")
        for step, tensors in enumerate((state, state, {**state, "more": torch.ones(3, device=device_here())}), 1):
            save_checkpoint(Path(root), step, tensors, {"step": step, "layout": "shard"}, keep_last=9, kept=kept)
            found.append(dict(counts))
            counts.clear()
        load_checkpoint(Path(root) / "step-00000002", laid_out("shard", blank=True))
    return [*found, dict(counts)]


def test_no_save_and_no_load_tells_a_rank_what_all_others_hold(tmp_path: Path) -> None:
    assert run_ranks(saves, 2, str(tmp_path)) == [[{}, {}, {}, {}]] * 2
    for step in (1, 2):
        assert load_sample(tmp_path / f"step-{step:08d}")["step"] == step
        entries = read_index(tmp_path / f"step-{step:08d}", read_manifest(tmp_path / f"step-{step:08d}"))
        shapes = {name: kind[0] for name, kind in KINDS.items()}
        expected = whole_fingerprints([parts_held({name: full(name) for name in KINDS})], shapes)
        assert {name: entry.fingerprint for name, entry in entries.items()} == {**expected, "empty": ""}


def torn(root: str) -> None:
    """Save a weight of which two copies are off by as much, one up and one down, and one of which all are equal."""
    off = (0, 1, -1)[dist.get_rank()]
    tensors = {"torn": torch.tensor([7 + off], device=device_here()), "whole": torch.tensor([7], device=device_here())}
    kept = KeptPlan()
    for step in (1, 2):
        save_checkpoint(Path(root), step, tensors, {}, keep_last=9, kept=kept)


def test_copies_that_differ_have_no_fingerprint_though_their_differences_add_up_to_nothing(tmp_path: Path) -> None:
    run_ranks(torn, 3, str(tmp_path))
    for step in ("step-00000001", "step-00000002"):
        table = json.loads((tmp_path / step / "tensors.json").read_text())
        assert "fingerprint" not in table["torn"] and len(table["whole"]["fingerprint"]) == 16


def opened(root: str) -> list[str]:
    """Load what this rank saved; return the files of the index that it opens."""
    save_checkpoint(Path(root), 1, laid_out("shard"), {}, keep_last=1)
    names: list[str] = []
    content = index.content
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "content", lambda path: (names.append(path.name), content(path))[1])
        state = laid_out("shard", blank=True)
        load_checkpoint(Path(root) / "step-00000001", state)
    check_equal(state, "shard")
    return names


def test_a_load_opens_the_table_and_the_ranks_own_part_of_the_index(tmp_path: Path) -> None:
    found = run_ranks(opened, 4, str(tmp_path))
    assert found == [["tensors.json", f"shard-{rank:05d}-of-00004.json"] for rank in range(4)]


def sums() -> list[int]:
    return Ranks().total([2**64 - 1, 2**63, 5, 0])


def test_sums_over_ranks_are_exact_modulo_the_word() -> None:
    assert run_ranks(sums, 3) == [[2**64 - 3, 2**63, 15, 0]] * 3
    assert Ranks().total([]) == [] and Ranks().any_of([]) == []
