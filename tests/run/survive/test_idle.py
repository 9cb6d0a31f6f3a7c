"""A run whose loop stands still is saved and ended; one that is busy is not, however long that takes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from runs import environment, records_of, steps_of

import paceline as library
from paceline.checkpoint import list_checkpoints
from paceline.errors import HandedBack, Requeue
from paceline.run.survive.idle import IdleWatch
from paceline.session import run as session_run
from paceline.supervise.signals import StopFlag


class FakeRun:
    """Notes why it was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def end(self, because: str) -> None:
        self.ended.append(because)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(clock: Clock, is_prompt: bool = True) -> tuple[FakeRun, IdleWatch]:
    run = FakeRun()
    return run, IdleWatch(60.0, run.end, is_prompt, StopFlag(), clock)


def looks_beside(watch: IdleWatch) -> bool:
    """Return what a look tells in another thread, as the watch's own is."""
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(watch.look()))
    thread.start()
    thread.join()
    return told[0]


def test_the_limit_counts_from_the_last_time_the_run_was_busy() -> None:
    clock = Clock()
    run, watch = watched(clock)
    for _ in range(100):  # steps, each begun within the limit
        clock.now += 59.0
        assert not looks_beside(watch)
        with watch.busy():
            clock.now += 3600.0  # a step, or an evaluation, of an hour
            assert not looks_beside(watch)
    clock.now += 59.9
    assert not looks_beside(watch) and run.ended == []
    clock.now += 0.1
    assert looks_beside(watch) and run.ended == ["no step for 60 s, and run.idle_limit is 60 s"]
    with pytest.raises(HandedBack, match="no step for 60 s"), watch.busy():
        raise AssertionError("a run that was ended is not to go on")


def test_nobody_is_ended_after_the_end() -> None:
    clock = Clock()
    run, watch = watched(clock)
    watch.close()
    clock.now = 1e6
    assert watch.look() and run.ended == []
    run, watch = watched(clock)
    assert not watch.look()
    del run
    assert watch.look(), "nobody uses that run any more"


def test_a_script_that_has_left_its_loop_does_something_else() -> None:
    clock = Clock()
    run, watch = watched(clock, is_prompt=False)
    clock.now += 1e6  # before the first batch
    assert not watch.look()
    with watch.busy():
        pass
    watch.left()
    clock.now += 1e6
    assert not watch.look() and run.ended == []
    with watch.busy():  # in a second loop over the run
        pass
    clock.now += 61
    assert watch.look() and len(run.ended) == 1
    with pytest.raises(Requeue), watch.busy():
        raise AssertionError("a run that was ended is not to go on")


SETTINGS: dict[str, Any] = {
    "name": "idle", "model": "llama-1m", "global_batch": "4 samples", "stop": "6 steps",
}  # fmt: skip


def make(folder: Path, **run: Any) -> Any:
    data = library.DataSpec("stdlib", seq_len=16, max_bytes=100_000)
    options = {"dir": str(folder / "run"), "checkpoint_every": "none", "evaluate_every": "none", **run}
    return library.Run(library.Task(data=data, **SETTINGS), cluster={"device": "cpu", "probe": False}, run=options)


def test_a_notebook_keeps_its_names_and_the_same_lines_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_run, "is_prompt", lambda: True)
    run = make(tmp_path, idle_limit="0.5 s")
    batches = iter(run)
    for _ in range(2):
        run.step(next(batches))
    batch = next(batches)
    ended = run._idle
    assert ended is not None and ended._closed.wait(60), "nobody has ended the run"
    with pytest.raises(HandedBack, match="make the run again"):
        run.step(batch)
    for use in (lambda: next(iter(run)), run.save, run.evaluate, lambda: run.model, lambda: run.optimizer):
        with pytest.raises(HandedBack):
            use()
    (stop,) = [each for each in records_of(tmp_path / "run", "decision") if each["what"] == "stop"]
    assert "run.idle_limit" in stop["because"] and stop["evidence"]["step"] == 2
    assert [record["status"] for record in records_of(tmp_path / "run", "run_ended")] == ["requeue"]
    assert [each.path.name for each in list_checkpoints(tmp_path / "run" / "checkpoints").complete] == ["step-00000002"]
    again = make(tmp_path)  # the lock is free
    for batch in again:
        again.step(batch)
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.deep
def test_a_prompt_that_has_left_the_loop_is_idle_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_run, "is_prompt", lambda: True)
    run = make(tmp_path, idle_limit="0.5 s")
    for batch in run:
        run.step(batch)
        if batch.step == 2:
            break
    assert run._idle is not None and run._idle._closed.wait(60), "nobody has ended the run"
    (stop,) = [each for each in records_of(tmp_path / "run", "decision") if each["what"] == "stop"]
    assert stop["evidence"]["step"] == 2 and stop["evidence"]["checkpoint"].endswith("step-00000002")
    make(tmp_path).close()  # the lock is free


def test_a_loop_that_waits_for_a_key_is_ended_with_75(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys, paceline
data = paceline.DataSpec("stdlib", seq_len=16, max_bytes=100_000)
task = paceline.Task(data=data, **{SETTINGS!r})
run = paceline.Run(task, cluster={{"device": "cpu", "probe": False}},
                   run={{"dir": {str(tmp_path / "run")!r}, "idle_limit": "1 s", "checkpoint_every": "none"}})
for batch in run:
    if batch.step == 3:
        print("waiting", flush=True)
        sys.stdin.read()
    run.step(batch)
""")
    with subprocess.Popen([sys.executable, str(script)], env=environment(), stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        told = process.stdout.read()  # until it has ended: nobody presses a key
        errors = process.stderr.read()
        assert process.wait() == 75, told + errors
    assert "waiting" in told and "stop     no step for" in told, told + errors
    assert [step["step"] for step in steps_of(tmp_path / "run")] == [1, 2]
    (end,) = records_of(tmp_path / "run", "run_ended")
    assert (end["status"], end["step"], end["exit_code"]) == ("requeue", 2, 75)
    assert [each.path.name for each in list_checkpoints(tmp_path / "run" / "checkpoints").complete] == ["step-00000002"]
