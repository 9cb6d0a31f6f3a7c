"""Runs whose storage fails: warnings, then exit code 74, words and no traceback, and nothing that was saved is lost."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from runs import paceline, records_of, steps_of, write_spec

from paceline.checkpoint import list_checkpoints, verify_checkpoint

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


def test_a_journal_that_cannot_be_written_ends_the_run(folder: Path) -> None:
    def tiny() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    run_dir = folder / "journal"
    spec = write_spec(folder, run_dir, steps=200)
    ready = paceline("train", spec, "--steps", "1", "--run-dir", folder / "warm")  # tokens and probe are cached
    assert ready.returncode == 0, ready.stderr
    failed = paceline("train", spec, preexec_fn=tiny)
    assert failed.returncode == 74, failed.stderr
    assert_told(failed.stderr)
    assert "cannot append to" in failed.stderr
