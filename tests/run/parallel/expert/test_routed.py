"""Experts of transformers' families spread over ranks: equal to one device in fp64, and with the same choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import run_kept, run_ranks
from tests_huggingface import FAMILIES as SETTINGS
from tests_huggingface import SHAPE, causal, hf_task
from tests_shared import SEQ_LEN, plan_of, world_here
from torch import nn

from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import Task
from paceline.task.declared import expert_axis
from paceline.task.objective import next_token
from paceline.task.profile.traced import profile_module
from paceline.verify.compare.layout import compare

FAMILIES = ("Mixtral", "Qwen3Moe", "Olmoe", "GptOss")
EXPERTS = SETTINGS["Mixtral"]["num_local_experts"]
EP2 = Layout(dp_shard=2, ep=2)
Case = tuple[Task, Plan]


def proofs(cases: list[Case]) -> list[CheckProof]:
    world = world_here()
    return [compare(task, plan, world, task.data, SEQ_LEN, 2) for task, plan in cases]


def assert_equal(cases: list[Case]) -> None:
    for (_, plan), found in zip(cases, run_kept(proofs, cases[0][1].layout.devices, cases)[0], strict=True):
        assert found.equal, (str(plan), found.first_difference)


def test_experts_of_transformers_equal_one_device_in_fp64() -> None:
    cases = [(hf_task(family), plan_of(EP2, precision="fp64")) for family in FAMILIES]
    cases += [(hf_task("GptOss"), plan_of(EP2, precision="fp64", expert_slots=1.5))]  # whose experts have biases
    assert_equal([*cases, (hf_task("Mixtral"), plan_of(EP2, precision="fp64", recompute="full", batch=3))])


@pytest.mark.deep
@pytest.mark.parametrize(
    "layout",
    [Layout(dp_shard=4, ep=2), Layout(dp_replicate=2, dp_shard=2, ep=2), Layout(cp=2, dp_shard=2, ep=4)],
    ids=str,
)
def test_several_ranks_share_experts_of_transformers(layout: Layout) -> None:
    families = [family for family in FAMILIES if layout.cp == 1 or family != "GptOss"]
    assert_equal([(hf_task(family), plan_of(layout, precision="fp64")) for family in families])


def chosen(task: Task, plan: Plan, spread: bool) -> list[list[int]]:
    """Return how many tokens of one step each expert of each layer got, summed over ranks."""
    world = world_here()
    built = assemble(task, plan, world, task.data, SEQ_LEN)
    counts: list[torch.Tensor] = []
    for name, module in built.model.named_modules():
        if name.endswith("mlp.gate"):
            count = torch.zeros(EXPERTS, dtype=torch.long, device=world.device)
            counts.append(count)
            module.register_forward_hook(
                lambda _, args, out, count=count: (
                    count.add_(torch.bincount(out[2].flatten(), minlength=EXPERTS)),
                    None,
                )[1]
            )
    batch = BatchStream(task.data, task.seed, plan, plan.layout.data_rank(world.rank), world.device).at(0)
    built.stepper.step(batch, 1e-3)
    for count in counts if spread else ():
        torch.distributed.all_reduce(count)
    return [count.tolist() for count in counts]


def test_every_token_goes_to_the_experts_of_one_device() -> None:
    task = hf_task("Mixtral")
    rank, _ = run_ranks(chosen, 2, task, plan_of(EP2, batch=12, precision="fp64"), True)
    alone = chosen(task, plan_of(Layout(), batch=12, precision="fp64"), False)
    assert rank == alone
    assert sum(map(sum, alone)) == 12 * SEQ_LEN * 2 * SHAPE["num_hidden_layers"], "rows, tokens, choices, layers"


def test_the_profile_knows_experts_of_transformers() -> None:
    task = hf_task("Mixtral")
    batch = task.data.read(torch.arange(3).numpy())
    profile = profile_module(task.model(), batch, next_token)
    assert profile.closed_axes is not None and "ep" not in profile.closed_axes
    assert profile.experts == 4
    assert profile.blocks[0].routed_elements == 2 * SEQ_LEN * SHAPE["hidden_size"], "two choices of every token"
    dense = profile_module(hf_task("Llama").model(), batch, next_token).closed_axes
    assert dense is not None and "no experts" in dense["ep"]


def test_experts_in_a_list_say_what_would_open_the_axis() -> None:
    model: Any = causal("Llama")
    model.model.layers[0].mlp.experts = nn.ModuleList([nn.Linear(4, 4)])
    assert expert_axis(model) == ({}, "'model.layers.0.mlp.experts' holds experts as modules of their own: stack their "
                                  "weights as [experts, ...]")  # fmt: skip
