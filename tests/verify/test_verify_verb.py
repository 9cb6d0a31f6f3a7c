"""`paceline verify`: what it says of the examples, of a planted bug, of a giant, and of what cannot be had."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from runs import as_json, in_process, paceline, write_spec

from paceline.cli.verify import _dtypes

EXAMPLES = Path(__file__).parents[2] / "examples"
RECORD = {"layout", "equal", "seconds", "differences", "first_difference", "refused_because"}
BUG = """
import os

from paceline.task.objective import next_token


def by_rank(model, batch):
    loss, weight = next_token(model, batch)
    return (loss * 1.01 if os.environ.get("RANK") == "1" else loss), weight
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


def verify(*words: Any, code: int = 0) -> dict[str, Any]:
    """Return the only layout's record after checking the shape of the JSON and the exit code."""
    done = in_process("verify", *words, "--json")
    assert done.returncode == code, done.stderr
    told = as_json(done.stdout)
    (record,) = told["layouts"]
    assert set(record) >= RECORD and told["equal"] == record["equal"] == (code == 0)
    return record


@pytest.mark.deep
def test_images(folder: Path) -> None:
    record = verify(EXAMPLES / "digits.toml", "--layout", "dp_shard=2", "--steps", "2")
    assert record["layout"] == record["ran_as"] == "dp_shard=2"
    assert set(record["dtypes"]) == {"fp32", "fp64"}
    assert 0 < record["differences"]["gradients"] < 1e-4
    assert record["differences"]["samples"] == record["differences"]["initial"] == 0
    assert record["first_difference"] is None and record["refused_because"] is None


def test_text_as_the_planner_lays_it_out(folder: Path) -> None:
    corpus = write_spec(folder, folder / "run").parent / "corpus"
    done = paceline(
        "verify", EXAMPLES / "stdlib-code.toml", "--set", f"task.data.source={corpus}", "--set", "task.stop=20 steps",
        "--set", "task.schedule.warmup=2 steps", "--dtype", "fp64",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "equal to one device: loss " in done.stdout


def test_a_bug_in_an_objective_of_ones_own_is_found(folder: Path) -> None:
    (folder / "rank_bug.py").write_text(BUG)
    spec = write_spec(folder, folder / "bug", 2, "dp_replicate = 2")
    words = [spec, "--set", "task.objective=rank_bug:by_rank", "--dtype", "fp64"]
    record = verify(*words, code=4)
    first = record["first_difference"]
    assert (first["quantity"], first["step"], first["dtype"]) == ("loss", 1, "fp64")
    assert 1 < first["ratio"] < 1.01 and first["family"] and first["likely"]
    done = in_process("verify", *words)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "does not compute the numbers of one device" in done.stderr and "likely cause" in done.stderr


GIANTS = [
    pytest.param("llama-405b", "tp=8,pp=16", "tp=4 pp=2; tp=2 pp=3", marks=pytest.mark.deep),
    pytest.param(
        "llama-405b", "dp_shard=64,tp=8,pp=16", "dp_shard=2 tp=4 pp=2; dp_shard=2 tp=2 pp=3", marks=pytest.mark.deep
    ),
    pytest.param("mixtral-8x22b", "dp_shard=32,ep=8", "dp_shard=4 ep=2", marks=pytest.mark.deep),
    ("llama-8b", "dp_replicate=64,dp_shard=8", "dp_replicate=2 dp_shard=2"),
]


@pytest.mark.parametrize(("name", "layout", "ran_as"), GIANTS)
def test_a_giant_is_proven_by_its_twin(folder: Path, name: str, layout: str, ran_as: str) -> None:
    spec = write_spec(folder, folder / name)
    text = "\n".join(f'model = "{name}"' if x.startswith("model =") else x for x in spec.read_text().split("\n"))
    spec.write_text(text)
    words = ["--set", "task.data.tokenizer=bpe", "--set", "task.data.vocab=600"]  # more than the twin's vocabulary
    record = verify(spec, "--layout", layout, "--dtype", "fp64", "--steps", "1", *words)
    assert record["layout"] == layout.replace(",", " ") and record["ran_as"] == ran_as


@pytest.mark.parametrize("names", ["float64", "fp64,float64"])
def test_precisions_go_by_torchs_names_too(names: str) -> None:
    options = argparse.Namespace(dtype=names, largest=0)
    assert _dtypes(options) == ("fp64",)


def test_axes_that_are_closed_to_a_model_are_refused() -> None:
    record = verify(EXAMPLES / "digits.toml", "--layout", "pp=2", code=3)
    assert "pp" in record["refused_because"] and record["first_difference"] is None and record["differences"] == {}


def test_a_refusal_in_words() -> None:
    done = in_process("verify", EXAMPLES / "digits.toml", "--layout", "ep=2,dp_shard=2")
    assert done.returncode == 3 and "refused, ep = 2" in done.stdout and "Traceback" not in done.stderr


def test_a_spec_that_demands_a_closed_axis_is_refused_too(folder: Path) -> None:
    record = verify(EXAMPLES / "digits.toml", "--set", "plan.pp=2", "--set", "cluster.probe=false", code=3)
    assert record["layout"] == "pp=2" and "pp" in record["refused_because"]


@pytest.mark.parametrize(
    "words",
    [["--dtype", "bf16"], ["--layout", "dp_shard=x"], ["--layout", "dp=2"], ["--layout", "dp_shard=2,precision=fp31"]],
)
def test_usage(words: list[str]) -> None:
    done = in_process("verify", EXAMPLES / "digits.toml", *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "\n  because  " in done.stderr
