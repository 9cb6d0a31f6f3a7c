"""Runs whose storage fails: warnings, then exit code 74 or 75 and no traceback, and nothing that was saved is lost."""

from __future__ import annotations

import resource
import shutil
import sys
from pathlib import Path

import pytest
from runs import environment, paceline, records_of, run_patiently, steps_of, write_spec

from paceline.checkpoint import list_checkpoints, verify_checkpoint
from paceline.spec.journal.reading import read_journal

LIMIT_BYTES = 100_000  # above a journal, below a rank's part of a checkpoint


def disk_of_limited_size() -> None:
    """Have the kernel refuse to write any file beyond the limit, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, LIMIT_BYTES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


def assert_told(stderr: str) -> None:
    assert "error: " in stderr and "\n  because  " in stderr and "\n  try      " in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("place", ["a file", "unwritable", "below a file"])
def test_a_run_directory_that_cannot_be_written(folder: Path, place: str) -> None:
    (folder / "file").write_text("")
    run_dir = {"a file": folder / "file", "unwritable": Path("/proc/paceline"), "below a file": folder / "file" / "run"}
    ended = paceline("train", write_spec(folder, folder / "refused"), "--run-dir", run_dir[place])
    assert ended.returncode == 74, ended.stderr
    assert_told(ended.stderr)
    assert "cannot write to the run's directory" in ended.stderr
    assert not ended.stdout, "nothing is planned or computed before"


@pytest.mark.parametrize(("devices", "plan"), [pytest.param(1, "", marks=pytest.mark.deep), (2, "dp_shard = 2")])
def test_a_full_disk_loses_nothing_that_was_saved(folder: Path, devices: int, plan: str) -> None:
    run_dir = folder / f"full-{devices}"
    first = paceline("train", write_spec(folder, run_dir, devices, plan, steps=4))
    assert first.returncode == 0, first.stderr
    spec = write_spec(folder, run_dir, devices, plan, steps=10)
    failed = paceline("train", spec, preexec_fn=disk_of_limited_size)
    assert failed.returncode == 74, failed.stderr
    assert_told(failed.stderr)
    assert "warning  the checkpoint of step 8 was not saved" in failed.stdout, "training goes on without it"
    assert "step-00000004 is kept" in failed.stdout
    assert "the checkpoint of step 10 was not saved" in failed.stderr and "File too large" in failed.stderr
    root = run_dir / "checkpoints"
    assert [path.name for path in root.iterdir()] == ["step-00000004"], "no partial folder is left"
    (found,) = list_checkpoints(root).complete
    assert verify_checkpoint(found.path).step == 4
    end = records_of(run_dir, "run_ended")[-1]
    assert (end["status"], end["exit_code"], end["step"]) == ("failed", 74, 10)
    assert records_of(run_dir, "fault")
    again = paceline("train", spec)
    assert again.returncode == 0, again.stderr
    assert records_of(run_dir, "run_started")[-1]["step"] == 4
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, 11))
    assert (run_dir / "report.html").stat().st_size > 1000


def faults(folder: Path, steps: int) -> Path:
    """Write a plan of one fault: from step 6 on the journal cannot grow, for so many steps."""
    path = folder / f"faults-{steps}.toml"
    path.write_text(f'[[each]]\nkind = "journal_full"\nstep = 6\nrank = 0\nsteps = {steps}\n')
    return path


def test_a_journal_that_cannot_be_written_for_a_while_is_whole_in_the_end(folder: Path) -> None:
    run_dir = folder / "while"
    spec = write_spec(folder, run_dir, steps=20)
    more = ("--set", "run.checkpoint_every=none", "--set", "run.tensorboard=false")
    ended = paceline("train", spec, "--faults", faults(folder, 8), *more)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("warning  the journal") == 1 and "held in memory until" in ended.stdout
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, 21))
    times = [record["time"] for record in read_journal(run_dir)]
    assert times[1:] == sorted(times[1:]), "in order; the first record is made before the decisions that it follows"
    assert records_of(run_dir, "run_ended")[-1]["exit_code"] == 0
    (told,) = records_of(run_dir, "fault")
    assert "File too large" in told["because"]


def test_a_disk_that_is_full_for_good_ends_with_75_and_the_last_good_checkpoint(folder: Path) -> None:
    run_dir = folder / "for-good"
    spec = write_spec(folder, run_dir, steps=200)
    # Training waits for saves: one beside it may be under way still when the disk is full, two steps later.
    few = ("--set", "run.checkpoints.most_failures=2", "--set", "run.checkpoints.asynchronous=off")
    ended = paceline("train", spec, "--faults", faults(folder, 10_000), *few)
    assert ended.returncode == 75, ended.stderr
    assert "Traceback" not in ended.stderr
    last = "2 checkpoints in a row could not be saved; the last good one is "
    assert last in ended.stdout and str(run_dir / "checkpoints" / "step-00000004") in ended.stdout
    assert "records of the journal" in ended.stdout and "are lost" in ended.stdout
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, 6))
    again = paceline("train", spec, "--steps", "20")
    assert again.returncode == 0, again.stderr
    assert records_of(run_dir, "run_started")[-1]["step"] == 4
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, 21))


@pytest.mark.deep
def test_a_small_disk_of_its_own_that_the_run_fills(folder: Path) -> None:
    """A real file system, in a mount namespace that goes with the run."""
    inside = folder / "small"
    inside.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs {inside} && exec "$@"'
    small = ["unshare", "-m", "sh", "-c", mount, "sh"]
    if shutil.which("unshare") is None or run_patiently([*small, "true"]).returncode:
        pytest.skip("this machine lets us mount nothing")
    run_dir = inside / "run"
    spec = write_spec(folder, run_dir, steps=4000)
    few = ["--set", "run.checkpoints.most_failures=2", "--set", "run.keep_last=1"]
    words = [*small, sys.executable, "-m", "paceline", "train", spec, *few]
    ended = run_patiently(words, env=environment())
    assert ended.returncode == 75, ended.stderr
    assert "No space left on device" in ended.stdout and "the last good one is" in ended.stdout
    assert "Traceback" not in ended.stderr  # whether the journal or a checkpoint meets the end first is chance
