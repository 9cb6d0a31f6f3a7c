"""Ranks that a signal has stopped and whose supervisor dies: none trains on, none stays, and the next start goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from orphanage import takes_orphans
from runs import (
    ending,
    is_running,
    parent_of,
    ranks_of,
    records_of,
    start,
    steps_of,
    wait_for_step,
    wait_until,
    write_spec,
)

LONG = 100_000  # steps of a run that is stopped when it has shown what it is to show


@pytest.mark.parametrize("stopped", [(1,), pytest.param((0, 1), marks=pytest.mark.deep)])
def test_ranks_that_are_stopped_end_though_their_supervisor_was_killed(
    tmp_path: Path, stopped: tuple[int, ...]
) -> None:
    """A peer wakes them; where all are stopped the next start does. They save what they have, and it goes on there."""
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, 2, "dp_shard = 2", steps=LONG)
    process = start("train", spec)
    wait_for_step(run_dir, 6, process)
    ranks = ranks_of(process.pid)
    for rank in stopped:
        os.kill(ranks[rank], signal.SIGSTOP)
    with takes_orphans():
        process.kill()
        process.communicate()
        wait_until(lambda: all(parent_of(rank) == os.getpid() for rank in ranks.values()))
    if len(stopped) < len(ranks):
        wait_until(lambda: not any(map(is_running, ranks.values())))
    process = start("train", spec)
    wait_until(lambda: len(records_of(run_dir, "run_started")) == 2 or process.poll() is not None)
    made = steps_of(run_dir)[-1]["step"]
    wait_for_step(run_dir, made + 2, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ending(process, 120)
    assert process.returncode == 75, stderr
    assert not any(map(is_running, ranks.values()))
    _, second = records_of(run_dir, "run_started")
    assert second["step"] >= 6, "saved when they were woken"
    assert (f"process {ranks[0]} of it is stopped by a signal, and is woken" in stdout) == (len(stopped) == len(ranks))
    steps = [step["step"] for step in steps_of(run_dir)]
    assert steps == list(range(1, len(steps) + 1))
