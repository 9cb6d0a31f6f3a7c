"""The Python loop: as a plain script, under torchrun, in a prompt; with the user's own model, data set and loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rounding import assert_curves_close
from runs import environment, records_of, run_patiently, steps_of

from paceline.errors import ConfigError
from paceline.run.loop.loader import StepBatch

SCRIPT = '''
import sys
import torch
from torch import nn
import paceline


class Points(torch.utils.data.Dataset):
    """y = sin(3 x) with a little noise, drawn anew in every epoch: augmentation."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        x = torch.tensor([index / 25 - 1.0])
        return x, torch.sin(3 * x) + 0.01 * torch.randn(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.first, self.last = nn.Linear(1, 16), nn.Linear(16, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def squared_error(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).sum(), len(x)


task = paceline.Task(
    name="points",
    model=Net,
    data=Points(),
    objective=squared_error,
    optimizer=paceline.OptimizerSpec(lr=1e-2),
    global_batch="11 samples",
    stop="30 steps",
)
directory, plan, devices = sys.argv[1], sys.argv[2], int(sys.argv[3])
'''
LOOP = """
cluster = {"device": "cpu", "devices": devices, "probe": False}
run = paceline.Run(task, plan=plan, cluster=cluster, run={"dir": directory, "record_samples": True})
losses = []
for batch in run:
    stats = run.step(batch)
    losses.append(stats.loss)
# One write: the ranks share the terminal.
sys.stdout.write(f"rank {run.world.rank} of {run.world.size} ended at {len(losses)}\\n")
"""
FIT = """
cluster = {"device": "cpu", "devices": devices, "probe": False}
summary = paceline.fit(task, plan=plan, cluster=cluster, run={"dir": directory, "record_samples": True})
print("fit ended", summary.status)
"""


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in steps_of(run_dir)]


def script(folder: Path, ending: str) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT + ending)
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of the script on one device."""
    folder = tmp_path_factory.mktemp("python")
    ended = run([sys.executable, script(folder, LOOP), folder / "run", "precision=fp64", "1"])
    assert "rank 0 of 1 ended at 30" in ended.stdout
    curve = losses(folder / "run")
    assert curve[-1] < 0.6 * curve[0]
    return curve


def run(command: list[object], **options: object) -> subprocess.CompletedProcess[str]:
    ended = run_patiently(command, env=environment(), **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.mark.parametrize(
    "plan",
    [pytest.param("dp_replicate=2, precision=fp64", marks=pytest.mark.deep), "dp_shard=2, zero=3, precision=fp64"],
)
def test_a_plain_script_starts_itself_on_two_devices(tmp_path: Path, plan: str, reference: list[float]) -> None:
    ended = run([sys.executable, script(tmp_path, LOOP), tmp_path / "run", plan, "2"])
    assert "rank 0 of 2 ended at 30" in ended.stdout and "rank 1 of 2 ended at 30" in ended.stdout
    assert_curves_close(losses(tmp_path / "run"), reference)


def test_torchrun_runs_the_same_script(tmp_path: Path, reference: list[float]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = run([*torchrun, script(tmp_path, LOOP), tmp_path / "run", "dp_shard=2, precision=fp64", "0"])
    assert "rank 1 of 2 ended at 30" in ended.stdout
    assert_curves_close(losses(tmp_path / "run"), reference)
    assert records_of(tmp_path / "run", "run_started")[0]["world_size"] == 2


@pytest.mark.parametrize("devices", [pytest.param("1", marks=pytest.mark.deep), "2"])
def test_fit_at_a_prompt(tmp_path: Path, devices: str, reference: list[float]) -> None:
    # What is typed at a prompt exists in no file: classes and functions travel by value.
    text = "import sys\nsys.argv = ['', sys.argv[1], sys.argv[2], sys.argv[3]]\n" + SCRIPT + FIT
    ended = run([sys.executable, "-", tmp_path / "run", "precision=fp64", devices], input=text)
    assert "fit ended complete" in ended.stdout
    assert "equal to one device" in ended.stdout or devices == "1"
    assert_curves_close(losses(tmp_path / "run"), reference)
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.deep
def test_a_run_on_two_devices_at_a_prompt_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "-", tmp_path / "run", "auto", "2"]
    ended = run_patiently(command, input=SCRIPT + LOOP, env=environment())
    assert ended.returncode != 0
    assert "paceline.fit" in ended.stderr


@pytest.mark.deep
def test_forgetting_the_step_is_an_error(tmp_path: Path) -> None:
    loop = LOOP.replace("stats = run.step(batch)\n    losses.append(stats.loss)", "pass")
    ended = run_patiently([sys.executable, script(tmp_path, loop), tmp_path / "run", "auto", "1"], env=environment())
    assert ended.returncode != 0
    assert "did not call run.step(batch)" in ended.stderr


@pytest.mark.parametrize("use", ["x, y = batch", "x = batch[0]", 'x = batch["images"]'])
def test_taking_a_batch_apart_says_what_to_do(use: str) -> None:
    batch = StepBatch(1, 0, 1, ())
    with pytest.raises(ConfigError, match=r"batch\.micro_batches\[0\]\.data is a look"):
        exec(use, {"batch": batch})


def test_a_rate_that_the_loop_sets_is_told(tmp_path: Path) -> None:
    by_hand = "    run.optimizer.param_groups[0]['lr'] = 1e-9\n"
    loop = LOOP.replace("    losses.append(stats.loss)", f"{by_hand}    losses.append(stats.loss)")
    ended = run([sys.executable, script(tmp_path, loop), tmp_path / "run", "auto", "1"])
    assert ended.stdout.count("had the learning rate 1e-09") == 1
    assert [record["lr"] for record in steps_of(tmp_path / "run")][1] > 1e-4


def test_giving_a_batch_twice_is_an_error(tmp_path: Path) -> None:
    loop = LOOP.replace("    losses.append(stats.loss)", "    run.step(batch)")
    ended = run_patiently([sys.executable, script(tmp_path, loop), tmp_path / "run", "auto", "1"], env=environment())
    assert ended.returncode == 2
    assert "the batch of step 1 is not the next one" in ended.stderr and "step 2 comes next" in ended.stderr


def test_leaving_the_loop_early_is_recorded(tmp_path: Path) -> None:
    loop = LOOP.replace(
        "    losses.append(stats.loss)", "    losses.append(stats.loss)\n    if len(losses) == 5: break"
    )
    run([sys.executable, script(tmp_path, loop), tmp_path / "run", "auto", "1"])
    assert records_of(tmp_path / "run", "run_ended")[0]["status"] == "stopped"
    assert len(steps_of(tmp_path / "run")) == 5
