"""Batches that a thread has read ahead are those that would be read in time."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import run_patiently
from tests_shared import PaddedText, plan_of

from paceline.errors import DataError
from paceline.run.loop.loader import BatchStream, StepBatch
from paceline.spec.layout import Layout
from paceline.task.data import read_ahead as module
from paceline.task.data.daemons import DaemonThreads
from paceline.task.data.depth import LOOK_SECONDS, DepthRule, ReadTimes
from paceline.task.data.prepare.prepare import _alone
from paceline.task.data.read_ahead import ReadAhead, may_read_in_a_thread
from paceline.task.data.rows.packed import SaysStarts
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.cache_folders import lock_of
from paceline.task.data.sources.mapped import MapSource
from paceline.task.data.storage.blocks import _locked

CPU = torch.device("cpu")


def same(one: StepBatch, other: StepBatch) -> bool:
    pairs = zip(one.micro_batches, other.micro_batches, strict=True)
    return (one.step, one.position) == (other.step, other.position) and all(
        np.array_equal(a.ids, b.ids) and torch.equal(a.data["tokens"], b.data["tokens"]) for a, b in pairs
    )


def test_a_thread_reads_what_the_loop_would_read() -> None:
    plan = plan_of(Layout(dp_replicate=2))
    readers: list[str] = []

    class Watched(PaddedText):
        def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
            readers.append(threading.current_thread().name)
            return super().read(ids, positions)

    prepared: list[str] = []
    stream = BatchStream(Watched(), 7, plan, 1, CPU)
    ahead = ReadAhead(stream.at, prepare=lambda: prepared.append(threading.current_thread().name))
    alone = BatchStream(PaddedText(), 7, plan, 1, CPU)
    for step in range(1, 5):
        position = (step - 1) * plan.batch_samples
        batch = ahead.take(position, step)
        ahead.begin(position + plan.batch_samples, step + 1)
        assert same(batch, alone.at(position, step))
    ahead.begin(999, 9)  # of a plan that is no more
    assert same(ahead.take(0, 1), alone.at(0, 1)), "what was not asked for is dropped"
    ahead.close()
    assert len(set(readers)) == 1 and readers[0].startswith("paceline-read") and prepared == [readers[0]]
    assert threading.main_thread().name not in readers
    assert not [thread for thread in threading.enumerate() if thread.name == readers[0]]


def test_an_error_is_raised_where_the_batch_is_taken() -> None:
    def read(position: int) -> Any:
        raise DataError(f"row {position} cannot be read", "the disk is gone", "another disk")

    for prepare in (None, lambda: None):
        ahead = ReadAhead(read, prepare)
        ahead.begin(3)
        with pytest.raises(DataError, match="row 3 cannot be read"):
            ahead.take(3)
        ahead.begin(4)
        ahead.close()


def test_without_a_thread_this_one_reads_when_it_has_time() -> None:
    reads: list[int] = []

    def read(position: int) -> int:
        reads.append(position)
        return position * position

    ahead = ReadAhead(read)
    ahead.begin(3)
    assert reads == [], "on a CPU the loop reads when it comes to it"
    assert ahead.take(3) == 9 and reads == [3]
    ahead.begin(4)
    ahead.read_begun()
    ahead.read_begun()
    assert reads == [3, 4] and ahead.take(4) == 16 and reads == [3, 4]
    ahead.begin(5)
    ahead.read_begun()
    assert ahead.take(6) == 36 and reads == [3, 4, 5, 6]
    ahead.read_begun()
    assert reads == [3, 4, 5, 6], "nothing was begun"


@pytest.mark.parametrize(("short", "looks"), [(float("inf"), 2), (0.0, 10)])
def test_clocks_that_cost_as_much_as_a_short_read_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, short: float, looks: int
) -> None:
    """After a short read only its time is taken; after a long one also whether its thread waited."""
    looked: list[int] = []
    monkeypatch.setattr(module, "SHORT_READ", short)
    monkeypatch.setattr(module, "_times_waited", lambda: looked.append(1) or len(looked))
    ahead = ReadAhead(lambda position: position)
    for position in range(5):
        assert ahead.take(position) == position
        ahead.begin(position + 1)
    assert len(looked) == looks and ahead.tell()["read"] > 0


def test_an_error_of_what_this_thread_read_early_is_raised_once_it_is_taken() -> None:
    def read(position: int) -> int:
        if position == 2:
            raise DataError("row 2 cannot be read", "the disk is gone", "another disk")
        return position

    ahead = ReadAhead(read, send=lambda item: item + 100)
    ahead.begin(2)
    ahead.read_begun()
    ahead.read_begun()
    with pytest.raises(DataError, match="row 2 cannot be read"):
        ahead.take(2)
    assert ahead.take(3) == 103 and ahead.tell()["ready"] == 0.5


def test_who_may_be_read_in_a_thread() -> None:
    assert may_read_in_a_thread(TokenSource.__new__(TokenSource))
    assert may_read_in_a_thread(SaysStarts(TokenSource.__new__(TokenSource)))
    assert not may_read_in_a_thread(MapSource([1, 2], seed=0)), "its rows set the global generators"
    assert not may_read_in_a_thread(PaddedText()), "it does not say so"


ENDS = """
import threading
from paceline.task.data.daemons import DaemonThreads
from paceline.task.data.read_ahead import ReadAhead

