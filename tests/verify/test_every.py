"""`paceline verify --all N`: every layout that can be had, in groups of processes, a failing one beside sound ones."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from runs import as_json, paceline, write_spec

from paceline.errors import PacelineError
from paceline.plan.layout import MESH_ORDER, Layout
from paceline.plan.plan import Plan
from paceline.spec import load_spec
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile import ModelProfile
from paceline.task.profile_analytic import profile_decoder
from paceline.task.task import ModelSpec
from paceline.verify.every import every_layout, table_rows
from paceline.verify.group import Job, run_jobs
from paceline.verify.start import jobs_of

FAILS = """
import torch.distributed as dist

from paceline.task.objective import next_token

calls = 0


def at_four(model, batch):
    if dist.is_initialized() and type(model).__name__.startswith("FSDP"):
        raise ValueError("sharded models are not for me")
    return next_token(model, batch)
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    return write_spec(folder, folder / "run")


def decoder(closed: tuple[str, ...] = (), experts: int = 0) -> ModelProfile:
    model = profile_decoder(resolve_decoder(ModelSpec("llama-1m"), 257, 64), 64)
    blocks = tuple(dataclasses.replace(block, experts=experts) for block in model.blocks)
    return dataclasses.replace(model, blocks=blocks, closed_axes=dict.fromkeys(closed, "no rules"))


def test_every_layout_of_open_axes_and_no_other() -> None:
    data = every_layout(decoder(("cp", "tp", "pp", "ep")), 4)
    assert [str(layout) for layout in data] == ["dp_shard=4", "dp_replicate=2 dp_shard=2", "dp_replicate=4"]
    eight = every_layout(decoder(), 8)
    assert len(eight) == len(set(eight)) == 35 and all(layout.ep == 1 for layout in eight)
    assert {axis for layout in eight for axis in MESH_ORDER if getattr(layout, axis) > 1} == set(MESH_ORDER)
    assert {layout.ep for layout in every_layout(decoder(experts=4), 4)} == {1, 2, 4}


def test_all_layouts_of_three_ranks_in_one_table(spec: Path) -> None:
    done = paceline("verify", spec, "--all", "3", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    told = as_json(done.stdout)
    proofs = {proof["layout"]: proof for proof in told["layouts"] if not proof["refused_because"]}
    assert told["equal"] and {"dp_shard=2", "dp_replicate=2", "dp_shard=3", "dp_replicate=3"} <= set(proofs)
    for proof in proofs.values():
        assert proof["equal"] and proof["ran_as"] == proof["layout"] and proof["seconds"] > 0
        assert set(proof["differences"]) >= {"loss", "weight", "gradients", "grad_norm", "weights"}
        assert proof["first_difference"] is None and set(proof["dtypes"]) == {"fp64"} and proof["error"] is None
    refused = [proof for proof in told["layouts"] if proof["refused_because"]]
    assert all(not proof["equal"] and proof["differences"] == {} for proof in refused)
    rows = table_rows(told["layouts"])
    assert len(rows) == 1 + len(proofs) and all(row[1] == "yes" for row in rows[1:])


def test_a_layout_that_fails_leaves_the_next_ones_their_proof(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_objective.py").write_text(FAILS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load_spec(spec, ["task.objective=failing_objective:at_four"])
    plans = [Plan(Layout(dp_replicate=2)), Plan(Layout(dp_shard=2)), Plan(Layout(dp_replicate=2), recompute="full")]
    jobs: list[Job] = [job for plan in plans for job in jobs_of(loaded, plan, 257, ("fp64",), exact=True)]
    first, failed, last = run_jobs(jobs, 1)
    assert isinstance(failed, PacelineError) and "sharded models are not for me" in f"{failed.what} {failed.because}"
    assert isinstance(first, dict) and isinstance(last, dict) and first["equal"] and last["equal"]


def test_all_and_a_layout_exclude_each_other(spec: Path) -> None:
    done = paceline("verify", spec, "--all", "2", "--layout", "dp_shard=2")
    assert done.returncode == 2 and "exclude each other" in done.stderr
