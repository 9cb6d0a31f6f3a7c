"""The multi-process helper itself: order of results, errors with their rank, deaths and hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from distributed import end_kept, run_kept, run_ranks
from runs import is_running

from paceline.errors import StorageError


def _sum_of_ranks(offset: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return dist.get_rank(), torch.get_num_threads(), total


def _fail_on_one(error: BaseException) -> None:
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def _die_on_one() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(world_size: int) -> None:
    results = run_ranks(_sum_of_ranks, world_size, 10)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    assert all(threads == 1 for _, threads, _ in results)
    assert all(total.item() == sum(range(10, 10 + world_size)) for _, _, total in results)


def test_an_exception_keeps_its_type_and_names_its_rank() -> None:
    with pytest.raises(StorageError, match="disk is gone") as caught:
        run_ranks(_fail_on_one, 2, StorageError("disk is gone", "unplugged", "plug it in"))
    assert caught.value.because == "unplugged"
    assert any("on rank 1 of 2" in note for note in caught.value.__notes__)


def test_a_killed_rank_is_an_error_unless_expected() -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2 was killed by SIGKILL"):
        run_ranks(_die_on_one, 2)
    assert run_ranks(_die_on_one, 2, may_die=[1]) == ["alive", None]


def test_a_hang_is_killed_at_the_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        run_ranks(_hang_on_one, 2, timeout_seconds=3)


def _who_is_here() -> tuple[int, str | None, float]:
    return os.getpid(), os.environ.get("TOLD_TO_RANKS"), torch.rand(1).item()


def test_ranks_that_are_kept_are_the_same_until_one_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLD_TO_RANKS", "now")
    first = run_kept(_who_is_here, 2)
    monkeypatch.delenv("TOLD_TO_RANKS")
    again, alone = run_kept(_who_is_here, 2), run_kept(_who_is_here, 1)
    assert [pid for pid, _, _ in first] == [pid for pid, _, _ in again]
    assert {told for _, told, _ in first} == {"now"} and {told for _, told, _ in again} == {None}
    assert {drawn for _, _, drawn in (*first, *again)} == {alone[0][2]}, "each call draws as a new process does"
    with pytest.raises(StorageError):
        run_kept(_fail_on_one, 2, StorageError("disk is gone", "unplugged", "plug it in"))
    assert not any(is_running(pid) for pid, _, _ in first) and is_running(alone[0][0])
    others = run_kept(_who_is_here, 2)
    assert not {pid for pid, _, _ in others} & {pid for pid, _, _ in first}
    assert run_kept(_sum_of_ranks, 2, 10)[1][2].item() == 21
    end_kept()
    assert not any(is_running(pid) for pid, _, _ in (*others, *alone))
