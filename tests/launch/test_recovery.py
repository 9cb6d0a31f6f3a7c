"""Runs whose processes are killed go on by themselves in the same call, and compute what an undisturbed run does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import runs
from rounding import assert_curves_close
from runs import (
    ending,
    is_forked,
    is_running,
    paceline,
    ranks_of,
    records_of,
    start,
    steps_of,
    wait_for_step,
    wait_until,
    write_spec,
)

from paceline.account.ledger import ledger_of
from paceline.account.timeline import held_devices
from paceline.history.records import gather
from paceline.run.loop.resume import RANKS_MEMORY
from paceline.spec.journal.reading import read_journal

LAYOUT = "dp_shard = 2"
STEPS = 16
LONG = 100_000  # steps of a run that is stopped when it has shown what it is to show, however slow the machine is


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recovery")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    run_dir = folder / "undisturbed"
    ended = paceline("train", write_spec(folder, run_dir, 2, LAYOUT, steps=STEPS))
    assert ended.returncode == 0, ended.stderr
    return run_dir


def told(run_dir: Path) -> list[tuple[float, list[int]]]:
    return [(record["loss"], record["sample_ids"]) for record in steps_of(run_dir)]


def stopped_after(process: subprocess.Popen[str], run_dir: Path) -> str:
    """Stop a run that has recovered once and made the steps that are compared; return what it has printed."""
    wait_until(lambda: bool(records_of(run_dir, "recovery")) or process.poll() is not None)
    wait_for_step(run_dir, STEPS, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ending(process, 120)
    assert process.returncode == 75, stderr
    return stdout


def changes(*options: str) -> list[str]:
    return [word for option in options for word in ("--set", option)]


COLD = changes("run.recovery.standby=false", "run.recovery.reform=false")


STANDBY = changes("run.recovery.reform=false")


@pytest.mark.parametrize(
    ("rank", "rung", "options"),
    [
        (0, "standby", STANDBY),
        (1, "restart", COLD),
        pytest.param(0, "reform", [], marks=pytest.mark.deep),
        (1, "reform", []),
    ],
)
def test_a_killed_rank_costs_steps_since_the_checkpoint_and_nothing_else(
    folder: Path, undisturbed: Path, rank: int, rung: str, options: list[str]
) -> None:
    run_dir = folder / f"killed-{rank}-{rung}"
    process = start("train", write_spec(folder, run_dir, 2, LAYOUT, steps=LONG), *options)
    wait_for_step(run_dir, 6, process)
    before = ranks_of(process.pid)
    os.kill(before[rank], signal.SIGKILL)
    stdout = stopped_after(process, run_dir)
    assert told(run_dir)[:STEPS] == told(undisturbed), "bit for bit, every sample once"
    assert not any(map(is_running, before.values()))
    faults = records_of(run_dir, "fault")
    saves = [each for each in faults if each["what"].startswith("the save of step")]
    assert all("a process of the run has ended" in each["because"] for each in saves), "killed as it saved"
    (fault,) = (each for each in faults if each not in saves)
    assert f"rank {rank} of 2 was ended by SIGKILL" in fault["what"] and fault["attempt"] == 1
    (recovery,), starts = records_of(run_dir, "recovery"), records_of(run_dir, "run_started")
    assert (recovery["generation"], recovery["rung"], recovery["rank"]) == (2, rung, rank)
    assert (recovery["from_world"], recovery["to_world"], recovery["attempt"]) == (2, 2, len(starts))
    assert len(starts) == (1 if rung == "reform" and rank == 1 else 2), "rank 0's process writes one start"
    assert recovery["step"] % 4 == 0 and recovery["steps_lost"] >= 6 - recovery["step"]
    parts = {name: seconds for name, seconds in recovery["seconds"].items() if name != "total"}
    assert set(parts) == {"detect", "end", "start", "restore", "step"} and min(parts.values()) >= 0
    assert recovery["seconds"]["total"] == pytest.approx(sum(parts.values()))
    assert f"recover  generation 2 by {rung} (1 of run.recovery.preemption_retries = 100)" in stdout
    assert [end["status"] for end in records_of(run_dir, "run_ended")] == ["requeue"]


BROKEN = """
import os

from paceline.task.objective import next_token

calls = [0]


def broken(model, batch):
    calls[0] += model.training
    if os.environ.get("RANK") == "1" and calls[0] > 5:
        raise LookupError("the sixth pass of a process")
    return next_token(model, batch)
