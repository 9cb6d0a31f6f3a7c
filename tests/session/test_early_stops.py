"""A signal to a command before any rank trains: it ends in order, says so, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import (
    ending,
    environment,
    is_running,
    parent_of,
    ranks_of,
    records_of,
    start,
    wait_for_step,
    wait_until,
    write_corpus,
    write_spec,
)
from started.popen import Warm

import paceline
from paceline.errors import Requeue
from paceline.scratch import LEAST_SECONDS, Scratch, clear_scratch
from paceline.supervise.blame import Outcome
from paceline.supervise.early import Terminated, requeued_early, terminated
from paceline.supervise.signals import StopFlag

ENDLESS = """
import os
import signal
from pathlib import Path

import torch.distributed as dist


def endless(model, batch):
    if dist.is_initialized() and type(model).__name__.startswith("FSDP"):
        (Path(os.environ["PIDS"]) / f"pid-{os.getpid()}").touch()
        while True:
            signal.pause()
    return model(batch["tokens"]).sum(), 1
"""


@pytest.mark.parametrize(
    ("verb", "number", "code", "said"),
    [
        ("train", signal.SIGTERM, 75, "received SIGTERM before the run began"),
        pytest.param("train", signal.SIGUSR1, 75, "received SIGUSR1 before", marks=pytest.mark.deep),
        pytest.param("train", signal.SIGINT, 130, "interrupted", marks=pytest.mark.deep),
        pytest.param("verify", signal.SIGTERM, 143, "", marks=pytest.mark.deep),
        pytest.param("verify", signal.SIGINT, 130, "interrupted", marks=pytest.mark.deep),
    ],
)
def test_a_signal_in_the_proof_ends_the_command_and_no_failed_proof_is_told_of(
    tmp_path: Path, verb: str, number: int, code: int, said: str
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    spec = write_spec(tmp_path, tmp_path / "run", 2, "dp_shard = 2")
    words = [sys.executable, "-m", "paceline", verb, str(spec), "--set", "task.objective=endless:endless",
             "--set", "run.verify=true"]  # fmt: skip
    environ = environment(PYTHONPATH=path, PIDS=str(tmp_path), TMPDIR=str(scratch))
    command = Warm(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2 or command.poll() is not None)
        ranks = [int(found.name.partition("-")[2]) for found in tmp_path.glob("pid-*")]
        assert len(ranks) == 2, command.communicate()
        assert list(scratch.glob("paceline.verify-*")), "what is looked at below is looked at in the right place"
        command.send_signal(number)
        _, stderr = ending(command, 120)
    finally:
        command.kill()
    assert command.returncode == code, stderr
    assert said in stderr and "Traceback" not in stderr and "error" not in stderr
    assert not any(is_running(rank) for rank in ranks)
    assert not list(scratch.glob("paceline.*"))


def test_a_signal_while_a_run_is_prepared_leaves_its_blocks_and_one_after_it_waits(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Requeue, match="75") as stopped, requeued_early(), Scratch("test") as folder:
        signal.raise_signal(signal.SIGTERM)
    assert "SIGTERM" in stopped.value.because and not Path(folder).exists()
    with requeued_early() as is_over:
        is_over()
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(Terminated) as ended, terminated():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(Requeue) as hung_up, requeued_early():
        signal.raise_signal(signal.SIGHUP)
    assert "SIGHUP" in hung_up.value.because
    assert signal.getsignal(signal.SIGTERM) is before, "and handlers are as they were"


def test_a_terminal_that_goes_stops_a_run_unless_the_signal_is_ignored_or_somebody_elses() -> None:
    heard: list[int] = []
    with requeued_early():
        flag = StopFlag().watch()  # in the place of the one that prepares the run
        signal.raise_signal(signal.SIGHUP)
        flag.release()
    assert flag.because == "received SIGHUP"
    for handler in (signal.SIG_IGN, lambda number, frame: heard.append(number)):
        before = signal.signal(signal.SIGHUP, handler)
        flag = StopFlag().watch()
        signal.raise_signal(signal.SIGHUP)
        flag.release()
        assert not flag.because and signal.signal(signal.SIGHUP, before) is handler
    assert heard == [signal.SIGHUP] and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_handler_of_somebody_else_stays(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with requeued_early():
            signal.raise_signal(signal.SIGTERM)
        with requeued_early():
            taken_over = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            assert taken_over is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, "taken over meanwhile"
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert heard == [signal.SIGTERM]


KILLED = """
import os, signal
from paceline.scratch import Scratch
kept = Scratch("test")
print(kept.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_leaves_goes_with_the_next_and_what_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = environment(TMPDIR=str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", KILLED], env=own, stdout=subprocess.PIPE, text=True, check=False)
    left = Path(killed.stdout.strip())
    (left / "file").touch()
    foreign = tmp_path / "paceline-of-an-older-version"
    foreign.mkdir()
    (tmp_path / "paceline.test-link").symlink_to(foreign)
    with Scratch("test") as name:
        assert left.is_dir(), "its ranks may still be saving"
        later = left.stat().st_mtime + LEAST_SECONDS + 1
        clear_scratch(tmp_path, later + 1e6)
        assert not left.exists() and Path(name).is_dir() and foreign.is_dir()
    assert not Path(name).exists()


def test_a_signal_to_every_process_of_a_run_is_one_stop(tmp_path: Path) -> None:
    """As systemd and Slurm stop what they have started. The process that forks ranks is one of them."""
    run_dir = tmp_path / "run"
    spec = write_spec(tmp_path, run_dir, 2, "dp_shard = 2", steps=100000)
    command = start("train", spec)
    try:
        wait_for_step(run_dir, 2, command)
        ranks = ranks_of(command.pid)
        (standby,) = {parent_of(rank) for rank in ranks.values()}
        assert Path(f"/proc/{standby}/comm").read_text().startswith("paceline-standb")
        for process in (standby, *ranks.values(), command.pid):
            os.kill(process, signal.SIGTERM)
        _, stderr = ending(command, 120)
    finally:
        command.kill()
    assert command.returncode == 75, stderr
    (ended,) = records_of(run_dir, "run_ended")
    assert ended["status"] == "requeue" and not records_of(run_dir, "fault")
    assert not any(is_running(process) for process in (standby, *ranks.values()))


def test_fit_that_is_stopped_before_its_first_record_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to make a report of."""
    monkeypatch.setattr("paceline.session.fit.trained", lambda spec: Outcome(Requeue.exit_code))
    task = paceline.Task(model="llama-1m", data=str(write_corpus(tmp_path)), stop="2 steps")
    with pytest.raises(Requeue):
        paceline.fit(task, cluster=1, run={"dir": str(tmp_path / "run")})
