"""A directory that holds another task's run is refused before anything is started, and its journal is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.plan.planned import plan_task
from paceline.session.ready.brief import confirm_and_price
from paceline.session.ready.same_task import check_same_task
from paceline.spec.load import Spec, parse_spec, spec_to_dict

SPEC = """
[task]
model = {{ name = "llama-1m", layers = {layers} }}
data = {{ source = "stdlib", seq_len = {seq_len}, max_bytes = "100 kB" }}
global_batch = "8 samples"
seed = {seed}
[cluster]
device = "cpu"
devices = 1
probe = false
[run]
dir = "{run}"
"""


def spec_of(run: Path, layers: int = 1, seq_len: int = 32, seed: int = 7) -> Spec:
    return parse_spec(SPEC.format(run=run, layers=layers, seq_len=seq_len, seed=seed))


def save(spec: Spec, run: Path, sequence: int, step: int) -> None:
    """Write what a checkpoint of the spec says of its task."""
    folder = run / "checkpoints" / f"step-{step:08}"
    folder.mkdir(parents=True)
    body = {"sequence": sequence, "extra": {"spec": json.loads(json.dumps(spec_to_dict(spec), default=str))}}
    (folder / "manifest.json").write_text(json.dumps({"body": body}))


def test_another_task_is_refused_with_its_plan_and_nothing_is_said(tmp_path: Path) -> None:
    save(spec_of(tmp_path), tmp_path, 1, 10)
    planned, said = plan_task(spec_of(tmp_path, layers=2, seq_len=16, seed=8)), list[str]()
    with pytest.raises(ConfigError) as refused:
        confirm_and_price(planned, said.append)
    assert not said
    told = str(refused.value)
    assert "task.model.layers, task.data.seq_len, task.seed differ" in told
    assert told.count("it makes another experiment") == 1, "a reason is told once for all changes that it is of"
    assert "seq_len was 32 and is now 16: it makes another experiment" in told and "task.name" in refused.value.try_


def test_the_newest_checkpoint_counts_and_one_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    save(spec_of(tmp_path), tmp_path, 2, 10)
    save(spec_of(tmp_path, seed=8), tmp_path, 1, 20)  # of a later step, and published before the run went back
    (tmp_path / "checkpoints" / "step-00000030").mkdir()
    (tmp_path / "checkpoints" / "step-00000030" / "manifest.json").write_text("{")
    check_same_task(spec_of(tmp_path))
    with pytest.raises(ConfigError, match=r"task\.seed differs"):
        check_same_task(spec_of(tmp_path, seed=8))


@pytest.mark.parametrize("name", ["of-another-run", ".partial-step-00000020"])
def test_a_folder_that_no_rank_would_load_refuses_nothing(tmp_path: Path, name: str) -> None:
    save(spec_of(tmp_path), tmp_path, 1, 10)
    save(spec_of(tmp_path, seed=8), tmp_path, 2, 20)
    (tmp_path / "checkpoints" / "step-00000020").rename(tmp_path / "checkpoints" / name)
    check_same_task(spec_of(tmp_path))
    with pytest.raises(ConfigError, match=r"task\.seed differs"):
        check_same_task(spec_of(tmp_path, seed=8))


def test_a_directory_without_a_checkpoint_is_anybodys(tmp_path: Path) -> None:
    for seed in (7, 8):
        check_same_task(spec_of(tmp_path, seed=seed))
        (tmp_path / "checkpoints").mkdir(exist_ok=True)  # as a run leaves it that ended before its first save
    save(spec_of(tmp_path), tmp_path, 1, 10)
    with pytest.raises(ConfigError, match=r"task\.seed differs"):
        check_same_task(spec_of(tmp_path, seed=8))