"""


def test_a_crash_that_comes_again_in_the_same_step_is_not_met_a_third_time(folder: Path) -> None:
    """Each process fails in its sixth pass, and without a checkpoint that is step 6 each time."""
    run_dir = folder / "crash"
    (folder / "crash.py").write_text(BROKEN)
    spec = write_spec(folder, run_dir, 2, f"{LAYOUT}\nmicro_batch = 7", steps=STEPS)
    ended = paceline("train", spec, *changes("task.objective=crash:broken", "run.checkpoint_every=none"), *COLD)
    assert ended.returncode == 1, ended.stderr
    assert "it has failed twice in the step after 5, at the same place" in ended.stderr
    assert ended.stderr.count("LookupError: the sixth pass") == 2, "in the traceback, and last as the error"
    assert ended.stdout.count("recover  generation") == 1
    assert len(records_of(run_dir, "run_started")) == 2 and len(records_of(run_dir, "fault")) == 2
    (end,) = records_of(run_dir, "run_ended")
    assert (end["status"], end["exit_code"], end["error"]["rank"]) == ("failed", 1, 1)


@pytest.mark.deep
def test_a_crash_that_moves_on_is_survived_as_often_as_the_budget_says(folder: Path, undisturbed: Path) -> None:
    """As above with a checkpoint after every fourth step: step 6, then 10, then 14."""
    run_dir = folder / "moving"
    (folder / "crash.py").write_text(BROKEN)
    spec = write_spec(folder, run_dir, 2, f"{LAYOUT}\nmicro_batch = 7", steps=STEPS)
    options = changes("task.objective=crash:broken", "run.recovery.retries=2")
    ended = paceline("train", spec, *options, *COLD)
    assert ended.returncode == 1 and "run.recovery.retries = 2 is used up" in ended.stderr, ended.stderr
    assert [record["step"] for record in records_of(run_dir, "recovery")] == [4, 8]
    again = paceline("train", spec, *options, *COLD)  # five steps are left
    assert again.returncode == 0, again.stderr
    assert told(run_dir) == told(undisturbed)


def test_without_retries_a_killed_rank_ends_the_run(folder: Path) -> None:
    run_dir = folder / "none"
    options = changes("run.recovery.retries=0", "run.recovery.preemption_retries=0")
    process = start("train", write_spec(folder, run_dir, 2, LAYOUT, steps=LONG), *options)
    wait_for_step(run_dir, 3, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    stdout, stderr = ending(process, 60)
    assert process.returncode == 137 and "SIGKILL" in stderr and "recover  " not in stdout
    assert [end["exit_code"] for end in records_of(run_dir, "run_ended")] == [137]


def test_a_stop_during_a_recovery_is_a_stop(folder: Path) -> None:
    """SIGTERM while the second generation starts: it is not started a third time, and nothing is left behind."""
    run_dir = folder / "stopped"
    process = start("train", write_spec(folder, run_dir, 2, LAYOUT, steps=LONG), *COLD)
    wait_for_step(run_dir, 5, process)
    first = ranks_of(process.pid)
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: len(set(ranks_of(process.pid).values()) - set(first.values())) == 2)
    second = ranks_of(process.pid)
    threads = "a supervisor has a thread that started/popen.py does not know: each rank of each test imports torch"
    assert all(map(is_forked, second.values())), threads
    process.send_signal(signal.SIGTERM)
    _, stderr = ending(process, 60)
    assert process.returncode in (75, 143), stderr
    assert not any(map(is_running, [*first.values(), *second.values()]))


COPIES = "dp_replicate = 3"


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.deep)])
def test_survivors_that_hold_a_whole_copy_lose_a_step_at_most_and_need_no_checkpoint(folder: Path, rank: int) -> None:
    straight = folder / "copies"
    if not straight.exists():
        ended = paceline("train", write_spec(folder, straight, 3, COPIES, steps=STEPS))
        assert ended.returncode == 0, ended.stderr
    run_dir = folder / f"copy-{rank}"
    options = changes("run.checkpoint_every=none")
    process = start("train", write_spec(folder, run_dir, 3, COPIES, steps=LONG), *options)
    wait_for_step(run_dir, 6, process)
    before = ranks_of(process.pid)
    os.kill(before[rank], signal.SIGKILL)
    wait_until(lambda: bool(records_of(run_dir, "recovery")) or process.poll() is not None)
    after = ranks_of(process.pid)
    stopped_after(process, run_dir)
    assert told(run_dir)[:STEPS] == told(straight), "bit for bit, every sample once"
    (recovery,) = records_of(run_dir, "recovery")
    assert recovery["rung"] == "reform" and recovery["step"] >= 5 and recovery["steps_lost"] <= 1
    assert recovery["resumed_from"] == RANKS_MEMORY
    assert sum(before[each] == after.get(each) for each in before) == 2, "two processes went on"


@pytest.fixture(scope="module")
def one_device(folder: Path) -> Path:
    run_dir = folder / "one"
    ended = paceline("train", runs.write_spec(folder, run_dir, 1, steps=STEPS, precision="fp64"))
    assert ended.returncode == 0, ended.stderr
    return run_dir


@pytest.mark.parametrize("layout", ["dp_replicate = 3", pytest.param("dp_shard = 3", marks=pytest.mark.deep)])
def test_a_lost_device_makes_the_world_smaller_and_one_that_is_back_larger(
    folder: Path, one_device: Path, layout: str
) -> None:
    """Three ranks, of which one is killed and its device gone; later the device is back. One experiment throughout."""
    run_dir, devices = folder / f"elastic-{layout[:6]}", folder / f"devices-{layout[:6]}"
    devices.write_text("3")
    options = changes(f"run.recovery.devices_file={devices}", "run.recovery.worth=none", f"task.stop={LONG} steps")
    process = start("train", runs.write_spec(folder, run_dir, 3, layout, precision="fp64"), *options)
    wait_for_step(run_dir, 5, process)
    seen = [(time.time(), len(ranks_of(process.pid)))]
    devices.write_text("2")
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    wait_until(lambda: len(records_of(run_dir, "recovery")) == 1 or process.poll() is not None)
    seen.append((time.time(), len(ranks_of(process.pid))))
    devices.write_text("3")
    wait_until(lambda: len(records_of(run_dir, "recovery")) == 2 or process.poll() is not None)
    wait_for_step(run_dir, STEPS, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ending(process, 120)
    assert process.returncode == 75, stderr + stdout
    smaller, larger = records_of(run_dir, "recovery")
    assert (smaller["from_world"], smaller["to_world"], smaller["rung"]) == (3, 2, "reform")
    assert (larger["from_world"], larger["to_world"], larger["rung"]) == (2, 3, "reform")
    assert larger["steps_lost"] == 0
    held = held_devices(gather(read_journal(run_dir)))
    assert [next(each.devices for each in held if each.ended >= moment) for moment, _ in seen] == [3, 2]
    assert [count for _, count in seen] == [3, 2], "what the ledger takes for devices are processes that lived"
    entries = ledger_of(read_journal(run_dir), "run")
    assert sum(e.device_seconds for e in entries) == pytest.approx(sum(h.seconds * h.devices for h in held), rel=0.01)
    replans = [record for record in records_of(run_dir, "decision") if record["what"] == "replan"]
    assert len(replans) == 2 and all("by forecast" in record["because"] for record in replans)
    found, expected = steps_of(run_dir), steps_of(one_device)
    assert [step["step"] for step in found] == list(range(1, len(found) + 1))
    ids = [step["sample_ids"] for step in found]
    assert ids[:STEPS] == [step["sample_ids"] for step in expected] and all(len(each) == 14 for each in ids)
    assert_curves_close([step["loss"] for step in found[:STEPS]], [step["loss"] for step in expected])


def held_by(pid: int) -> tuple[int, int]:
    """Return how many descriptors and threads a process has."""
    own = Path(f"/proc/{pid}")
    return len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.deep)])
def test_worlds_that_are_formed_again_and_again_leave_no_thread_and_no_descriptor(folder: Path, kills: int) -> None:
    """Not one more for each world; a few of them may be on their way out, so the last count has time."""
    run_dir = folder / f"often-{kills}"
    options = changes("run.checkpoint_every=none", "run.record_samples=false")
    process = start("train", write_spec(folder, run_dir, 3, COPIES, steps=LONG), *options)
    wait_for_step(run_dir, 2, process)
    survivor, counts = ranks_of(process.pid)[0], []
    for done in range(kills):
        os.kill(ranks_of(process.pid)[1 + done % 2], signal.SIGKILL)
        wait_until(lambda done=done: len(records_of(run_dir, "recovery")) > done or process.poll() is not None)
        wait_until(lambda: len(ranks_of(process.pid)) == 3)
        wait_for_step(run_dir, steps_of(run_dir)[-1]["step"] + 2, process)
        counts.append(held_by(survivor))
    worlds = kills - 2  # since the second, when all that is held throughout is there
    for what in (0, 1):
        wait_until(lambda what=what: held_by(survivor)[what] - counts[1][what] < worlds, 20)
    process.send_signal(signal.SIGTERM)
    _, stderr = ending(process, 120)
    assert process.returncode == 75, stderr
    assert {record["rung"] for record in records_of(run_dir, "recovery")} == {"reform"}


def test_the_process_that_forks_ranks_has_a_successor_where_it_is_killed(tmp_path: Path) -> None:
    """Each rank imported torch by itself from then on: 4.7 s of two cores for four of them, and 1.5 s for one."""
    run_dir = tmp_path / "forkless"
    process = start("train", write_spec(tmp_path, run_dir, 2, LAYOUT, steps=LONG))
    for count in (1, 2):
        wait_for_step(run_dir, STEPS * count, process)
        (standby,) = {runs.parent_of(rank) for rank in ranks_of(process.pid).values()}
        assert standby != process.pid
        os.kill(standby, signal.SIGKILL)
        wait_until(lambda count=count: len(records_of(run_dir, "recovery")) >= count or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ending(process, 120)
    assert process.returncode == 75, stderr
    assert [record["rung"] for record in records_of(run_dir, "recovery")] == ["standby", "standby"], stdout
    assert stdout.count("another one imports torch") == 2
