"""Ctrl-C while a checkpoint is written: once, twice, three times."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import paceline, records_of, write_spec

from paceline.checkpoint import list_checkpoints, verify_checkpoint

INTERRUPTS = """
import signal
import threading

from paceline.checkpoint import save
from paceline.supervise.signals import StopFlag
from paceline.task.objective import next_token

write_shard, calls, received, told = save.write_shard, [0], StopFlag._received, threading.Semaphore(0)


def hear(flag, number, frame):
    told.release()
    received(flag, number, frame)


def interrupt(times):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
        assert told.acquire(timeout=30)  # who waits for the save hears of each: of two in the same moment there is one


def interrupted(path, *arguments):
    if path.parent.name.startswith(".partial-step-0000000STEP-"):
        interrupt(TIMES)
    return write_shard(path, *arguments)


def objective(model, batch):
    calls[0] += model.training
    if calls[0] == ASKS_AT:
        interrupt(1)
    return next_token(model, batch)


save.write_shard, StopFlag._received = interrupted, hear
"""


@pytest.mark.parametrize(
    ("name", "asks_at", "step", "times", "code", "saved"),
    [
        ("once", 0, 8, 1, 75, [4, 8, 9]),  # the step after the save is where it stops
        pytest.param("twice", 0, 8, 2, 130, [4, 8], marks=pytest.mark.deep),
        pytest.param("thrice", 0, 8, 3, 130, [4], marks=pytest.mark.deep),
        ("twice, in the save that the first asked for", 5, 6, 1, 75, [4, 6]),
        ("thrice, in the save that the first asked for", 5, 6, 2, 130, [4]),
        pytest.param("twice, in the last save", 0, 9, 2, 0, [4, 8, 9], marks=pytest.mark.deep),
    ],
)
def test_an_interrupt_tears_no_checkpoint(
    tmp_path: Path, name: str, asks_at: int, step: int, times: int, code: int, saved: list[int]
) -> None:
    text = INTERRUPTS.replace("STEP", str(step)).replace("TIMES", str(times)).replace("ASKS_AT", str(asks_at))
    (tmp_path / "interrupts.py").write_text(text)
    run_dir = tmp_path / "run"
    devices = 2 if name == "twice" else 1
    steps = 9 if "last" in name else 16
    spec = write_spec(tmp_path, run_dir, devices, "micro_batch = 14" if devices == 1 else "dp_shard = 2", steps)
    ended = paceline(
        "train", spec, "--set", "task.objective=interrupts:objective", "--set", "run.checkpoints.asynchronous=off"
    )
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    listing = list_checkpoints(run_dir / "checkpoints")
    assert sorted(found.manifest.step for found in listing.complete) == saved and not listing.skipped
    assert [each["step"] for each in records_of(run_dir, "checkpoint")] == saved
    for found in listing.complete:
        verify_checkpoint(found.path)
    assert len(list((run_dir / "checkpoints").iterdir())) == len(saved), "no partial folder is left"
    assert records_of(run_dir, "run_ended")[-1]["exit_code"] == code
