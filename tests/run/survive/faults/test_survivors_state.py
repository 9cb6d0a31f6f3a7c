"""What survivors hold is used only where it is the state of its step: no half-made pass and no flipped bit is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from runs import records_of, steps_of
from storm import SURVIVES, Start, Story, told
from survive_runs import here, training
from tasks_of_storms import OF_ONE_TEST
from test_soak import FOUR, RUN, state_of

from paceline.checkpoint import load_latest, publish, take_snapshot, write
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.tiers.held_by_ranks import HeldByRanks
from paceline.errors import StorageError
from paceline.lock import take
from paceline.run.loop import in_world
from paceline.run.loop.resume import RANKS_MEMORY, saved_state
from paceline.run.survive import survivor
from paceline.run.survive.faults.storage import damage
from paceline.run.survive.survivor import Brought, Together, bring_together, let_go
from paceline.supervise.again import rescue
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.told.generation import FROM_RANKS, REFORMED, Generation

STEPS, STEP = 12, 7
FLIP = {"kind": "flip", "step": STEP, "rank": 0}
KILL = {"kind": "kill", "step": STEP, "rank": 2}  # which holds what rank 0 holds
# By name: the faults, and what is said of the survivors' state after the step before, or after the step itself.
MEETINGS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "weight": ([{**FLIP, "target": "weight", "phase": "data", "bit": 12}, {**KILL, "phase": "forward"}], "rank 0"),
    "moment": ([{**FLIP, "target": "optimizer", "phase": "data", "bit": 12}, {**KILL, "phase": "reduce"}], "rank 0"),
    "gradient": ([{**FLIP, "phase": "update", "bit": 20}, {**KILL, "phase": "update"}], "was to be compared"),
    "another": ([{**FLIP, "target": "weight", "phase": "data", "bit": 12}, {**KILL, "rank": 1, "phase": "forward"}],
                "rank 0"),
}  # fmt: skip

KILLS: list[dict[str, Any]] = [{"kind": "kill", "step": 4, "rank": 1, "phase": "backward"},
         {"kind": "kill", "step": 8, "rank": 1, "phase": "save"}]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survivors")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, list[Start]]:
    met = [Story(name, FOUR, faults, RUN, STEPS, how=SURVIVES) for name, (faults, _) in MEETINGS.items()]
    two, rarely = {"dp_replicate": 2}, {**RUN, "check_every": "5 steps"}
    keeps = [Story("keeps calm", two, run=rarely, steps=STEPS, task="keeps"),
             Story("keeps", two, KILLS, rarely, STEPS, how=SURVIVES, task="keeps")]  # fmt: skip
    back = OF_ONE_TEST["goes back and dies"]
    returns = Story("returns", two, list(back.faults), {**RUN, **back.run}, STEPS, how=SURVIVES,
                    task="goes back and dies")  # fmt: skip
    return told(folder, [Story("calm", FOUR, run=RUN, steps=STEPS), *met, *keeps, returns], timeout=180)


@pytest.mark.parametrize("name", MEETINGS)
def test_a_bit_that_flips_as_its_copy_is_lost_is_in_no_later_step(
    folder: Path, ended: dict[str, list[Start]], name: str
) -> None:
    assert ended["calm"][-1].code == ended[name][-1].code == 0, ended[name]
    calm, met = steps_of(folder / "calm"), steps_of(folder / name)
    assert len(records_of(folder / name, "injected")) == 2
    assert [step["loss"].hex() for step in met] == [step["loss"].hex() for step in calm]
    assert state_of(folder / name) == state_of(folder / "calm")
    (recovery,) = records_of(folder / name, "recovery")
    assert recovery["rung"] == "reform", "in the living processes"
    is_copied = recovery["resumed_from"] == RANKS_MEMORY
    assert is_copied is (name == "another"), "where rank 2 holds the same it is the copy, else the newest checkpoint"
    because = [each["because"] for each in records_of(folder / name, "decision") if each["what"] == "restore"]
    assert len(because) == 1 and MEETINGS[name][1] in because[0], because


def test_what_a_broken_step_has_moved_is_as_it_was_before(folder: Path, ended: dict[str, list[Start]]) -> None:
    """Running statistics, which passes move, and what a callback has counted of a step that is made again."""
    assert ended["keeps calm"][-1].code == ended["keeps"][-1].code == 0, ended["keeps"]
    recoveries = records_of(folder / "keeps", "recovery")
    assert [each["step"] for each in recoveries] == [each["step"] - (each["phase"] != "save") for each in KILLS]
    assert all((each["rung"], each["resumed_from"]) == ("reform", RANKS_MEMORY) for each in recoveries)
    calm, met = steps_of(folder / "keeps calm"), steps_of(folder / "keeps")
    assert [(step["lr"], step["loss"].hex()) for step in met] == [(step["lr"], step["loss"].hex()) for step in calm]
    assert state_of(folder / "keeps") == state_of(folder / "keeps calm")


def test_after_a_rollback_the_state_that_was_restored_is_the_one_that_the_ranks_agree_on(
    folder: Path, ended: dict[str, list[Start]]
) -> None:
    """Step 9 was compared before the spike of step 10: what rank 0 holds of step 8, to which it went back, is sound."""
    assert [start.code for start in ended["returns"]] == [0], ended["returns"]
    decisions = records_of(folder / "returns", "decision")
    assert ["back to step 8" in each["to"] for each in decisions if each["what"] == "rollback"] == [True]
    (recovery,) = records_of(folder / "returns", "recovery")
    assert (recovery["rung"], recovery["step"]) == ("reform", 8)
    assert recovery["resumed_from"] == RANKS_MEMORY, [each for each in decisions if each["what"] == "restore"]


@pytest.mark.parametrize("where", ["in memory", "in files", "not at all"])
def test_where_what_survivors_hold_cannot_be_restored_the_newest_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A value was lost after a rank had told of its state, and the run ended, with a sound checkpoint on disk."""
    run = training(tmp_path / "run", 2)
    for batch in run:
        if run.step(batch).step == 5:
            break
    taken = take_snapshot(5, *saved_state(run._run, run._under.built, run.brief.plan, run.progress))
    (tmp_path / "rescue").mkdir()

    def brought(*given: object) -> Together | None:
        if where == "not at all":
            raise StorageError("the state after step 5 was not read from the nodes' memory", "a bad block")
        held = HeldByRanks(taken, Ranks(alone=True))
        for _, value in held._mine:
            value.flatten()[0] += 1.0
        if where == "in memory":
            return Together(held, run._made, False)
        folder = publish(write(tmp_path / "rescue", taken, alone=True), keep_last=1).path
        damage(next(folder.glob("*.safetensors")), "corrupt", 0.9)
        return Together(tmp_path / "rescue", run._made, False)

    monkeypatch.setattr(in_world, "bring_together", brought)
    run.take_down()
    run._generation = Generation(2, REFORMED, rescue=FROM_RANKS, rescue_step=5)
    run._enter(Brought(None, None, True))
    assert run.progress.step == run._done_step == 4
    (restore,) = [each for each in records_of(tmp_path / "run", "decision") if each["what"] == "restore"]
    assert restore["from"].startswith("the state after step 5") and restore["to"] == "step 4"
    assert not list((tmp_path / "rescue").glob("step-*")) or where != "in files"


