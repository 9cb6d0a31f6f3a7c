"""A survivor whose peer was killed is free once groups are aborted, and meets others again. On a GPU under NCCL."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
from devices import on_every_device
from distributed import ON_NCCL, run_ranks
from tests_shared import world_here

from paceline.cluster.here.prepare import LEFT_TO_SUPERVISOR
from paceline.run.process.groups import abort_groups

WORD_SECONDS = 1.0  # after which the supervisor's word would come
FREE_SECONDS = 10.0  # a supervisor ends by force who is not free after 15


def freed() -> tuple[float, float]:
    """Return the seconds after which the main thread was free, and a sum of the world after; rank 1 is killed."""
    world, backend = world_here(), dist.get_backend()
    ones = torch.ones(8, device=world.device)
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 8
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    word = threading.Timer(WORD_SECONDS, abort_groups)
    word.start()
    began = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)):  # of a peer that has gone, or of groups that are no more
        while time.monotonic() - began < 3 * FREE_SECONDS:
            dist.all_reduce(ones)
            ones.tolist()
    seconds = time.monotonic() - began
    word.join()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, f"file://{folder}/next", rank=0, world_size=1)
        alone = torch.ones(8, device=world.device)
        dist.all_reduce(alone)
        return seconds, float(alone.sum())


@on_every_device
def test_a_survivor_is_free_and_meets_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LEFT_TO_SUPERVISOR.items():
        monkeypatch.setenv(name, value)
    if device == "cuda":
        monkeypatch.setenv(ON_NCCL, "1")
    survivor, _ = run_ranks(freed, 2, timeout_seconds=90, may_die=[1])
    assert survivor[0] < FREE_SECONDS and survivor[1] == 8.0
