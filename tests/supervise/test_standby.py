"""A standby that is alive and says nothing, as one that was stopped, is ended: nobody waits for it."""

from __future__ import annotations

import errno
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runs import is_running, wait_until

from paceline.errors import PacelineError
from paceline.lock import take, try_lock
from paceline.supervise import lines as lines_module
from paceline.supervise import standby as standby_module
from paceline.supervise import starting
from paceline.supervise.again.machines import OneMachine
from paceline.supervise.control import Control
from paceline.supervise.crew import Crew
from paceline.supervise.lines import Lines
from paceline.supervise.signals import forward_signals
from paceline.supervise.standby import Standby
from paceline.supervise.starting import Starter

# Forks as a standby does, and then stops itself: before it answers, or before it tells of an end.
STOPS = """
import os, signal, socket, sys, time
from paceline.supervise.lines import Lines

lines = Lines(socket.socket(fileno=int(sys.argv[1])))
lines.send({"because": ""})
lines.take()
if sys.argv[2] == "early":
    os.kill(os.getpid(), signal.SIGSTOP)
child = os.fork()
if child == 0:
    time.sleep(0.2)
    os._exit(3)
lines.send({"forked": child})
os.kill(os.getpid(), signal.SIGSTOP)
"""


# Forks and tells as a standby does, and is gone half a minute after it has told of an end: no test waits for ever.
TELLS = """
import os, signal, socket, sys, time
from paceline.supervise.lines import Lines

signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
lines = Lines(socket.socket(fileno=int(sys.argv[1])))
lines.send({"because": ""})
while (asked := lines.take(30.0)) is not None:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    child = os.fork()
    if child == 0:
        if sys.argv[2] == "runs":
            signal.pause()
        while not os.path.exists(os.environ["MAY_END"]):
            time.sleep(0.01)
        os._exit(3)
    lines.send({"forked": child})
    if sys.argv[2] == "ends":
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        lines.send({"ended": child, "code": 3})
"""


@pytest.mark.parametrize("kind", ["ends", "runs"])
def test_a_signal_that_is_passed_on_takes_no_word_from_who_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A handler asked how ranks stood, and read the end that its thread was about to read, or the number of a fork."""
    (tmp_path / "standby_that_tells.py").write_text(TELLS)
    path, may_end = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]), tmp_path / "may-end"
    standby = Standby("standby_that_tells", kind, {**os.environ, "PYTHONPATH": path, "MAY_END": str(may_end)})
    standby.forks([kind], os.environ)
    assert standby.is_ready()
    crew = Crew([standby.start({"RANK": "0"})])
    flag = forward_signals(crew.send)
    real, raised = lines_module.is_ready, list[int]()

    def is_ready(end: Any, event: int, timeout_seconds: float | None) -> bool:
        found = real(end, event, timeout_seconds)
        if found and not raised:  # what has come is not read yet
            raised.append(1)
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(lines_module, "is_ready", is_ready)
    may_end.touch()  # not before: the word of the end came with that of the fork, and was read with it
    try:
        if kind == "ends":
            wait_until(lambda: crew.processes[0].poll() is not None)
            assert crew.processes[0].poll() == 3 and not standby.because
        else:
            second = standby.start({"RANK": "1"})
            assert is_running(second.pid)
            wait_until(lambda: not is_running(crew.processes[0].pid))  # which was told to end
        assert raised and flag.because == "received SIGTERM"
    finally:
        flag.release()
        standby.close()


# Begins before there is a lock, forks once, and leaves what its fork knows of the lock.
HOLDS = """
import os, signal, socket, sys
from pathlib import Path
from paceline.session.standby import with_lock_here
from paceline.supervise.lines import Lines

lines = Lines(socket.socket(fileno=int(sys.argv[1])), takes_descriptors=True)
lines.send({"because": ""})
assert lines.take() == {"lock": True}
environ = with_lock_here(lines.take()["fork"], lines.descriptors)
child = os.fork()
if child == 0:
    Path(sys.argv[2]).write_text(environ["PACELINE_LOCK"])
    signal.pause()
