"""A run whose output nobody reads, as in a terminal that is stopped, trains, recovers and ends as any other."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import ranks_of, records_of, start, wait_for_step, wait_until, write_spec

LONG = 100_000
SMALL_PIPE = 4096  # bytes: some fifty lines of steps fill it


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have pipes of processes that are started hold little."""
    real = os.pipe

    def small() -> tuple[int, int]:
        ends = real()
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, SMALL_PIPE)
        return ends

    monkeypatch.setattr(os, "pipe", small)
    yield


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    return process.communicate(timeout=120)


def test_a_rank_that_is_killed_is_recovered_from_though_nobody_reads_what_is_printed(
    tmp_path: Path, unread: None
) -> None:
    run_dir = tmp_path / "unread"
    process = start("train", write_spec(tmp_path, run_dir, 2, "dp_replicate = 2", steps=LONG))
    wait_for_step(run_dir, 200, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    wait_until(lambda: bool(records_of(run_dir, "recovery")))
    wait_for_step(run_dir, max(record["step"] for record in records_of(run_dir, "step")) + 100, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ended(process)
    assert process.returncode == 75, stderr
    assert "recover  rank 1 of 2" in stdout and "stop     received SIGTERM" in stdout, stdout[-2000:]


def test_one_device_trains_on_though_nobody_reads_what_is_printed(tmp_path: Path, unread: None) -> None:
    run_dir = tmp_path / "alone"
    process = start("train", write_spec(tmp_path, run_dir, 1, steps=LONG))
    wait_for_step(run_dir, 200, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ended(process)
    assert process.returncode == 75, stderr
    assert "stop     received SIGTERM" in stdout
