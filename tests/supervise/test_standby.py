"""A standby that is alive and says nothing, as one that was stopped, is ended: nobody waits for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from runs import is_running, wait_until

from paceline.supervise import standby as standby_module
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
