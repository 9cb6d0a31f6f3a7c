"""Who does nothing, by what the system says: real processes that wait, each in another way."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from runs import wait_until

from paceline.supervise.pulses import rest
from paceline.supervise.pulses.rest import ASLEEP, USUAL_SECONDS, Rest, SystemView, UsualThreads
from paceline.supervise.pulses.system import (
    ProcessTree,
    ThreadSeen,
    queued_bytes,
    state_of,
    threads_of,
)

SAYS = "print(flush=True); "
LOCKED = f"import threading; {SAYS}threading.Event().wait()"
SLEEPS = f"import time; {SAYS}time.sleep(1000)"
PAUSES = f"import signal; {SAYS}signal.pause()"
POLLS = f"import time; {SAYS}\nwhile True: time.sleep(0.001)"
READS = f"import socket; a, b = socket.socketpair(); {SAYS}b.recv(1)"
COMPUTES = f"{SAYS}\nwhile True: pass"
COMPILES = (  # as torch does, in a process of its own, for which the main thread waits in a lock
    "import subprocess, sys, threading\n"
    "child = subprocess.Popen([sys.executable, '-c', 'print(flush=True)\\nwhile True: pass'], stdout=subprocess.PIPE)\n"
    f"child.stdout.readline(); {SAYS}threading.Event().wait()"
)
ASKS = (  # a client of a service, in a thread, for which the main thread waits in a lock
    "import socket, threading\n"
    "a, b = socket.socketpair(); has_come = threading.Event()\n"
    f"threading.Thread(target=lambda: (b.recv(1), has_come.set()), daemon=True).start(); {SAYS}has_come.wait()"
)
ASKS_AGAIN = (  # the same, where the service has refused an answer for now
    "import threading, time\n"
    f"asking = threading.Thread(target=lambda: time.sleep(1000), daemon=True); asking.start(); {SAYS}asking.join()"
)
LISTENS = (  # as a rank does, for the pipe at which it is asked for its stacks
    "import os, sys, tempfile, threading\n"
    "path = tempfile.mkdtemp() + '/asked'; os.mkfifo(path)\n"
    f"threading.Thread(target=lambda: open(path), daemon=True).start(); {SAYS}threading.Event().wait()"
)


@contextlib.contextmanager
def running(program: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            for each in (*ProcessTree().below(process.pid), process.pid):
                subprocess.run(["kill", "-9", str(each)], check=False)


def has_settled(process: int) -> bool:
    """Return whether no thread of a process has been given a core for a moment."""
    before = threads_of(process)
    time.sleep(0.1)  # what they do meanwhile is the question
    return threads_of(process) == before


def looks(process: int, count: int = 12) -> list[bool]:
    """Return what so many looks say, between which the process has had the time to show what it does."""
    seen = Rest(process, 0.0)
    found = []
    for at in range(count):
        time.sleep(0.05)  # what it does meanwhile is the question
        found.append(seen.goes_on(0.05 * (at + 1)))
    return found


@pytest.mark.parametrize("program", [LOCKED, PAUSES, LISTENS])
def test_one_that_waits_for_nobody_rests_from_the_second_look_on(program: str) -> None:
    with running(program) as process:
        wait_until(lambda: state_of(process) == ASLEEP and has_settled(process))
        assert all(looks(process)[2:]), "the first look, or one more until it has come to its wait, may see it move"


@pytest.mark.parametrize("program", [POLLS, READS, COMPUTES, COMPILES, ASKS, SLEEPS, ASKS_AGAIN])
def test_one_for_whom_somebody_may_be_at_work_does_not_rest(program: str) -> None:
    with running(program) as process:
        found = looks(process)
        assert not any(found[at] and found[at + 1] for at in range(len(found) - 1)), found


def view(threads: list[ThreadSeen], cpu: float = 0.0) -> SystemView:
    return SystemView(lambda _: threads, lambda _: cpu, lambda _: "futex_do_wait", lambda _: "S", lambda _: [])


def test_one_that_wants_a_core_and_gets_none_does_not_rest() -> None:
    """On a loaded machine: a thread of a backward pass has the work, and the main one sleeps until it is done."""
    threads = [ThreadSeen(1, "S", 5), ThreadSeen(2, "R", 9)]
    seen = Rest(1, 0.0, view(threads))
    assert [seen.goes_on(at) for at in (0.2, 0.4, 0.6)] == [False, False, False]
    seen.view = view([ThreadSeen(1, "S", 5), ThreadSeen(2, "S", 9)])
    assert seen.goes_on(0.8)
    seen.view = view([ThreadSeen(1, "S", 5), ThreadSeen(2, "D", 9)])
    assert not seen.goes_on(1.0), "it waits for a disk"


def test_one_that_was_asked_for_its_stacks_is_woken_by_that_and_rests_on() -> None:
    seen = Rest(1, 0.0, view([ThreadSeen(1, "S", 5)]))
    assert [seen.goes_on(0.2), seen.goes_on(0.4)] == [False, True]
    seen.view = view([ThreadSeen(1, "S", 6)])
    assert seen.goes_on(0.6, has_settled=True)
    seen.view = view([ThreadSeen(1, "S", 7)])
    assert not seen.goes_on(0.8)
    seen.view = view([ThreadSeen(1, "S", 7)], cpu=10 * rest.TICK_SECONDS)
    assert not seen.goes_on(1.0, has_settled=True), "it computes"


def test_a_thread_that_has_long_waited_for_messages_asks_nobody_for_this_step() -> None:
    """As that of torch's pool of compilers does, at the end of a pipe, from the first compilation on."""
    with running(ASKS) as process:
        wait_until(lambda: has_settled(process) and len(threads_of(process)) == 2)
        usual, step = UsualThreads(), 2 * USUAL_SECONDS
        assert not usual.of(process)
        usual.note(process, 0.0)
        assert not usual.of(process), "what is so now may have begun a moment ago"
        usual.note(process, 0.5 * USUAL_SECONDS)
        usual.note(process, step)
        seen = Rest(process, step, usual=usual.of(process))
        assert [seen.goes_on(step + 0.2 * at) for at in range(4)][1:] == [True] * 3


@pytest.mark.parametrize(("name", "is_at_rest"), [("gloo_tcp_loop", True), ("pt_autograd_0", False)])
def test_threads_that_listen_all_the_time_are_known_by_their_names(name: str, is_at_rest: bool) -> None:
    threads = [ThreadSeen(1, "S", 5), ThreadSeen(2, "S", 9, name)]
    seen = Rest(1, 0.0, replace(view(threads), sleeps_in=lambda number: "futex_do_wait" if number == 1 else "do_poll"))
    assert [seen.goes_on(0.2), seen.goes_on(0.4)] == [False, is_at_rest]


def test_what_is_under_way_between_processes_is_counted_until_it_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            assert queued_bytes([os.getpid()]) == 0
            ours.sendall(b"12345")
            wait_until(lambda: queued_bytes([os.getpid()]) == 5)
            theirs.recv(5)
            wait_until(lambda: queued_bytes([os.getpid()]) == 0)
    assert queued_bytes([2**31 - 1]) is None, "of a process that is not there nobody knows it"