ahead = ReadAhead(lambda n: threading.Event().wait(), prepare=lambda: None)
ahead.begin(1)
print(len([each for each in threading.enumerate() if each.name.startswith("paceline-read")]))
"""


def test_a_process_that_ends_does_not_wait_for_a_storage_that_is_silent() -> None:
    """A pool of the standard library is waited for: after Ctrl-C such a process stood there for minutes."""
    ended = run_patiently([sys.executable, "-c", ENDS], timeout=30, is_cold=True)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr


FORKS = """
import os, sys, threading
from paceline.task.data import daemons, read_ahead
from paceline.task.data.storage.fetch_ahead import FetchesAhead

silent, heard = threading.Event(), threading.Event()

def read(place):
    if place == 1 and os.getpid() == own:
        heard.set()
        silent.wait()
    return place

own = os.getpid()
read_ahead.LAST_SECONDS = daemons.LAST_SECONDS = 0.05
ahead, fetching = read_ahead.ReadAhead(read, prepare=lambda: None), FetchesAhead()
ahead.begin(1)
fetching.begin(["a"], silent.wait)
heard.wait()
child = os.fork()
if not child:
    print(ahead.take(1), ahead.take(2), fetching.is_coming("a"), flush=True)
    fetching.wait(["a"])
    print(fetching.begin(["a"], lambda: None), fetching.wait(["a"]), flush=True)
    ahead.begin(3)
    print(ahead.take(3), flush=True)
    ahead.close()
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), fetching.is_coming("a"))
ahead.close()
raise SystemError("an error leaves the loop while its storage is silent")
"""


def test_neither_a_forked_process_nor_an_error_waits_for_threads_that_will_never_answer() -> None:
    """A forked process has none of its parent's threads, and reads and ends without them."""
    ended = run_patiently([sys.executable, "-c", FORKS], timeout=30, is_cold=True)
    assert ended.stdout.splitlines() == ["1 2 False", "True None", "3", "5 True"], ended.stderr
    assert ended.returncode == 1 and "SystemError" in ended.stderr


def test_locks_of_a_cache_are_let_go_of_whoever_was_forked_meanwhile(tmp_path: Path) -> None:
    """A forked process has all opened files of its parent, and with them their locks, for as long as it lives."""
    (tmp_path / "prepared").mkdir()
    held = [_locked(tmp_path / "pieces" / "lock"), lock_of(tmp_path, "corpus"), _alone(tmp_path / "prepared")]
    ends, goes_on = os.pipe()
    with contextlib.ExitStack() as stack:
        for lock in held:
            stack.enter_context(lock)
        if not (child := os.fork()):
            os.close(goes_on)
            os.read(ends, 1)
            os._exit(0)
    try:
        paths = [path for path in tmp_path.rglob("*lock") if path.is_file()]
        for path in paths:
            with path.open() as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert len(paths) == len(held)
    finally:
        os.close(goes_on)
        os.waitpid(child, 0)


def test_threads_end_with_whoever_gave_them_calls_and_say_what_was_wrong_with_their_beginning() -> None:
    def wrong() -> None:
        raise OSError("no such device")

    threads = DaemonThreads(2, "paceline-test", wrong)
    with pytest.raises(OSError, match="no such device"):
        threads.submit(print).result()
    for closes in (True, False):
        threads = DaemonThreads(2, "paceline-test")
        assert [threads.submit(pow, base, 2).result() for base in range(5)] == [0, 1, 4, 9, 16]
        own = [each for each in threading.enumerate() if each.name.startswith("paceline-test")]
        assert len(own) >= 2
        if closes:
            threads.close()
            assert threads.submit(pow, 3, 2).result() == 9, "they begin again"
        del threads
        gc.collect()
        for each in own:
            each.join(30)
        assert not any(each.is_alive() for each in own)


