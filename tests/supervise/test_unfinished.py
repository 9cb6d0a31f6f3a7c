"""Saves of worlds that are over: a rank that stood still before it published can do so no more."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from runs import records_of
from tests_shared import plan_of

from paceline.checkpoint import list_checkpoints, save_checkpoint
from paceline.errors import StorageError
from paceline.lock import RunLock, take
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.spec.layout import Layout
from paceline.spec.survive.recovery import RecoverySpec
from paceline.supervise.again.fallen import Fallen, TakenOver
from paceline.supervise.again.generations import Generations
from paceline.supervise.again.held_state import HeldState
from paceline.supervise.again.machines import OneMachine
from paceline.supervise.blame import Outcome
from paceline.supervise.starting import Starter
from paceline.supervise.told.brief import Brief
from paceline.supervise.told.generation import Generation

BRIEF = Brief(plan_of(Layout()), 100, 1, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
DIED = Outcome(137, {"error": "WorkerDied", "what": "rank 0 of 1 was ended by SIGKILL", "because": "", "try": ""})


def supervisor(lock: RunLock) -> Generations:
    machines = OneMachine(Starter(lambda place: pytest.fail("nobody is started"), None, print), {})
    return Generations(machines, BRIEF, lock, RecoverySpec())


@pytest.mark.parametrize("standing", [(0, 1), (0,), (1,)])
def test_a_rank_that_is_lost_with_the_coordinator_is_on_record(tmp_path: Path, standing: tuple[int, ...]) -> None:
    """It was told as the coordinator's alone, for which no fault is recorded: where all go on nothing has failed."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "0001.jsonl").write_text("")
    with take(tmp_path) as lock:
        left = {rank: SimpleNamespace(held=HeldState()) for rank in standing}
        processes = {rank: SimpleNamespace(pid=0) for rank in (0, 1)}
        plan = plan_of(Layout(dp_replicate=2))
        following = supervisor(lock)._take_over(TakenOver(1, plan, left, cast(Any, processes), passed_seconds()))
    assert following is not None
    lost = next(({f" with rank {rank}": rank} for rank in (0, 1) if rank not in standing), {})
    what = f"the coordinator was lost{''.join(lost)}"
    assert (following.fault["what"], following.is_called) == (what, not lost)
    found = [each["what"] for each in records_of(tmp_path, "fault")]
    assert found == ([what] if 0 not in standing else []), "the first rank tells it, where it goes on"


def saved(run_dir: Path, step: int, fence: Any = None) -> Path:
    weights = {"weight": torch.full((4,), float(step))}
    return save_checkpoint(run_dir / "checkpoints", step, weights, {}, keep_last=3, fence=fence, alone=True).path


def test_a_rank_that_is_stopped_between_the_fence_and_the_rename_publishes_nothing(tmp_path: Path) -> None:
    """Its checkpoint of step 9 would be the newest, of a world that came to step 8 for the one that goes on."""
    with take(tmp_path) as lock:
        saved(tmp_path, 4, lock.check)
        one = supervisor(lock)

        def stopped() -> None:
            lock.check()  # and then nothing for a while: the supervisor goes on without this rank
            following = one._after(Generation(to_world=1), Fallen(DIED, {}, False))
            assert following is not None and following.number == lock.generation == 2

        with pytest.raises(StorageError, match="the checkpoint of step 9 was not saved"):
            saved(tmp_path, 9, stopped)
        assert [found.manifest.step for found in list_checkpoints(tmp_path / "checkpoints").complete] == [4]
        saved(tmp_path, 6, lock.check)
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["step-00000004", "step-00000006"], "what was set aside is gone"


def test_what_was_published_before_the_fence_stays(tmp_path: Path) -> None:
    with take(tmp_path) as lock:
        newest = saved(tmp_path, 4, lock.check)
        assert supervisor(lock)._after(Generation(to_world=1), Fallen(DIED, {}, False)) is not None
        assert [found.path for found in list_checkpoints(tmp_path / "checkpoints").complete] == [newest]


def test_a_start_lets_nobody_of_an_earlier_one_publish(tmp_path: Path) -> None:
    """A machine that was silent for so long that its file server gave the directory to another start."""
    with take(tmp_path) as lock:
        one = supervisor(lock)
        one._run = lambda taken: DIED  # type: ignore[method-assign]
        with pytest.raises(StorageError, match="the checkpoint of step 9 was not saved"):
            saved(tmp_path, 9, lambda: one.run() and None)
        assert not list_checkpoints(tmp_path / "checkpoints").complete
