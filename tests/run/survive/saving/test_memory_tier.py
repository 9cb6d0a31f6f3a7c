"""Checkpoints in the machine's memory: private, newer than the disk's, refused where damaged, given back at the end."""

from __future__ import annotations

import json
import os
import platform
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from survive_runs import here, records, through, training, values_of

from paceline.checkpoint import list_checkpoints
from paceline.lock import take
from paceline.run.observe import observing
from paceline.run.survive.saving import host_room, memory_tier
from paceline.run.survive.saving.memory_tier import (
    NAME,
    OWNER,
    clear_memory_roots,
    hold_memory_root,
    make_memory_root,
    memory_root,
    remove_memory_root,
)
from paceline.supervise.again import rescue

pytestmark = pytest.mark.skipif(not memory_tier.RAM_DISK.is_dir(), reason="no RAM disk")


def _killed_after(folder: str, steps: int, checkpoints: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train so many steps and stop without a word, as a killed process; return the weights."""
    run = training(Path(folder), **checkpoints)
    batches = iter(run)
    for _ in range(steps):
        run.step(next(batches))
    run._keeper.finish()
    return {name: value.detach().clone() for name, value in run.model.named_parameters() if here().size == 1}


def _resumed(folder: str) -> tuple[int, str, dict[str, torch.Tensor]]:
    run = training(Path(folder))
    restored = run._under.restored
    assert restored is not None
    weights = {name: value.detach().clone() for name, value in run.model.named_parameters() if here().size == 1}
    return run.progress.step, str(restored.path.parent), weights


EVERY_STEP = {"every": 4, "memory_every": 1}
OWN = f"{memory_tier.PREFIX}{os.getuid()}-*"  # of this user's runs, and of no rescue


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_newest_tier_is_restored_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    trained = run_ranks(_killed_after, ranks, str(tmp_path), 7, EVERY_STEP)
    root = memory_root(tmp_path)
    assert root is not None and stat.S_IMODE(root.stat().st_mode) == 0o700
    assert [found.manifest.step for found in list_checkpoints(root).complete] == [7], "one is kept in memory"
    assert sorted(values_of(tmp_path)) == [4]
    for (step, place, weights), before in zip(run_ranks(_resumed, ranks, str(tmp_path)), trained, strict=True):
        assert (step, place) == (7, str(root))
        assert all(torch.equal(weights[name], before[name]) for name in before)
    told = records(tmp_path, "checkpoint")
    assert {record.get("tier") for record in told} == {"memory", None}
    both = sorted(record["stall_seconds"] for record in told if record["step"] == 4)
    assert len(both) == 2 and both[0] == 0.0 < both[1], "what a save held up is told once"
    remove_memory_root(tmp_path)


def test_a_machine_that_goes_is_not_left_with_what_its_memory_has(tmp_path: Path) -> None:
    """A run that goes on from there knows of no checkpoint on disk, and saves, however short the notice."""
    _killed_after(str(tmp_path), 7, EVERY_STEP)
    run = training(tmp_path, asynchronous="off")
    keeper = run._keeper
    assert keeper.good is not None and keeper.good.parent == memory_root(tmp_path)
    short = replace(run.spec.run, recovery=replace(run.spec.run.recovery, notice="1 ms"))
    keeper._run, keeper._save_seconds = replace(run._run, spec=replace(run.spec, run=short)), 10.0
    for _ in range(2):  # then the disk has the newest
        path = keeper.save_or_keep(run._under.built, run.brief.plan, run.world, run.progress)
        assert path.parent == tmp_path / "checkpoints" and path.name == "step-00000007"
    assert [each["to"] for each in records(tmp_path, "decision") if each["what"] == "stop"] == [str(path)]
    keeper.close(run.world)


def test_a_damaged_copy_in_memory_is_passed_over_and_the_next_newest_taken(tmp_path: Path) -> None:
    run_ranks(_killed_after, 1, str(tmp_path), 7, EVERY_STEP)
    root = memory_root(tmp_path)
    assert root is not None
    (shard,) = root.glob("step-*/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    ((step, place, _),) = run_ranks(_resumed, 1, str(tmp_path))
    assert (step, place) == (4, str(tmp_path / "checkpoints"))
    remove_memory_root(tmp_path)


def _completed(folder: str) -> None:
    through(training(Path(folder), **EVERY_STEP))


def test_a_run_that_is_complete_gives_the_memory_back(tmp_path: Path) -> None:
    before = set(memory_tier.RAM_DISK.glob(OWN))
    run_ranks(_completed, 2, str(tmp_path))
    assert not set(memory_tier.RAM_DISK.glob(OWN)) - before
    assert memory_root(tmp_path) is None and not (tmp_path / NAME).exists()
    assert 8 in values_of(tmp_path)


def test_a_save_on_disk_is_newer_than_the_memory_of_a_start_before(tmp_path: Path) -> None:
    """The run went back: what memory holds is of a later step and older."""
    run_ranks(_killed_after, 1, str(tmp_path), 3, {"every": 9, "memory_every": 3})
    run_ranks(_killed_after, 1, str(tmp_path), 1, {"every": 4})
    ((step, place, _),) = run_ranks(_resumed, 1, str(tmp_path))
    assert (step, place) == (4, str(tmp_path / "checkpoints"))
    remove_memory_root(tmp_path)


def _without_room(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_tier, "available_memory_bytes", lambda: 1000)
        through(training(Path(folder), **EVERY_STEP))


def test_too_little_memory_leaves_the_disk_alone_by_decision(tmp_path: Path) -> None:
    run_ranks(_without_room, 2, str(tmp_path))
    (told,) = [record for record in records(tmp_path, "decision") if record["to"] == "disk alone"]
    assert "do not fit into 0.98 KiB" in told["because"]
    assert sorted(values_of(tmp_path)) == [4, 8] and memory_root(tmp_path) is None


@pytest.mark.parametrize("folder", ["../etc", "paceline-x/../../etc", "", "/etc", 7, None])
def test_a_folder_of_others_is_not_the_runs(tmp_path: Path, folder: object) -> None:
    (tmp_path / NAME).write_text(json.dumps({"folder": folder}))
    assert memory_root(tmp_path) is None


def test_a_folder_that_others_may_write_to_is_not_the_runs(tmp_path: Path) -> None:
    root = make_memory_root(tmp_path)
    assert memory_root(tmp_path) == root
    root.chmod(0o777)
    assert memory_root(tmp_path) is None
    shutil.rmtree(root)


def test_a_rescue_is_kept_while_its_supervisor_lives_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start of another run removed it under the ranks that were to load it, on a machine whose clock was set."""
    ram = tmp_path / "ram"
    ram.mkdir()
    monkeypatch.setattr(memory_tier, "RAM_DISK", ram)
    monkeypatch.setattr(rescue, "RAM_DISK", ram)
    with take(tmp_path) as lock:
        folder = Path(rescue.rescue_folder(lock, 2))
        long_ago = time.time() - memory_tier.NOBODYS_SECONDS - 1
        os.utime(folder, (long_ago, long_ago))
        assert clear_memory_roots() == [] and folder.is_dir()
        rescue.clear_rescues(lock)
    assert not folder.exists()


def test_folders_of_runs_that_are_gone_are_removed_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted, begun anew elsewhere, or of an earlier release; a run that is there, or lives unseen, keeps its own."""
    ram = tmp_path / "ram"
    ram.mkdir()
    monkeypatch.setattr(memory_tier, "RAM_DISK", ram)
    runs = {name: tmp_path / name for name in ("deleted", "unseen", "other", "there", "foreign")}
    for run_dir in runs.values():
        run_dir.mkdir()
    roots = {name: make_memory_root(run_dir) for name, run_dir in runs.items()}
    assert clear_memory_roots() == []
    held = hold_memory_root(roots["unseen"])
    assert held is not None
    shutil.rmtree(runs["deleted"])
    shutil.rmtree(runs["unseen"])  # as one of a container that has the same RAM disk and another disk
    (runs["other"] / NAME).write_text(json.dumps({"folder": roots["there"].name}))
    (roots["foreign"] / OWNER).unlink()
    assert set(clear_memory_roots()) == {roots["deleted"].name, roots["other"].name}
    held.close()
    long_ago = time.time() - memory_tier.NOBODYS_SECONDS - 1
    rescues = [ram / "paceline-rescue-old-2", ram / "paceline-rescue-new-3"]
    for folder in rescues:
        folder.mkdir()
    for folder in (roots["foreign"], rescues[0]):
        os.utime(folder, (long_ago, long_ago))
    through(training(tmp_path / "new"))
    (told,) = [each for each in records(tmp_path / "new", "decision") if each["what"] == "memory"]
    assert set(told["from"].split(", ")) == {roots["unseen"].name, roots["foreign"].name, rescues[0].name}
    assert told["to"] == "removed" and set(ram.iterdir()) == {roots["there"], rescues[1]}


def _called_otherwise(folder: str) -> tuple[str, str, int]:
    """Return why there is no memory tier, whether there is one, and how many nodes are seen, where names differ."""
    world = here()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "node", lambda: f"name-{world.rank}")
        patch.setattr(observing, "node_name", lambda: f"name-{world.rank}")
        run = training(Path(folder), 9)
        because = memory_tier.why_no_memory_tier({"w": torch.ones(4)}, world)
        lacks = host_room.why_not_beside({"w": torch.ones(4)}, world)
        samplers = int(world.sum([float(run._node._sampler is not None)])[0])
        run._node.close()
    return because, lacks, samplers


def test_ranks_that_know_their_machine_by_two_names_are_on_one(tmp_path: Path) -> None:
    """A rank that comes anew after the machine got another name made two machines of it."""
    assert run_ranks(_called_otherwise, 2, str(tmp_path)) == [("", "", 1)] * 2
