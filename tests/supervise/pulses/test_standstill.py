"""Ranks that wait for each other for ever are told; one that computes, waits for a core or sleeps elsewhere is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from runs import environment

from paceline.supervise import supervisor
from paceline.supervise.pulses import standstill
from paceline.supervise.pulses.pulse import stack_path
from paceline.supervise.pulses.standstill import SETTLED_SECONDS, STILL_SECONDS, Standstill
from paceline.supervise.pulses.system import ThreadSeen
from paceline.supervise.pulses.watch import Suspect
from paceline.supervise.supervisor import supervise_started

RANKS, MAIN, OTHER = 3, 1000, 1
Seen = Callable[[int, int], Sequence[ThreadSeen]]  # the threads of a rank at a look of this number

STACK = """Thread 0x00007f00 (most recent call first):
  File "/lib/python3.12/threading.py", line 2 in run

Current thread 0x00007f01 (most recent call first):
  File "/venv/site-packages/torch/{place}", line 3252 in all_reduce
  File "/venv/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/model.py", line {line} in forward
  File "/venv/site-packages/torch/nn/modules/module.py", line 1787 in _call_impl
"""


IN_BACKWARD = """Current thread 0x00007f01 (most recent call first):
  File "/venv/site-packages/torch/autograd/graph.py", line 882 in _engine_run_backward
  File "/venv/site-packages/torch/autograd/__init__.py", line 354 in backward
  File "/home/me/loop.py", line 5 in step
"""


def stack(line: int = 9, place: str = "distributed/distributed_c10d.py") -> str:
    return STACK.format(line=line, place=place)


def asleep(rank: int, look: int, *others: ThreadSeen) -> list[ThreadSeen]:
    """Return what a rank shows that sleeps, beside whose main thread one of gloo's looks for messages."""
    return [ThreadSeen(MAIN + rank, "S", 7), ThreadSeen(OTHER + rank, "S", 100 * look), *others]


def watched(
    folder: Path, patch: pytest.MonkeyPatch, seen: Seen, stacks: Sequence[str] = (stack(),) * RANKS,
    cpu: Callable[[int], float] = lambda look: 0.0, looks: int = 100,
) -> Suspect | None:  # fmt: skip
    """Return whom a watch suspects over so many looks at ranks that answer at once with these stacks."""
    number = 0

    def answer(process: int, signal: int) -> None:
        with stack_path(folder, process - MAIN).open("a") as file:
            file.write(stacks[process - MAIN])

    patch.setattr(standstill.os, "kill", answer)
    for rank in range(RANKS):
        stack_path(folder, rank).write_text("")
    threads, spent = (lambda process: seen(process - MAIN, number)), (lambda process: cpu(number))
    watch = Standstill(folder, RANKS, lambda rank: MAIN + rank, threads, spent)
    for number in range(looks):
        if (found := watch.look(number * standstill.LOOK_SECONDS)) is not None:
            assert number * standstill.LOOK_SECONDS >= STILL_SECONDS + SETTLED_SECONDS
            return found
    return None


def test_ranks_that_all_sleep_in_collectives_are_told_with_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = watched(tmp_path, monkeypatch, asleep, [stack(9), stack(9), IN_BACKWARD], lambda look: 0.002 * look)
    assert found is not None and found.ranks == (0, 1, 2)
    assert found.what == "all 3 ranks wait for each other, and would for ever"
    assert "ranks 0, 1 in all_reduce, called by forward (/home/me/model.py:9); rank 2 in a back" in found.because
    assert found.because.endswith("rank 2 in a backward pass, called by step (/home/me/loop.py:5)")


def one_is(rank: int, look: int, state: str, switches: int = 7) -> list[ThreadSeen]:
    """Return ranks that sleep, of which one has a main thread in another state."""
    return [ThreadSeen(MAIN + rank, state, switches)] if rank == 1 else asleep(rank, look)


