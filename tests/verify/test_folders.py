"""Folders of Hugging Face under every axis: equal to one device, or refused by name; the guide's table says which."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import run_ranks
from model_folders import write_model
from runs import write_corpus
from tests_shared import SEQ_LEN, decoder_task, plan_of, world_here

from paceline.plan.prepare import prepare_task
from paceline.spec.cluster import ClusterSpec
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.proof.records import CheckProof
from paceline.spec.run import RunSpec
from paceline.spec.task import DataSpec, ModelSpec
from paceline.units import Amount
from paceline.verify.compare.layout import compare

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "task" / "huggingface.md"
LAYOUTS = {"dp_shard": Layout(dp_shard=2), "tp": Layout(tp=2), "pp": Layout(pp=2), "cp": Layout(cp=2),
           "ep": Layout(dp_shard=2, ep=2)}  # fmt: skip
FAST = ("Qwen2", "Gemma3Text", "GptOss")  # the decoder of our own, one with windows, one with experts


def in_guide() -> dict[str, dict[str, bool]]:
    """Return for each family of the guide's table whether each axis is open."""
    lines = GUIDE.read_text("utf-8").partition("| folder of |")[2].partition("\n\n")[0].splitlines()
    axes = [cell.strip(" `") for cell in lines[0].split("|")[1:-1]]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {
        row[0].partition(" ")[0]: {axis: cell == "equal" for axis, cell in zip(axes, row[2:], strict=True)}
        for row in rows
    }


TABLE = in_guide()


def params() -> list[object]:
    return [pytest.param(name, marks=() if name in FAST else (pytest.mark.deep,)) for name in TABLE]


@pytest.mark.parametrize("family", params())
def test_the_guide_says_which_axes_a_folder_has(tmp_path: Path, family: str) -> None:
    folder, corpus = write_model(tmp_path / "m", family), write_corpus(tmp_path)
    data = DataSpec(str(corpus), seq_len=SEQ_LEN, validation_fraction=0)
    task = decoder_task(model=ModelSpec(str(folder)), data=data, global_batch=Amount(4, "samples"),
                        stop=Amount(2, "steps"))  # fmt: skip
    spec = Spec(task=task, cluster=ClusterSpec(device="cpu", devices=1, probe=False, learn=False),
                run=RunSpec(dir=str(tmp_path / "run"), evaluate_every=None))  # fmt: skip
    closed = prepare_task(spec).profile.closed_axes or {}
    assert {axis: axis not in closed for axis in LAYOUTS} == TABLE[family], closed
    assert all(closed[axis] for axis in LAYOUTS if axis in closed)  # why


def proven(folder: str, axes: list[str]) -> dict[str, CheckProof]:
    """Return the proof of each of some axes; every rank calls it."""
    world, task = world_here(), decoder_task(model=ModelSpec(folder), global_batch=Amount(5, "samples"))
    return {axis: compare(task, plan_of(LAYOUTS[axis], 5, 2), world, task.data, SEQ_LEN, 2) for axis in axes}


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("Gemma3Text", ["tp"]),
        *(
            pytest.param(name, [axis for axis, is_open in TABLE[name].items() if is_open], marks=pytest.mark.deep)
            for name in TABLE
        ),
    ],
)
def test_a_folder_equals_one_device_on_every_axis_it_has(tmp_path: Path, family: str, axes: list[str]) -> None:
    """Each rank reads its own slices of the folder's weights."""
    folder = write_model(tmp_path / "m", family, shards="20KB")
    for axis, found in run_ranks(proven, 2, str(folder), axes, timeout_seconds=90)[0].items():
        assert found.equal, (axis, found.first_difference)
