"""Scripts of the Python loop: whoever trains has the proof, every run its own plan, and every end its reason."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import environment, is_running, records_of, run_patiently, steps_of, wait_for_step, wait_until
from started.popen import Warm

TASK = '''
import os
import sys
import time

import torch
from torch import nn

import paceline


class Points(torch.utils.data.Dataset):
    """y = sin(3 x) on 50 points."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        x = torch.tensor([index / 25 - 1.0])
        return x, torch.sin(3 * x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def squared_error(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).sum(), len(x)


def task_of(objective=squared_error, **changes):
    settings = {"name": "points", "data": Points(), "global_batch": "11 samples", "stop": "6 steps", **changes}
    return paceline.Task(model=Net, objective=objective, **settings)


folder = sys.argv[1]


def cluster(devices):
    return {"device": "cpu", "devices": devices, "probe": False, "learn": False}


def train(run):
    for batch in run:
        run.step(batch)
'''


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(TASK + text)
    return path


def run(folder: Path, text: str, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *before, str(write(folder, text)), str(folder), *arguments]
    return run_patiently(command, env=environment(), cwd=folder)


def end_of(run_dir: Path) -> dict[str, Any]:
    (end,) = records_of(run_dir, "run_ended")
    return end


TWO_RUNS = """
first = paceline.Run(task_of(), "dp_shard=2", cluster=cluster(2), run={"dir": folder + "/first"})
train(first)
changed = task_of(name="other", global_batch="9 samples", stop="3 steps")
second = paceline.Run(changed, "dp_replicate=2", cluster=cluster(2), run={"dir": folder + "/second"}, verify=False)
train(second)
sys.stdout.write(f"rank {second.world.rank} ended at {second.progress.step}\\n")
"""


def test_a_second_run_has_its_own_plan_and_both_their_proof_or_a_decision(tmp_path: Path) -> None:
    ended = run(tmp_path, TWO_RUNS)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rank 0 ended at 3" in ended.stdout and "rank 1 ended at 3" in ended.stdout
    first, second = (records_of(tmp_path / name, "run_started")[0] for name in ("first", "second"))
    assert first["plan"]["layout"]["dp_shard"] == 2 and second["plan"]["layout"]["dp_replicate"] == 2
    assert (first["plan"]["batch_samples"], second["plan"]["batch_samples"]) == (11, 9)
    assert (len(steps_of(tmp_path / "first")), len(steps_of(tmp_path / "second"))) == (6, 3)
    (proof,) = records_of(tmp_path / "first", "verify")
    assert proof["equal"] and not proof["cached"] and proof["differences"]["gradients"] < 1e-4
    assert ended.stdout.count("verify   equal to one device") == 1
    assert records_of(tmp_path / "second", "verify") == []
    (choice,) = [record for record in records_of(tmp_path / "second", "decision") if record["what"] == "verify"]
    assert choice["to"] == "no proof" and "run.verify = false" in choice["because"]


def test_torchrun_proves_once_for_all_ranks(tmp_path: Path) -> None:
    text = 'train(paceline.Run(task_of(), "dp_shard=2", cluster={"device": "cpu"}, run={"dir": folder + "/run"}))'
    ended = run(tmp_path, text, before=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("verify   equal to one device") == 1
    assert records_of(tmp_path / "run", "verify")[0]["equal"] and len(steps_of(tmp_path / "run")) == 6


WRONG = """
import torch.distributed as dist


def wrong(model, batch):
    loss, weight = squared_error(model, batch)
    return (2 * loss if dist.is_initialized() and type(model).__name__.startswith("FSDP") else loss), weight


try:
    train(paceline.Run(task_of(wrong), "dp_shard=2", cluster=cluster(int(sys.argv[2])), run={"dir": folder + "/run"}))
except paceline.PacelineError as error:
    sys.stdout.write(f"rank {os.environ.get('RANK')}: {error.exit_code} {error.what}\\n")
    raise
"""


@pytest.mark.parametrize("launcher", [pytest.param("", marks=pytest.mark.deep), "torchrun"])
def test_a_wrong_layout_ends_every_rank_with_code_4(tmp_path: Path, launcher: str) -> None:
    before = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2") if launcher else ()
    ended = run(tmp_path, WRONG, "0" if launcher else "2", before=before)
    assert "layout dp_shard=2 does not compute the numbers of one device" in ended.stdout, ended.stderr
    assert not (tmp_path / "run" / "journal").exists(), "no step was made"
    if launcher:
        assert ended.returncode != 0 and all(f"rank {rank}: 4 " in ended.stdout for rank in (0, 1))
    else:
        assert ended.returncode == 4


UNPICKLABLE = """
import threading

lock = threading.Lock()


def locked(model, batch):
    with lock:
        return squared_error(model, batch)


train(paceline.Run(task_of(locked), "dp_replicate=2", cluster=cluster(2), run={"dir": folder + "/run"}))
"""


@pytest.mark.deep
def test_a_task_that_no_other_process_can_have_trains_without_a_proof_on_record(tmp_path: Path) -> None:
    ended = run(tmp_path, UNPICKLABLE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (choice,) = [record for record in records_of(tmp_path / "run", "decision") if record["what"] == "verify"]
    assert choice["to"] == "no proof" and "cannot be handed to other processes" in choice["because"]
    assert "verify   not proven: the task cannot be handed" in ended.stdout


ENDINGS = """
def poisoned(model, batch):
    loss, weight = squared_error(model, batch)
    return loss * float("nan"), weight


run = {"dir": folder + "/run", "checkpoint_every": "2 steps", "time_limit": "2 h", "evaluate_every": "none"}
kind = sys.argv[2]
run = paceline.Run(task_of(poisoned if kind == "poison" else squared_error), cluster=cluster(1), run=run)
assert str(run.spec.run.checkpoint_every) == "2 steps" and run.spec.run.time_limit == 7200


def loop():
    for batch in run:
        stats = run.step(batch)
        if kind == "break" and stats.step == 3:
            break
        if kind == "return" and stats.step == 3:
            return
        if kind == "error" and stats.step == 3:
            {}["absent"]
        if kind == "chained" and stats.step == 3:
            raise ValueError("the user's own")


try:
    loop()
except ValueError as error:
    raise RuntimeError("while fitting") from error
if kind in ("break", "return"):
    [end] = [line for line in open(folder + "/run/journal/0001.jsonl") if '"run_ended"' in line]
    raise OSError("long after the loop")
"""


@pytest.mark.parametrize(
    ("kind", "code", "status", "says"),
    [
        ("poison", 6, "failed", "loss nan"),
        ("error", 1, "failed", "KeyError: 'absent'"),
        pytest.param("chained", 1, "failed", "RuntimeError: while fitting", marks=pytest.mark.deep),
        ("break", 1, "stopped", ""),
        pytest.param("return", 1, "stopped", "", marks=pytest.mark.deep),
    ],
)
def test_how_a_loop_ended_is_on_record(tmp_path: Path, kind: str, code: int, status: str, says: str) -> None:
    ended = run(tmp_path, ENDINGS, kind)
    assert ended.returncode == code, ended.stderr
    end = end_of(tmp_path / "run")
    assert end["status"] == status and end["step"] == (0 if kind == "poison" else 3)
    if says:
        assert says in end["error"]["what"]
    if kind in ("error", "chained"):
        assert end["exit_code"] == 1 and "script.py" in end["error"]["traceback"]
        (fault,) = records_of(tmp_path / "run", "fault")
        assert says in fault["what"]
    if kind == "chained":
        assert "the user's own" in end["error"]["traceback"]


IN_A_GROUP = """
import torch.distributed as dist
from paceline.errors import ConfigError
from paceline.session.uncaught import end_with_own_code
from paceline.uncaught import end_with_code

{"own": end_with_own_code, "any": end_with_code}[sys.argv[2]]()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise ConfigError("what was wrong")
"""


@pytest.mark.parametrize("kind", ["own", "any"])
def test_an_error_in_a_process_group_is_shown_and_has_its_code(tmp_path: Path, kind: str) -> None:
    """torch keeps what hooks print in a group until they return: of ranks without a supervisor nobody saw an error."""
    ended = run(tmp_path, IN_A_GROUP, kind)
    assert ended.returncode == 2 and "ConfigError: what was wrong" in ended.stderr, ended.stderr


ALONE = """
run = paceline.Run(task_of(data=(Points(), Points())), "dp_replicate=2", cluster=cluster(2),
                   run={"dir": folder + "/run"}, verify=False)
for batch in run:
    run.step(batch)
    if run.world.rank == int(sys.argv[2]) and batch.step == 2:
        getattr(run, sys.argv[3])()
"""


@pytest.mark.parametrize(("rank", "call"), [("0", "evaluate"), pytest.param("1", "save", marks=pytest.mark.deep)])
def test_a_call_that_one_rank_makes_alone_ends_the_run_with_both_ranks_named(
    tmp_path: Path, rank: str, call: str
) -> None:
    """Its peers took its numbers for those of their step: gloo ended rank after rank by SIGABRT, in four worlds."""
    ended = run(tmp_path, ALONE, rank, call)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    other = 1 - int(rank)
    assert f"rank {rank} called run.{call}() after step 2, and rank {other} did not\n" in ended.stderr
    assert f"rank {other} has begun step 3" in ended.stderr and "SIGABRT" not in ended.stdout + ended.stderr
    assert records_of(tmp_path / "run", "recovery") == [] and len(steps_of(tmp_path / "run")) == 2


JOINED = """
class Counts:
    def on_start(self, moment):
        return {"log": {"ranks": moment.sum([1.0])[0]}}


kill = {"kind": "kill", "rank": 1, "step": int(sys.argv[3]), "phase": sys.argv[2]}
task = task_of(data=(Points(), Points()), callbacks=[Counts])
run = paceline.Run(task, sys.argv[4], cluster=cluster(2), faults=[kill], verify=False,
                   run={"dir": folder + "/run", "checkpoint_every": "3 steps", "evaluate_every": "none"})
for batch in run:
    run.step(batch)
    run.evaluate()
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("axis", "phase", "step", "reached"),
    [
        ("dp_replicate", "forward", 3, 2),
        ("dp_replicate", "save", 3, 3),
        ("dp_replicate", "save", 6, 6),
        ("dp_shard", "forward", 6, 3),
    ],
)
def test_a_rank_that_comes_later_starts_with_its_peers_and_joins_what_their_loops_do(
    tmp_path: Path, axis: str, phase: str, step: int, reached: int
) -> None:
    """Its hook `on_start` met peers in their step. In a save: its peer has that step, and evaluates.

    A shard is lost with its rank: its peer makes steps 4 to 6 again in one call, and it evaluates between them.
    """
    ended = run(tmp_path, JOINED, phase, str(step), f"{axis}=2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run_dir = tmp_path / "run"
    assert ended.stdout.count("generation 2 by reform") == 1 and "generation 3" not in ended.stdout
    made_again = [4, 5] if reached == 3 and step == 6 else []
    evaluated = [each["step"] for each in records_of(run_dir, "evaluation")]
    assert evaluated == [1, 2, 3, *made_again, 4, 5, 6], "each once for each time that its step was made"
    starts = [(each["step"], each["values"]["ranks"]) for each in records_of(run_dir, "logged")]
    assert starts == [(0, 2.0), (reached, 2.0)]


ON_ONE_RANK = """
once = {"dir": folder + "/run", "recovery": {"retries": RETRIES}}
run = paceline.Run(task_of(), "dp_replicate=2", cluster=cluster(2), run=once, verify=False)
for batch in run:
    run.step(batch)
    if run.progress.step == 2 and run.world.rank == 1:
        raise LookupError("on rank 1 alone")
"""


def test_an_error_on_one_rank_is_the_runs_end(tmp_path: Path) -> None:
    ended = run(tmp_path, ON_ONE_RANK.replace("RETRIES", "0"))
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("LookupError: on rank 1 alone") >= 1 and "rank 1" in ended.stderr
    end = end_of(tmp_path / "run")
    assert end["status"] == "failed" and "LookupError: on rank 1 alone" in end["error"]["what"]
    assert "script.py" in end["error"]["traceback"] and end["error"]["rank"] == 1


@pytest.mark.deep
def test_an_error_on_one_rank_is_gone_on_from_where_it_does_not_come_back(tmp_path: Path) -> None:
    ended = run(tmp_path, ON_ONE_RANK.replace("RETRIES", "3"))
    assert ended.returncode == 0 and "recover  LookupError: on rank 1 alone" in ended.stdout, ended.stderr
    run_dir = tmp_path / "run"
    assert [each["what"] for each in records_of(run_dir, "fault")] == ["LookupError: on rank 1 alone"]
    assert [each["step"] for each in records_of(run_dir, "step")] == [1, 2, 3, 4, 5, 6], "each step once"


def test_a_run_over_more_devices_after_one_on_a_single_one_says_what_to_do(tmp_path: Path) -> None:
    text = """
for number, devices in enumerate((1, 1, 2)):
    settings = {"name": f"run {number}", "stop": f"{2 + number} steps"}
    train(paceline.Run(task_of(**settings), cluster=cluster(devices), run={"dir": f"{folder}/{number}"}))
"""
    ended = run(tmp_path, text)
    assert ended.returncode == 2 and "cannot follow one on a single device" in ended.stderr
    assert "paceline.fit" in ended.stderr and not (tmp_path / "2").exists()
    assert [len(steps_of(tmp_path / name)) for name in ("0", "1")] == [2, 3], "each with its own plan, in one process"
    assert all(end_of(tmp_path / name)["status"] == "complete" for name in ("0", "1"))


ENDLESS = """
open(f"{folder}/rank-{os.environ['RANK']}-{os.getpid()}", "w") if "RANK" in os.environ else None
run = paceline.Run(task_of(stop="1000000 steps"), "dp_shard=2", cluster=cluster(2),
                   run={"dir": folder + "/run", "checkpoint_every": "none"}, verify=False)
train(run)
"""


def test_ranks_of_a_script_end_with_their_supervisor(tmp_path: Path) -> None:
    """Killed without a word, as by the out-of-memory killer: the ranks save where they are and end."""
    command = [sys.executable, str(write(tmp_path, ENDLESS)), str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        script = Warm(command, env=environment(), cwd=tmp_path, stdout=log, stderr=log, text=True)
    try:
        wait_for_step(tmp_path / "run", 3, script)
        ranks = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("rank-*")]
        assert len(ranks) == 2 and all(map(is_running, ranks))
    finally:
        script.send_signal(signal.SIGKILL)
        script.wait()
    wait_until(lambda: not any(map(is_running, ranks)))
    end = end_of(tmp_path / "run")
    assert end["status"] == "requeue" and end["exit_code"] == 75
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


SEEN = """
import signal

run = paceline.Run(task_of(stop="12 steps"), "dp_replicate=2", cluster=cluster(2),
                   run={"dir": folder + "/run", "checkpoint_every": "4 steps"}, verify=False)
for batch in run:
    stats = run.step(batch)
    assert stats.step == batch.step == run.progress.step
    open(f"{folder}/seen-{os.getpid()}", "a").write(f"{stats.step} {run.world.rank}\\n")
    if stats.step == 7 and run.world.rank == int(sys.argv[2]) and not os.path.exists(f"{folder}/struck"):
        open(f"{folder}/struck", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("rank", "launcher"), [("0", ""), pytest.param("1", "", marks=pytest.mark.deep), ("1", "torchrun")]
)
def test_a_loop_sees_each_step_once_though_a_peer_dies(tmp_path: Path, rank: str, launcher: str) -> None:
    before = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2") if launcher else ()
    ended = run(tmp_path, SEEN, rank, before=before)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [step["step"] for step in steps_of(tmp_path / "run")] == list(range(1, 13))
    (recovery,) = records_of(tmp_path / "run", "recovery")
    assert recovery["rung"] == "reform" and recovery["step"] == 7
    seen = [[line.split() for line in path.read_text().splitlines()] for path in tmp_path.glob("seen-*")]
    assert sorted([int(lines[0][0]), int(lines[-1][0]), len(lines)] for lines in seen) == [[1, 7, 7], [1, 12, 12],
                                                                                         [8, 12, 5]]  # fmt: skip