def test_several_are_asked_for_and_taken_in_turn() -> None:
    """Whatever is asked for ahead, passed over or asked for anew, what is taken is what was wanted."""
    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: 1)
    rule.depth = 4
    ahead = ReadAhead(lambda position, step: (position, step), prepare=lambda: None, rule=rule)
    draws = np.random.default_rng(3)
    position = 0
    for step in range(1, 200):
        assert ahead.take(position, step) == (position, step)
        for coming in range(1, rule.depth + 1):
            ahead.begin(position + 13 * coming, step + coming)
        # Now and then a batch is passed over, or a run goes back to an older checkpoint.
        position += 26 if draws.random() < 0.1 else -13 * int(draws.integers(0, 9)) if draws.random() < 0.1 else 13
    told = ahead.tell()
    assert set(told) == {"read", "ready", "depth"} and 0 <= told["ready"] <= 1 and ahead.tell() == {}
    ahead.close()


def seen(rule: DepthRule, read: float, waited: float, step: float, in_thread: bool = False, batch: int = 1) -> int:
    for _ in range(8):
        rule.seen(batch, ReadTimes(read, waited, step, in_thread))
    return rule.depth


def test_depth_follows_steps_and_reads() -> None:
    rule = DepthRule(100, on_device=True, bytes_of=lambda item: item)
    assert rule.depth == 1 and seen(rule, 0.5, 0.5, 1.0) == 1 and not rule.news()
    assert seen(rule, 3.5, 3.5, 1.0, batch=10) == 4, "three steps pass while one batch is read"
    (told,) = rule.news()
    assert (told.what, told.before, told.after) == ("read ahead", "1 batch", "4 batches") and rule.news() == []
    assert told.evidence["read_seconds"] == 3.5 and told.evidence["step_seconds"] == 1.0
    assert seen(rule, 2.9, 2.9, 1.0, batch=10) == 4, "less is called for, but not so much less"
    assert seen(rule, 50.0, 50.0, 1.0, batch=10) == 10, "no more than memory allows"
    assert "would not fit into 100 B" in rule.news()[-1].because
    assert seen(rule, 0.1, 0.1, 1.0, batch=10) == 1


def test_a_cpu_reads_ahead_only_what_it_would_wait_for() -> None:
    rule = DepthRule(10**9, on_device=False, bytes_of=lambda item: 1)
    assert rule.depth == 0 and seen(rule, 2.0, 0.5, 1.0) == 0, "a read that computes takes the cores of a step"
    assert seen(rule, 0.04, 0.04, 1.0) == 0, "too little to hide"
    assert seen(rule, 2.0, 1.9, 1.0) == 2 and seen(rule, 2.0, 0.1, 1.0, in_thread=True) == 0
    assert "the cores compute already" in rule.news()[-1].because


def test_reads_that_wait_are_begun_together() -> None:
    """With three batches ahead, three reads wait at once: each begins before any may end."""
    together = threading.Barrier(3)

    def read(position: int) -> int:
        if position:
            together.wait()
        return position

    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: 1)
    ahead = ReadAhead(read, prepare=lambda: None, rule=rule)
    assert ahead.take(0) == 0
    rule.depth = 3
    for position in (1, 2, 3):
        ahead.begin(position)
    assert [ahead.take(position) for position in (1, 2, 3)] == [1, 2, 3]
    ahead.close()