lines.send({"forked": child})
lines.take()
"""


def test_a_standby_that_began_before_the_lock_was_taken_holds_it_and_so_do_its_ranks(tmp_path: Path) -> None:
    (tmp_path / "standby_that_holds.py").write_text(HOLDS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    standby = Standby("standby_that_holds", str(tmp_path / "told"), {**os.environ, "PYTHONPATH": path})
    (tmp_path / "run").mkdir()  # else it goes with its lock
    lock = take(tmp_path / "run")
    os.dup2(lock.descriptor, 100)
    kept, lock.descriptor = lock.descriptor, 100  # a number that the other process has not
    standby.forks([], {})
    standby.hold(lock)
    assert standby.is_ready()
    rank = standby.start({"RANK": "0"})
    wait_until(lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text())
    number, token, generation = (tmp_path / "told").read_text().split(":")
    assert number != "100" and (token, generation) == (lock.token, "1")
    assert Path(f"/proc/{rank.pid}/fd/{number}").resolve() == tmp_path / "run" / "lock"
    os.close(100)
    lock.descriptor = kept
    lock.release()
    with (tmp_path / "run" / "lock").open() as file:
        assert try_lock(file.fileno()) is False, "the rank lives"
        standby.close()
        wait_until(lambda: not is_running(rank.pid))
        assert try_lock(file.fileno()) is True


@pytest.fixture
def stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes a standby that stops, early or late."""
    (tmp_path / "standby_that_stops.py").write_text(STOPS)
    monkeypatch.setattr(standby_module, "FORK_SECONDS", 0.5)
    monkeypatch.setattr(standby_module, "TELL_SECONDS", 0.5)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def make(kind: str) -> Standby:
        made = Standby("standby_that_stops", kind, {**os.environ, "PYTHONPATH": path})
        made.forks([kind], os.environ)
        assert made.is_ready()
        return made

    return make


def test_an_end_that_a_stopped_standby_does_not_tell_is_seen(stops: Any) -> None:
    """The supervisor waited for its word for ever, and the run stood still."""
    standby = stops("late")
    rank = standby.start({"RANK": "0"})
    wait_until(lambda: rank.poll() is not None)
    assert rank.poll() == -9 and "says nothing any more" in standby.because and not standby.is_ready()
    rank.wait()
    standby.close()
    assert not is_running(rank.pid)


def test_a_stopped_standby_that_forks_nothing_has_a_successor(stops: Any) -> None:
    said, made = list[str](), list[Standby]()

    def cold(place: dict[str, str]) -> Any:
        return "a process of its own"

    def again() -> Standby:
        made.append(stops("late"))
        return made[-1]

    first = stops("early")
    first.has_forked = True  # ranks of a world before
    starter = Starter(cold, first, said.append, again=again)
    assert starter({"RANK": "0"}) == "a process of its own", "the one that waited for it"
    assert len(made) == 1 and "another one imports torch" in said[0]
    rank: Any = starter({"RANK": "1"})
    assert rank.pid and starter.rung() == "standby"
    starter.close()
    wait_until(lambda: not is_running(rank.pid))


def test_a_process_that_cannot_be_had_for_a_moment_is_tried_again_and_then_the_run_wants_to_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of the system ended a run as a defect, with code 1, when a rank was to be replaced."""
    tried = list[int]()

    def scarce(place: dict[str, str]) -> Any:
        tried.append(1)
        if len(tried) != 3:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return "a process"

    starter = Starter(scarce, None, print)
    assert starter({"RANK": "1"}) == "a process" and len(tried) == 3
    monkeypatch.setattr(starting, "START_SECONDS", 0.0)
    with pytest.raises(PacelineError, match="rank 1 of a run could not be started") as raised:
        starter({"RANK": "1"})
    assert raised.value.exit_code == 75


def test_a_process_that_can_never_be_had_is_not_waited_for() -> None:
    """A program that is missing is missing the next time too: to be started again for it (75) would go on for ever."""
    tried = list[int]()

    def missing(place: dict[str, str]) -> Any:
        tried.append(1)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "python")

    with pytest.raises(FileNotFoundError):
        Starter(missing, None, print)({"RANK": "1"})
    assert len(tried) == 1


def test_a_word_for_which_a_disk_has_no_room_and_a_survivor_without_a_descriptor_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = OneMachine(Starter(lambda place: pytest.fail("nobody is started"), None, print), {})
    machine.word(tmp_path / "none", "abort")
    control = Control(tmp_path)
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(str(control.path))
        Lines(end).send({"rank": 1, "generation": 2, "held": {}})
        with monkeypatch.context() as patch:
            patch.setattr(
                socket.socket, "accept", lambda self: (_ for _ in ()).throw(OSError(errno.EMFILE, "too many"))
            )
            assert not control.look(2)
        assert list(control.look(2)) == [1]
    control.close()


def test_a_rank_may_have_the_number_of_one_that_was_collected() -> None:
    """Numbers of processes come round in a long run: it was taken for ended, as the one before, when it began."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        standby, there, number = object.__new__(Standby), Lines(theirs), 1 << 30
        standby._lines, standby._endings, standby._untold = Lines(ours), {}, {}
        standby._process, standby._is_closed = cast(Any, SimpleNamespace(pid=1)), False
        there.send({"forked": number})
        first = standby.start_apart([], {})
        there.send({"ended": number, "code": -9})
        assert first.wait() == -9
        there.send({"forked": number})
        assert standby.start_apart([], {}).poll() is None and first.poll() == -9
        assert not standby._endings