@pytest.mark.parametrize(
    "seen",
    [
        lambda rank, look: one_is(rank, look, "R"),  # it computes, or wants a core and gets none
        lambda rank, look: one_is(rank, look, "D"),  # it waits for a disk
        lambda rank, look: one_is(rank, look, "T"),  # it is stopped, or looked at by a debugger
        lambda rank, look: one_is(rank, look, "S", look // 15),  # it is woken every now and then
        lambda rank, look: asleep(rank, look, ThreadSeen(5, "R", 1)),  # another thread of it wants a core
        lambda rank, look: asleep(rank, look, ThreadSeen(5, "D", 1)),
        lambda rank, look: [] if rank == 1 else asleep(rank, look),  # it has ended, and nobody has seen it yet
    ],
)
def test_a_rank_that_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    assert watched(tmp_path, monkeypatch, seen) is None


def test_threads_that_look_for_messages_are_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is met on a core at some looks, and on none twice in a row."""

    def seen(rank: int, look: int) -> list[ThreadSeen]:
        return asleep(rank, look, ThreadSeen(5 + look % 2, "R", look))

    assert watched(tmp_path, monkeypatch, seen) is not None


def test_ranks_that_compute_beside_their_wait_are_let_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a core each, in a thread that is never met on one."""
    assert watched(tmp_path, monkeypatch, asleep, cpu=lambda look: look * standstill.LOOK_SECONDS / 2) is None


@pytest.mark.parametrize(
    "other",
    [
        stack(place="utils/data/dataloader.py").replace("c10d_logger", "mine").replace("torch/distributed", "torch"),
        STACK.format(line=9, place="x").replace("/venv/site-packages/torch/x", "/home/me/model.py"),  # called by torch
        "",
    ],
)
def test_who_sleeps_elsewhere_may_do_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """For a service, a lock or a disk of another machine: it may come, however long that takes."""
    assert watched(tmp_path, monkeypatch, asleep, [stack(), other, stack()]) is None


def test_a_supervisor_that_slept_has_seen_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "STACK_SIGNAL", None)  # whoever is asked would end this test
    watch = Standstill(tmp_path, RANKS, lambda rank: MAIN + rank, lambda process: asleep(process - MAIN, 0))
    for moment in (0.0, 100.0, 200.0):
        watch.look(moment)
    assert watch._still_seconds <= 3 * standstill.LONGEST_LOOK_SECONDS


# ---- real processes -------------------------------------------------------------------------------------------------

RANK = """
import os, sys, threading, time
from pathlib import Path
from paceline.supervise.pulses.standstill import answering_with_stacks

def all_reduce():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def model():
    if os.environ["RANK"] == "1" and sys.argv[1] == "computes":
        while True:
            pass
    all_reduce()

def looks_for_messages():
    while True:
        time.sleep(0.01)

with answering_with_stacks(Path(os.environ["PACELINE_ERRORS"]), int(os.environ["RANK"])):
    threading.Thread(target=looks_for_messages, daemon=True).start()
    model()
"""


@pytest.mark.parametrize("does", ["waits", "computes"])
def test_a_supervisor_ends_ranks_that_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    for name, seconds in (("LOOK", 0.05), ("LONGEST_LOOK", 0.1), ("STILL", 0.3), ("SETTLED", 0.1)):
        monkeypatch.setattr(standstill, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.1)
    script = tmp_path / "torch" / "distributed" / "rank.py"
    script.parent.mkdir(parents=True)
    script.write_text(RANK)

    def start(place: dict[str, str]) -> subprocess.Popen[bytes]:
        environ = {**environment(), **place}
        return subprocess.Popen([sys.executable, str(script), does], env=environ, process_group=0)

    limit = 60.0 if does == "waits" else 1.5
    outcome = supervise_started(start, 2, environment(), limit_seconds=limit, answer=True)
    if does == "waits":
        assert outcome.exit_code == 4 and outcome.error is not None
        assert "all 2 ranks wait for each other" in str(outcome.error["what"])
        assert "ranks 0, 1 in all_reduce" in str(outcome.error["because"])
    else:
        assert outcome.error is not None and outcome.error["what"] == "it took too long"


OF_TORCH = """
import os
from pathlib import Path

import torch
import torch.distributed as dist
from paceline.supervise.pulses.standstill import answering_with_stacks

rank = int(os.environ["RANK"])

def step():
    if rank == 0:
        dist.broadcast(torch.zeros(3), src=1)
    dist.all_reduce(torch.zeros(3))

with answering_with_stacks(Path(os.environ["PACELINE_ERRORS"]), rank):
    dist.init_process_group("gloo", os.environ["PACELINE_RENDEZVOUS"], rank=rank, world_size=2)
    step()
"""


@pytest.mark.deep
def test_collectives_of_torch_that_do_not_match_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo would end them after ten minutes; its threads look for messages all the while."""
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.1)
    (tmp_path / "rank.py").write_text(OF_TORCH)

    def start(place: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(tmp_path / "rank.py")]
        return subprocess.Popen(command, env={**environment(), **place}, process_group=0)

    outcome = supervise_started(start, 2, environment(), limit_seconds=200, answer=True)
    assert outcome.exit_code == 4 and outcome.error is not None
    told = str(outcome.error["because"])
    assert "rank 0 in broadcast, called by step (" in told and "rank 1 in all_reduce, called by step (" in told
