"""A run that is killed, stopped or moved to other machines goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
from pathlib import Path

import pytest
import runs
from rounding import assert_curves_close
from runs import as_json, ending, paceline, ranks_of, records_of, start, steps_of, wait_for_step, wait_until

write_spec = functools.partial(runs.write_spec, precision="fp64")  # losses of different layouts are compared
LAYOUTS = {1: "", 2: "dp_shard = 2"}
STEPS = 16
LONG = 100_000  # of a run that is ended before: with few steps it may be over before the test sees that it began


def curve(run_dir: Path) -> list[float]:
    return [record["loss"] for record in steps_of(run_dir)]


def samples(run_dir: Path) -> list[list[int]]:
    return [record["sample_ids"] for record in steps_of(run_dir)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[int, Path]:
    """Return run directories of an undisturbed run, by number of processes."""
    done = {}
    for devices, plan in LAYOUTS.items():
        done[devices] = folder / f"undisturbed-{devices}"
        ended = paceline("train", write_spec(folder, done[devices], devices, plan))
        assert ended.returncode == 0, ended.stderr
    return done


def test_layouts_read_the_same_samples_and_each_once(undisturbed: dict[int, Path]) -> None:
    one, two = samples(undisturbed[1]), samples(undisturbed[2])
    assert one == two
    assert len(one) == 16 and all(len(ids) == 14 for ids in one)
    assert_curves_close(curve(undisturbed[2]), curve(undisturbed[1]))
    positions = [(r["position_before"], r["position_after"]) for r in steps_of(undisturbed[1])]
    assert positions == [(14 * step, 14 * (step + 1)) for step in range(16)]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(2, 2, marks=pytest.mark.deep), (2, 1), pytest.param(1, 2, marks=pytest.mark.deep)],
)
def test_sigkill_at_a_random_step_then_start_again(
    folder: Path, undisturbed: dict[int, Path], before: int, after: int
) -> None:
    run_dir = folder / f"killed-{before}-{after}"
    process = start("train", write_spec(folder, run_dir, before, LAYOUTS[before], steps=LONG))
    wait_for_step(run_dir, random.Random(os.urandom(8)).randint(5, 11), process)
    wait_until(lambda: bool(records_of(run_dir, "checkpoint")))  # it is written beside the steps
    ranks = ranks_of(process.pid)
    os.killpg(process.pid, signal.SIGKILL)  # the supervisor; its ranks are told to stop by the system
    for rank in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    process.wait()
    wait_until_quiet(run_dir)
    steps = steps_beyond(run_dir)
    again = paceline("train", write_spec(folder, run_dir, after, LAYOUTS[after], steps=steps))
    assert again.returncode == 0, again.stderr
    assert "resume   step" in again.stdout
    assert [record["step"] for record in steps_of(run_dir)] == list(range(1, steps + 1))
    assert samples(run_dir)[:STEPS] == samples(undisturbed[1])
    if before == after:
        assert curve(run_dir)[:STEPS] == curve(undisturbed[after]), "bit for bit on the same layout"
    else:
        assert_curves_close(curve(run_dir)[:STEPS], curve(undisturbed[1]))
        notes = [r["because"] for r in records_of(run_dir, "decision") if r["what"] == "resume"]
        assert any("resharded" in note for note in notes)


def steps_beyond(run_dir: Path) -> int:
    """Return how many steps a run has once it goes on: those that are compared, and some that were not made yet."""
    return max(STEPS, steps_of(run_dir)[-1]["step"] + 2)


def wait_until_quiet(run_dir: Path) -> None:
    """Return when no process has a file of the run open."""
    for _ in range(3000):
        users = []
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if str(run_dir) in str(link.readlink()):
                    users.append(link)
            except OSError:
                continue
        if not users:
            return
    raise AssertionError(f"{run_dir} is still in use")


def test_a_killed_rank_ends_the_run_with_its_signal_and_a_report(folder: Path) -> None:
    run_dir = folder / "rank-killed"
    once = ("--set", "run.recovery.preemption_retries=0")
    process = start("train", write_spec(folder, run_dir, 2, "dp_replicate = 2", steps=5000), *once)
    wait_for_step(run_dir, 5, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, stderr = ending(process, 60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "SIGKILL" in stderr and "Traceback" not in stderr
    end = records_of(run_dir, "run_ended")[-1]
    assert (end["status"], end["exit_code"]) == ("failed", 137)
    assert (run_dir / "report.html").stat().st_size > 1000


@pytest.mark.parametrize(("rank", "layout"), [(1, "dp_replicate"), (0, "dp_shard")])
def test_a_rank_that_is_killed_as_it_saves_is_named_with_its_signal(folder: Path, rank: int, layout: str) -> None:
    """What its peer says of the lost connection is no cause, and the step that was made and written is no lost one."""
    run_dir = folder / f"killed-saving-{rank}"
    kill = ("--set", f'run.faults.each=[{{ kind = "kill", rank = {rank}, step = 4, phase = "save" }}]')
    once = ("--set", "run.recovery.preemption_retries=0")
    done = paceline("train", write_spec(folder, run_dir, 2, f"{layout} = 2", steps=8), *kill, *once)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert f"rank {rank} of 2 was ended by SIGKILL" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "gloo" not in done.stderr.lower()
    assert all(ord(letter) < 0x2600 for letter in done.stderr), "no pictures"
    assert steps_of(run_dir)[-1]["step"] == 4 and "step 4 did not finish" not in done.stderr
    assert records_of(run_dir, "run_ended")[-1]["exit_code"] == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.deep)])
def test_stop_signals_end_at_a_step_boundary_with_a_checkpoint(
    folder: Path, undisturbed: dict[int, Path], number: signal.Signals
) -> None:
    run_dir = folder / f"stopped-{number.name}"
    spec = write_spec(folder, run_dir, 2, LAYOUTS[2], steps=LONG)
    process = start("train", spec)
    wait_for_step(run_dir, 6, process)
    process.send_signal(number)
    stdout, stderr = ending(process, 60)
    assert process.returncode == 75, stderr
    assert f"received {number.name}" in stdout
    saved = records_of(run_dir, "checkpoint")[-1]
    assert saved["step"] == steps_of(run_dir)[-1]["step"], "nothing that was trained is lost"
    assert records_of(run_dir, "run_ended")[-1]["status"] == "requeue"
    assert paceline("train", spec, "--steps", steps_beyond(run_dir)).returncode == 0
    assert curve(run_dir)[:STEPS] == curve(undisturbed[2])


def test_a_time_limit_asks_to_be_queued_again(folder: Path) -> None:
    run_dir = folder / "limited"
    spec = write_spec(folder, run_dir, steps=100000)
    ended = paceline("train", spec, "--set", "run.time_limit=1 s")
    assert ended.returncode == 75, ended.stderr
    assert "time limit" in ended.stdout
    assert records_of(run_dir, "checkpoint")


def test_a_complete_run_is_not_trained_again(folder: Path, undisturbed: dict[int, Path]) -> None:
    before = curve(undisturbed[1])
    ended = paceline("train", write_spec(folder, undisturbed[1]), "--json")
    assert ended.returncode == 0, ended.stderr
    assert as_json(ended.stdout)["exit_code"] == 0
    assert curve(undisturbed[1]) == before


def test_more_steps_continue_a_complete_run(folder: Path) -> None:
    run_dir = folder / "longer"
    assert paceline("train", write_spec(folder, run_dir, steps=6)).returncode == 0
    ended = paceline("train", write_spec(folder, run_dir, steps=9))
    assert ended.returncode == 0, ended.stderr
    assert [r["step"] for r in steps_of(run_dir)] == list(range(1, 10))
    assert records_of(run_dir, "run_started")[-1]["step"] == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [("task.seed=8", "task.seed"), ("task.model.ffn=64", "task.model.ffn"),
     pytest.param("task.global_batch=15 samples", "task.global_batch", marks=pytest.mark.deep),
     pytest.param("task.optimizer.name=sgd", "task.optimizer.name", marks=pytest.mark.deep)],
)  # fmt: skip
def test_another_experiment_does_not_resume(
    folder: Path, undisturbed: dict[int, Path], change: str, named: str
) -> None:
    ended = paceline("train", write_spec(folder, undisturbed[1]), "--set", change)
    assert ended.returncode == 2
    assert f"{named} differs" in ended.stderr and "Traceback" not in ended.stderr


def test_keep_last_checkpoints(undisturbed: dict[int, Path]) -> None:
    kept = sorted(path.name for path in (undisturbed[2] / "checkpoints").iterdir())
    assert kept == ["step-00000008", "step-00000012", "step-00000016"]
