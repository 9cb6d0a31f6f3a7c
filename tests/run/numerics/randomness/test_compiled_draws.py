"""Compiled models that draw: blocks with random numbers stay out of the compiler, and that is said."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import drawing_models
import pytest
import torch
import ways_to_draw
from distributed import run_ranks
from rounding import MEAN_LOSS_BF16, assert_curves_close
from tests_shared import SEQ_LEN, decoder_task, plan_of, run_steps, world_here
from torch import nn
from vectors import needs_vectors

from paceline.errors import ConfigError
from paceline.plan.feasible.torch_version import is_older
from paceline.plan.planned import plan_task
from paceline.spec.cluster import ClusterSpec
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import Task
from paceline.units import Amount
from paceline.verify.compare.layout import compare

BATCH = 7
DEEP = pytest.mark.deep  # compiling takes seconds
RECOMPUTE = ("none", "selective", "full")


def task_of(model: nn.Module) -> Task:
    return decoder_task(model=model, objective="next_token", global_batch=Amount(BATCH, "samples"))


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    home = ways_to_draw if hasattr(ways_to_draw, name) else drawing_models
    return getattr(home, name)()


def fp64(layout: Layout | None = None, **changes: Any) -> Plan:
    return plan_of(layout or Layout(), **{"batch": BATCH, "precision": "fp64", **changes})


def numbers(model: str, plan: Plan) -> tuple[list[float], list[float], tuple[str, ...]]:
    return numbers_of(made(model), plan)


def numbers_of(model: nn.Module, plan: Plan) -> tuple[list[float], list[float], tuple[str, ...]]:
    stats, built = run_steps(task_of(model), plan, 2)
    return [s.loss for s in stats], [s.grad_norm for s in stats], built.remarks


def frames() -> int:
    return torch._dynamo.utils.counters["frames"]["ok"]


@contextlib.contextmanager
def compiling() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield


CASES = [
    *(("EveryOther", 2, recompute) for recompute in RECOMPUTE),
    *((model, 0, recompute) for model in ("Chain", "Encoder", "StochasticDepth") for recompute in RECOMPUTE),
]


@needs_vectors
@pytest.mark.parametrize(("model", "compiled", "recompute"), [
    pytest.param(*case, marks=DEEP if case[1] and case[2] != "selective" else ()) for case in CASES
])  # fmt: skip
def test_compiled_models_draw_the_same(model: str, compiled: int, recompute: str) -> None:
    eager_loss, eager_norm, _ = numbers(model, fp64(micro_batch=BATCH))
    with compiling():
        loss, norm, remarks = numbers(model, fp64(recompute=recompute, compile=True))
        assert bool(frames()) == bool(compiled)
    assert loss == pytest.approx(eager_loss, rel=1e-11)
    assert norm == pytest.approx(eager_norm, rel=1e-11)
    (said,) = (remark for remark in remarks if remark.startswith("compile"))
    assert f"{3 - compiled} of 3 blocks (layers." in said


@needs_vectors
@pytest.mark.parametrize(("model", "rounded"), [("Chain", 0.0), pytest.param("EveryOther", 5.0, marks=DEEP)])
def test_blocks_that_stay_out_are_cast_as_without_a_compiler(model: str, rounded: float) -> None:
    setting = {"precision": "bf16", "recompute": "full"}
    torch._dynamo.reset()
    compiled, _, _ = numbers(model, fp64(**setting, compile=True))
    eager, _, _ = numbers(model, fp64(**setting))
    # Where nothing is compiled all bits are equal; else the compiler keeps fp32 between operators.
    assert_curves_close(compiled, eager, rounded * MEAN_LOSS_BF16)


def proof(task: Task, plan: Plan) -> CheckProof:
    return compare(task, plan, world_here(), task.data, SEQ_LEN, 2)


LAYOUTS = (
    ("Chain", Layout(dp_replicate=2), "full"),
    ("Encoder", Layout(dp_shard=2), "selective"),
    ("AttendingChain", Layout(cp=2), "full"),
    ("StochasticDepth", Layout(pp=2), "none"),
    *(("EveryOther", Layout(dp_shard=2), recompute) for recompute in RECOMPUTE),
    ("EveryOther", Layout(dp_replicate=2), "none"),
    ("EveryOther", Layout(pp=2), "full"),
)


@needs_vectors
@pytest.mark.parametrize(("model", "layout", "recompute"), [
    pytest.param(*case, marks=DEEP if case[0] == "EveryOther" else ()) for case in LAYOUTS
], ids=str)  # fmt: skip
def test_compiled_layouts_equal_one_device(model: str, layout: Layout, recompute: str) -> None:
    task = task_of(made(model))
    result = run_ranks(proof, 2, task, fp64(layout, recompute=recompute, compile=True), timeout_seconds=180)[0]
    assert result.equal, result.first_difference


@needs_vectors
@DEEP
def test_what_the_compiler_draws_unseen_is_named() -> None:
    hidden = fp64(micro_batch=5, compile=True)
    with compiling(), pytest.warns(UserWarning, match="past torch's functions"):
        numbers("ForMany", hidden)
        assert frames()
    with pytest.raises(ConfigError, match="past torch's functions"):
        run_ranks(numbers, 2, "ForMany", fp64(Layout(dp_replicate=2), batch=10, micro_batch=5, compile=True),
                  timeout_seconds=180)  # fmt: skip


@pytest.mark.parametrize(("model", "blocks"), [("Chain", 3), ("EveryOther", 1)])
def test_the_plan_says_what_is_not_compiled(model: str, blocks: int) -> None:
    spec = Spec(task=task_of(made(model)), plan=PlanSpec(compile=True), cluster=ClusterSpec(device="cpu", devices=1))
    (said,) = (remark for remark in plan_task(spec).remarks if remark.startswith("compile = true"))
    assert f" {blocks} blocks draw random numbers and run uncompiled" in said
    eager = dataclasses.replace(spec, plan=PlanSpec())
    assert not any("compile" in remark for remark in plan_task(eager).remarks)


@pytest.mark.parametrize("drops", [0.0, 0.3])
def test_a_model_that_compiles_itself_is_refused_with_the_way_out(drops: float) -> None:
    torch._dynamo.reset()
    model = ways_to_draw.Inside(nn.Sequential(nn.Linear(8, 8), nn.Dropout(drops)))
    plain = copy.deepcopy(model)
    model.layer = torch.compile(model.layer, backend="eager")
    if not drops and is_older((2, 13)):  # whose compiler follows where nothing is drawn
        assert numbers_of(model, fp64())[:2] == numbers_of(plain, fp64())[:2]
        return
    with pytest.raises(ConfigError, match="the program compiles parts of itself") as error:
        numbers_of(model, fp64())
    assert "plan.compile = true compiles its blocks" in str(error.value)