# ---- where it is brought together -----------------------------------------------------------------------------------


def _brought(folder: str, as_on: str) -> tuple[bool, list[float]]:
    """Return whether a rank has got the state that rank 0 holds without a file, and what it has got."""
    world, found = here(), {"weight": torch.zeros(6)}
    taken = take_snapshot(3, {"weight": torch.arange(6.0)}, {"progress": {"step": 3, "position": 30}})
    held = Brought(taken, None, True, HeldState(3)) if world.is_first else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survivor, "_travels", lambda world: as_on == "cpu")
        together = bring_together(world, Generation(rescue=folder, rescue_step=3), held)
    assert together is not None and together.is_done
    if isinstance(together.root, HeldByRanks):
        together.root.fill(found)
    else:
        load_latest(together.root, found)
    let_go(together, world)
    assert not world.is_first or not Path(folder).exists()
    return isinstance(together.root, HeldByRanks), [float(value) for value in found["weight"]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_state_goes_from_rank_to_rank_or_on_devices_through_the_memory_of_the_machine(
    tmp_path: Path, device: str
) -> None:
    assert run_ranks(_brought, 2, str(tmp_path / "rescue"), device) == [(device == "cpu", [0, 1, 2, 3, 4, 5])] * 2


def test_where_memory_has_no_room_for_files_the_state_goes_from_rank_to_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").write_text("")  # in which no folder can be made
    assert run_ranks(_brought, 2, str(tmp_path / "full" / "rescue"), "cuda") == [(True, [0, 1, 2, 3, 4, 5])] * 2
    with take(tmp_path / "run") as lock:
        monkeypatch.setattr(rescue, "RAM_DISK", tmp_path / "full")
        folder = Path(rescue.rescue_folder(lock, 2))
        assert folder.parent == tmp_path / "run" and folder.is_dir()
        lock.run_dir = tmp_path / "full"
        assert rescue.rescue_folder(lock, 3) == FROM_RANKS
        lock.run_dir = tmp_path / "run"
