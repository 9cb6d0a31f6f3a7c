"""A run whose output nobody reads, as in a terminal that is stopped, trains, recovers and ends as any other."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import environment, is_running, ranks_of, records_of, start, wait_for_step, wait_until, write_spec

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


@pytest.mark.parametrize(("devices", "plan"), [(1, ""), (2, "dp_replicate = 2")])
def test_a_terminal_that_is_closed_stops_a_run_with_its_checkpoint(tmp_path: Path, devices: int, plan: str) -> None:
    """SIGHUP ended a run on one device at once, with nothing saved; what is printed on its way goes nowhere."""
    run_dir = tmp_path / "closed"
    words = [sys.executable, "-m", "paceline", "train", str(write_spec(tmp_path, run_dir, devices, plan, steps=LONG))]
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        words, stdin=terminal, stdout=terminal, stderr=terminal, env=environment(), text=True,
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(terminal)
    try:
        wait_for_step(run_dir, 3, process)
        ranks = ranks_of(process.pid)
        os.close(master)
        assert process.wait(120) == 75
    finally:
        process.kill()
    (end,) = records_of(run_dir, "run_ended")
    assert (end["status"], end["exit_code"]) == ("requeue", 75), end
    assert any((run_dir / "checkpoints").glob("step-*"))
    assert not any(is_running(rank) for rank in ranks.values())


def test_a_run_needs_no_standard_streams(tmp_path: Path) -> None:
    """Closed ones ended it before its first step, without a word; the next files that it opened had their numbers."""
    run_dir = tmp_path / "closed"
    words = [sys.executable, "-m", "paceline", "train", str(write_spec(tmp_path, run_dir, 1, steps=LONG))]
    process = subprocess.Popen(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *words], env=environment(), text=True)
    try:
        wait_for_step(run_dir, 2, process)
        opened = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in range(3)]
        assert opened == [os.devnull] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    finally:
        process.kill()