@pytest.mark.parametrize("together", [2, 3, 8])
def test_one_wake_up_is_for_several_short_reads(together: int) -> None:
    """In their order, by one thread; what is wrong with one of them is said where that one is taken."""
    calls: list[tuple[str, int]] = []

    def read(position: int) -> int:
        calls.append((threading.current_thread().name, position))
        if position == 11:
            raise DataError("row 11 cannot be read", "the disk is gone", "another disk")
        return position

    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: 1)
    ahead = ReadAhead(read, prepare=lambda: None, rule=rule)
    rule.seen = lambda item, times: None  # type: ignore[method-assign]
    rule.depth, rule.together = 2 * together, together
    submitted, pool = list[int](), ahead._pool()
    submit = pool.submit
    pool.submit = lambda call, group: submitted.append(len(group.calls)) or submit(call, group)  # type: ignore
    assert ahead.take(0) == 0 and calls == [("MainThread", 0)], "it did not wait for others"
    asked = 1
    for position in range(1, 40):
        while asked <= min(39, position + rule.depth - 1):
            ahead.begin(asked)
            asked += 1
        if position == 11:
            with pytest.raises(DataError, match="row 11"):
                ahead.take(position)
        elif position in (20, 21):
            pass  # passed over
        else:
            assert ahead.take(position) == position
    by_thread = [position for name, position in calls if name.startswith("paceline-read")]
    assert by_thread == sorted(by_thread) and set(submitted) == {together}
    assert len(by_thread) == together * (39 // together), "the last few, too few for a group, are read by this thread"
    assert sorted({position for _, position in calls} | {20, 21}) == list(range(40))
    ahead.close()


@pytest.mark.parametrize("how", ["begun", "refused", "fails"])
@pytest.mark.parametrize("sends", [False, True])
def test_reads_that_are_begun_together_are_finished_where_they_are_taken(how: str, sends: bool) -> None:
    """What cannot be begun together is read one by one; what is wrong with one is said of that one."""
    begun, finished = list[list[int]](), dict[int, str]()

    def read(position: int) -> int:
        finished[position] = threading.current_thread().name
        if position == 5:
            raise DataError("row 5 cannot be read", "the disk is gone", "another disk")
        return position

    def begin_reads(calls: Sequence[tuple[int]]) -> list[Callable[[], int]] | None:
        begun.append([position for (position,) in calls])
        if how == "fails":
            raise DataError("rows cannot be gathered", "one of them is damaged", "another disk")
        return None if how == "refused" else [partial(read, position) for (position,) in calls]

    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: 1)
    rule.seen = lambda item, times: None  # type: ignore[method-assign]
    rule.depth, rule.together = 8, 4
    send = (lambda item: item + 100) if sends else None
    ahead = ReadAhead(read, lambda: None, rule, send, begin_reads=begin_reads)
    for position in range(12):
        ahead.begin(position)
    for position in range(12):
        if position % 3 == 0:
            ahead.read_begun()
        if position == 5:
            with pytest.raises(DataError, match="row 5"):
                ahead.take(position)
        else:
            assert ahead.take(position) == position + 100 * sends
    assert begun == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]] and sorted(finished) == list(range(12))
    by_thread = {name for name in finished.values() if name != threading.main_thread().name}
    assert bool(by_thread) == (how != "begun")
    ahead.close()


def test_how_many_reads_are_worth_a_wake_up_follows_from_what_they_take() -> None:
    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: 1)
    assert seen(rule, 200e-6, 0.0, 10e-3) == 4 and rule.together == 2
    assert "a thread reads 2 each time that it is woken" in rule.news()[-1].because
    assert seen(rule, 0.9e-3, 0.0, 10e-3) == 1 and rule.together == 1
    small = DepthRule(3, on_device=True, bytes_of=lambda item: item)
    assert seen(small, 160e-6, 0.0, 10e-3) == 3 and small.together == 1, "no more than memory allows"
    cpu = DepthRule(10**9, on_device=False, bytes_of=lambda item: 1)
    assert seen(cpu, 2e-4, 1.9e-4, 1e-3) == 1 and cpu.together == 1, "reads that wait, wait beside each other"


def test_a_wake_up_is_for_more_reads_where_they_become_shorter_and_looks_are_rare() -> None:
    """The first reads are long, of a thread that the other one keeps from its turn."""
    looks = list[int]()
    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: looks.append(1) or 1, short_read=0.0)  # type: ignore
    for read, together in ((100e-6, 5), (70e-6, 5), (60e-6, 8)):
        looks.clear()
        for _ in range(200):
            rule.seen(1, ReadTimes(read, 0.0, 1e-6, True))
        assert (rule.depth, rule.together) == (16, together)
        assert len(looks) <= 200 * (read + 1e-6) / LOOK_SECONDS + 1
    assert [each.after for each in rule.news()] == ["16 batches", "16 batches"]


def test_one_batch_at_a_time_is_sent_to_the_device() -> None:
    told: list[str] = []

    def send(item: int) -> int:
        told.append(f"send {item}")
        return item + 100

    def receive(item: int) -> int:
        told.append(f"receive {item}")
        return item

    ahead = ReadAhead(lambda position: position, None, None, send, receive)
    assert ahead.take(1) == 101
    ahead.begin(2)
    ahead.begin(3)
    ahead.read_begun()
    ahead.read_begun()
    assert told == ["send 1", "receive 101", "send 2"], "the device holds one batch ahead, the host the others"
    assert ahead.take(2) == 102 and ahead.take(3) == 103
    assert told[3:] == ["receive 102", "send 3", "receive 103"]


def test_reads_shorter_than_a_thread_takes_to_wake_are_left_to_the_thread_that_trains() -> None:
    rule = DepthRule(10**9, on_device=True, bytes_of=lambda item: 1)
    assert seen(rule, 40e-6, 0.0, 10e-3) == 0, "it reads while the device computes"
    assert "waking a thread costs more" in rule.news()[-1].because
    for read in [40e-6] * 7 + [5e-3]:
        rule.seen(1, ReadTimes(read, 0.0, 10e-3, False))
    assert rule.depth == 1, "one of eight reads was long: a thread hides the next"
