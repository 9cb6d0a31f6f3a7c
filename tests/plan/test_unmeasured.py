"""What looks at held-out data has an effect, or is refused before training: early stopping was silently ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import environment

import paceline
from paceline.errors import ConfigError
from paceline.plan.prepare import prepare_task
from paceline.session.verbs.spec_given import spec_of


class _Rows:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.tensor(index % 2)


def _task(data: Any, **evaluate: Any) -> paceline.Task:
    net = torch.nn.Linear(4, 2)
    return paceline.Task(name="rows", model=net, data=data, global_batch="4 samples", stop="2 steps", evaluate=evaluate)


def _prepare(task: paceline.Task, run: dict[str, Any]) -> None:
    prepare_task(spec_of(task, "auto", CLUSTER, (), run))


CLUSTER = {"device": "cpu", "devices": 1, "probe": False, "learn": False}


@pytest.mark.parametrize(
    ("evaluate", "run", "named"),
    [
        ({"patience": 2}, {}, "task.evaluate.patience = 2"),
        ({"metrics": ["accuracy"]}, {}, "task.evaluate.metrics = accuracy"),
        ({}, {"checkpoints": {"save_best": True}}, "run.checkpoints.save_best = true"),
    ],
)
def test_what_would_have_no_effect_is_refused(evaluate: dict[str, Any], run: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        _prepare(_task(_Rows(), **evaluate), run)
    _prepare(_task((_Rows(), _Rows()), **evaluate), run)  # with held-out data it stands
    sets = [{"name": "other", "source": _Rows()}]
    _prepare(_task(_Rows(), **evaluate, sets=sets), run)


def test_a_data_set_of_ones_own_without_a_validation_part_is_told() -> None:
    alone = paceline.plan(_task(_Rows()), cluster=CLUSTER)
    assert any("none of it is held out" in line for line in alone.facts.shown)
    assert not paceline.plan(_task((_Rows(), _Rows())), cluster=CLUSTER).facts.shown


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("paceline.plan('spec.toml', overrides=['cluster.device=cpu', 'plan.tp=7'])", 3),
        ("paceline.plan('spec.toml', overrides=['task.data.source=nothing.txt'])", 5),
        ("paceline.report('nowhere')", 2),
    ],
)
def test_a_script_ends_with_the_exit_code_of_any_error_of_ours(tmp_path: Path, call: str, code: int) -> None:
    lines = ["[task]", 'model = "llama-1m"', "[task.data]", "max_bytes = 200_000", "[cluster]", "probe = false"]
    (tmp_path / "spec.toml").write_text("\n".join(lines))
    tested = {**environment(), "PYTHONPATH": str(Path(paceline.__file__).parents[1])}
    script = f"import paceline\n{call}\n"
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=tested, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
