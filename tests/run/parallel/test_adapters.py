"""Models with adapters, and models of which a part is trained, compute the numbers of one device on every axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from distributed import run_kept, run_ranks
from tests_shared import SEQ_LEN, decoder_task, run_steps, world_here
from tests_shared import coarse_plan as plan_of
from torch.distributed.tensor import DTensor

from paceline.run.parallel import tensor
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import ModelSpec, Task
from paceline.task.adapt.linear import is_adapter
from paceline.verify.compare.layout import compare

LORA = AdapterSpec(kind="lora", rank=3, init="random")
DORA = AdapterSpec(kind="dora", rank=2, init="random", base_dtype="bf16")
DROPPED = AdapterSpec(kind="rslora", rank=2, init="random", dropout=0.25)
PARTIAL = ("layers.1.self_attn.*", "norm.weight")


TWO_LAYERS = dataclasses.replace(decoder_task().model, layers=2)


def adapted(adapter: AdapterSpec, **changes: Any) -> Task:
    return decoder_task(**{"adapter": adapter, "model": TWO_LAYERS, **changes})


PART = decoder_task(train=PARTIAL, model=TWO_LAYERS)
TASKS = [adapted(LORA), adapted(DORA), adapted(LORA, train=("embed_tokens.*", "norm")), PART]


def deep(plan: Plan) -> Any:
    """Return a plan as a parameter of a heavier test."""
    return pytest.param([plan], marks=pytest.mark.deep, id=str(plan.layout))


def all_compared(tasks: list[Task], plans: list[Plan]) -> list[CheckProof]:
    """Return the comparisons of every task under every plan with one device."""
    world = world_here()
    return [compare(task, plan, world, task.data, SEQ_LEN, 2) for plan in plans for task in tasks]


def assert_all_equal(tasks: list[Task], *plans: Plan) -> None:
    for proof in run_kept(all_compared, plans[0].layout.devices, tasks, list(plans))[0]:
        assert proof.equal, proof.first_difference


@pytest.mark.parametrize(
    "plans",
    [
        deep(plan_of(Layout(dp_replicate=2), precision="fp64")),
        [plan_of(Layout(dp_shard=2), precision="fp64", zero=zero) for zero in (1, 3)],
        [plan_of(Layout(tp=2), precision="fp64")],
        pytest.param(
            [plan_of(Layout(tp=2), precision="fp64", recompute="full")], marks=pytest.mark.deep, id="tp=2, recomputed"
        ),
        deep(plan_of(Layout(cp=2), precision="fp64")),
        deep(plan_of(Layout(tp=2, dp_shard=2), precision="fp64", zero=3)),
    ],
    ids=lambda plans: str(plans[0].layout),
)
def test_adapters_and_partial_training_equal_one_device(plans: list[Plan]) -> None:
    assert_all_equal(TASKS, *plans)


def test_adapters_in_a_pipeline_equal_one_device() -> None:
    tied = adapted(LORA, model=dataclasses.replace(decoder_task().model, tied=True))
    assert_all_equal([*TASKS[:3], tied], plan_of(Layout(pp=2), precision="fp64", schedule="1f1b"))


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), *(pytest.param(each, marks=pytest.mark.deep) for each in (Layout(dp_shard=2), Layout(pp=2)))],
    ids=str,
)
def test_dropout_of_an_adapter_is_that_of_its_samples(layout: Layout) -> None:
    assert_all_equal([adapted(DROPPED)], plan_of(layout, precision="fp64"))


@pytest.mark.parametrize("kind", ["lora", pytest.param("dora", marks=pytest.mark.deep)])
def test_dropout_of_wide_layers_is_not_that_of_narrow_ones(kind: str) -> None:
    """Half of what the down projection reads is as wide as all of what the others read."""
    model = dataclasses.replace(TWO_LAYERS, ffn=64)
    dropped = dataclasses.replace(DROPPED, kind=kind)
    assert_all_equal([adapted(dropped, model=model)], plan_of(Layout(tp=2), precision="fp64"))


def losses_and_grads(task: Task, plan: Plan) -> tuple[list[float], set[str], set[str]]:
    """Return the losses of a few steps, the parameters with gradients, and those with state of the optimizer."""
    stats, built = run_steps(task, plan, 3)
    named = dict(built.model.named_parameters())
    held = {name for name, parameter in named.items() if parameter in built.optimizer.state}
    trained = {name for name, parameter in named.items() if parameter.grad is not None}
    return [one.loss for one in stats], trained, held


def test_the_base_has_neither_gradients_nor_state() -> None:
    losses, trained, held = run_kept(losses_and_grads, 2, adapted(LORA), plan_of(Layout(dp_shard=2)))[0]
    assert trained == held and all(map(is_adapter, held)) and losses[0] != losses[2]
    _, trained, held = run_kept(losses_and_grads, 1, PART, plan_of(Layout()))[0]
    assert trained == held
    assert held == {"norm.weight", *(f"layers.1.self_attn.{name}_proj.weight" for name in "qkvo")}


def frozen_dtypes(task: Task, plan: Plan) -> set[torch.dtype]:
    """Return the dtypes in which frozen weights of adapted layers rest after a step."""
    _, built = run_steps(task, plan, 1)
    local = [p.to_local() if isinstance(p, DTensor) else p for n, p in built.model.named_parameters() if "proj.w" in n]
    return {parameter.dtype for parameter in local}


def test_a_base_in_bf16_gives_the_same_numbers_where_bf16_computes() -> None:
    narrow = dataclasses.replace(LORA, base_dtype="bf16")
    plan = plan_of(Layout(dp_shard=2), precision="bf16")
    for layout in (Layout(), Layout(dp_shard=2)):
        plan = plan_of(layout, precision="bf16")
        wide, rested = (run_kept(losses_and_grads, layout.devices, adapted(spec), plan)[0] for spec in (LORA, narrow))
        assert wide[0] == rested[0]
    assert run_kept(frozen_dtypes, 2, adapted(narrow), plan)[0] == {torch.bfloat16}


def forgetful(task: Task, plan: Plan) -> CheckProof:
    """Compare with an adapter whose whole matrices keep a rank's part of their gradients."""
    spread = tensor.spread_adapter
    tensor.spread_adapter = lambda *args: (spread(*args), set())[1]
    try:
        return all_compared([task], [plan])[0]
    finally:
        tensor.spread_adapter = spread


def test_gradients_of_an_adapter_that_are_not_summed_over_tp_are_caught() -> None:
    proof = run_ranks(forgetful, 2, adapted(LORA), plan_of(Layout(tp=2), precision="fp64"))[0]
    assert not proof.equal and "lora_" in str(proof.first_difference)


def llama_task(adapter: AdapterSpec) -> Task:
    """Return the task of a small Llama of transformers, by a factory."""
    transformers = pytest.importorskip("transformers")
    assert transformers
    return decoder_task(model=ModelSpec("tests_huggingface:causal", arguments={"family": "Llama"}), adapter=adapter)


@pytest.mark.parametrize(
    "plans",
    [[plan_of(Layout(dp_shard=2), precision="fp64"), plan_of(Layout(tp=2), precision="fp64")],
     [plan_of(Layout(pp=2), precision="fp64", schedule="1f1b")]],
    ids=lambda plans: str(plans[-1].layout),
)  # fmt: skip
def test_adapters_of_a_model_of_transformers_equal_one_device(plans: list[Plan]) -> None:
    assert_all_equal(
        [llama_task(LORA), llama_task(dataclasses.replace(DROPPED, targets=("q_proj", "down_proj")))], *plans
    )
