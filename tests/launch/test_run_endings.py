"""How runs end that are not stopped by their storage or data: numbers that stop, plans that do not fit, extras."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import environment, paceline, records_of, steps_of, write_spec

POISON = """
from paceline.task.objective import next_token

calls = [0]


def poisoned(model, batch):
    loss, weight = next_token(model, batch)
    calls[0] += model.training
    return (loss * float("nan") if calls[0] > CALLS else loss), weight
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endings")


@pytest.mark.parametrize(
    ("devices", "plan"), [(1, ""), pytest.param(2, "dp_replicate = 2", marks=pytest.mark.deep), (2, "dp_shard = 2")]
)
def test_a_loss_that_is_no_number_stops_the_run(folder: Path, devices: int, plan: str) -> None:
    run_dir = folder / f"poisoned-{devices}-{plan[:8].strip()}"
    micro_batches = 14 // devices // 7
    (folder / "poison.py").write_text(POISON.replace("CALLS", str(6 * micro_batches)))
    spec = write_spec(folder, run_dir, devices, f"{plan}\nmicro_batch = 7")
    ended = paceline("train", spec, "--set", "task.objective=poison:poisoned")
    assert ended.returncode == 6, ended.stderr
    assert "step 7: loss nan" in ended.stderr and "Traceback" not in ended.stderr
    assert "no weight was changed" in ended.stderr and "\n  try      " in ended.stderr
    assert [record["step"] for record in steps_of(run_dir)] == [1, 2, 3, 4, 5, 6]
    end = records_of(run_dir, "run_ended")[-1]
    assert (end["status"], end["exit_code"], end["step"]) == ("failed", 6, 6)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000004"]
    page = (run_dir / "report.html").read_text()
    assert "step 7" in page and "nan" in page


UNLABELLED = """
from paceline.task.objective import next_token


def learns_only(model, batch):
    loss, weight = next_token(model, batch)
    return (loss, weight) if model.training else (loss * 0, weight * 0)
"""


def test_held_out_samples_without_a_label_are_told(folder: Path) -> None:
    run_dir = folder / "unlabelled"
    (folder / "unlabelled.py").write_text(UNLABELLED)
    changes = ("--set", "task.objective=unlabelled:learns_only", "--set", "run.evaluate_every=5 steps")
    ended = paceline("train", write_spec(folder, run_dir), *changes)
    assert ended.returncode == 5, ended.stderr
    assert "no item to measure the loss on" in ended.stderr and "Traceback" not in ended.stderr
    assert "labels" in ended.stderr and "run.evaluate_every" in ended.stderr
    end = records_of(run_dir, "run_ended")[-1]
    assert (end["status"], end["exit_code"], end["step"]) == ("failed", 5, 5)


DRIFT = """
import os

import torch

from paceline.task.objective import next_token

calls = [0]


def drifting(model, batch):
    calls[0] += model.training
    if calls[0] == 5 and os.environ.get("RANK") == "1":
        with torch.no_grad():
            weight = model.get_parameter("WEIGHT").view(-1)
            weight[:32] = torch.nextafter(weight[:32], torch.tensor(9.0))
    return next_token(model, batch)
"""


@pytest.mark.parametrize(
    ("plan", "micro_batch", "weight"),
    [
        ("dp_replicate = 2", 7, "layers.1.mlp.up_proj.weight"),
        pytest.param("tp = 2", 14, "layers.0.post_attention_layernorm.weight", marks=pytest.mark.deep),
    ],
)
def test_a_rank_that_departs_stops_the_run(folder: Path, plan: str, micro_batch: int, weight: str) -> None:
    """In step 5 one rank changes weights by a unit in their last place; a run's first ten steps are all checked.

    Of several numbers, since the update after it may round one to what it is on the other rank.
    """
    run_dir = folder / f"drifts-{plan[:2]}"
    (folder / f"drift_{plan[:2]}.py").write_text(DRIFT.replace("WEIGHT", weight))
    spec = write_spec(folder, run_dir, 2, f"{plan}\nmicro_batch = {micro_batch}")
    changes = (f"task.objective=drift_{plan[:2]}:drifting", "run.check_every=2 steps")
    ended = paceline("train", spec, *(word for change in changes for word in ("--set", change)))
    assert ended.returncode == 4, ended.stderr
    assert f"step 5: ranks 0 and 1 no longer agree on {weight}" in ended.stderr and "Traceback" not in ended.stderr
    assert "\n  try      " in ended.stderr
    end = records_of(run_dir, "run_ended")[-1]
    assert (end["status"], end["exit_code"], end["step"]) == ("failed", 4, 5)
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000004"]
    assert weight in (run_dir / "report.html").read_text()


def test_a_learning_rate_beyond_reason_stops_the_run(folder: Path) -> None:
    run_dir = folder / "huge"
    ended = paceline("train", write_spec(folder, run_dir), "--set", "task.optimizer.lr=1e30")
    assert ended.returncode == 6, ended.stderr
    assert "lower task.optimizer.lr" in ended.stderr and "Traceback" not in ended.stderr
    assert (run_dir / "report.html").is_file()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("plan.ep=2", "ep"),
        ("cluster.memory_per_device=1 MiB", "does not fit"),
        ("plan.dp_shard=3", "dp_replicate x dp_shard"),
    ],
)
def test_what_does_not_fit(folder: Path, change: str, says: str) -> None:
    run_dir = folder / "unfit"
    ended = paceline("train", write_spec(folder, run_dir, 2), "--set", change)
    assert ended.returncode == (2 if "dp_shard" in change else 3), ended.stderr
    assert says in ended.stderr and "Traceback" not in ended.stderr
    assert not (run_dir / "journal").exists()


@pytest.mark.deep
def test_tensorboard_shows_what_the_journal_holds(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = folder / "board"
    spec = write_spec(folder, run_dir, 2, "dp_shard = 2", steps=5)
    ended = paceline("train", spec, "--set", "run.tensorboard=true", "--set", "run.evaluate_every=5 steps")
    assert ended.returncode == 0, ended.stderr
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    for tag, field in [("loss/training", "loss"), ("optimisation/grad_norm", "grad_norm"),
                       ("optimisation/learning_rate", "lr")]:  # fmt: skip
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        held = [(record["step"], pytest.approx(record[field], rel=1e-6)) for record in steps_of(run_dir)]
        assert shown == held
    (evaluated,) = events.Scalars("loss/held_out")
    assert evaluated.value == pytest.approx(records_of(run_dir, "evaluation")[-1]["loss"], rel=1e-6)


@pytest.mark.parametrize("devices", [1, 2])
def test_tensorboard_that_is_not_installed(folder: Path, devices: int) -> None:
    """It is missed before anything is planned, proved or started."""
    absent = folder / "absent" / "tensorboard"
    absent.mkdir(parents=True, exist_ok=True)
    (absent / "__init__.py").write_text("raise ImportError('not installed')\n")
    inherited = environment()
    path = f"{absent.parent}:{inherited.get('PYTHONPATH', '')}"
    spec = write_spec(folder, folder / f"no-board-{devices}", devices)
    ended = paceline("train", spec, "--set", "run.tensorboard=true", env={**inherited, "PYTHONPATH": path})
    assert ended.returncode == 2, ended.stderr
    assert "pip install 'paceline[tensorboard]'" in ended.stderr and "Traceback" not in ended.stderr
    assert not ended.stdout and not (folder / f"no-board-{devices}").exists()
