"""Rules for layers that a plain cut gets wrong: understood where they can be, refused by name where not."""

from __future__ import annotations

from typing import Any

import fused_models
import pytest
import tensor_models
import torch
from distributed import run_ranks
from test_tensor_parallel import TP2, TP2_SHARD2, assert_equal_to_one_device, losses
from tests_shared import coarse_plan as plan_of
from tests_shared import decoder_task, world_here
from torch import nn

from paceline.errors import ConfigError
from paceline.spec.layout import Layout
from paceline.spec.task import Task
from paceline.task.declared import declared_rules, tensor_axis
from paceline.task.models.chain import chain_of
from paceline.task.rules import Rules


def task_of(model: Any) -> Task:
    return decoder_task(model=model, objective="next_token")


@pytest.mark.parametrize("layout", [TP2, TP2_SHARD2], ids=str)
def test_fused_matrices_are_cut_part_by_part(layout: Layout) -> None:
    assert_equal_to_one_device(task_of(fused_models.Fused), plan_of(layout, batch=12, precision="fp64"))


@pytest.mark.parametrize("family", [tensor_models.phi3, fused_models.olmo2], ids=lambda family: family.__name__)
def test_hugging_face_plans_that_split_a_whole_input(family: Any) -> None:
    assert tensor_axis(family())[0] is not None
    assert_equal_to_one_device(task_of(family), plan_of(TP2, batch=6, precision="fp64"))


@pytest.mark.parametrize("model", [fused_models.Pair, fused_models.llama_with_norms], ids=lambda m: m.__name__)
def test_plain_subclasses_and_rules_added_to_a_plan(model: Any) -> None:
    assert_equal_to_one_device(task_of(model), plan_of(TP2, batch=6, precision="fp64"))


@pytest.mark.parametrize(
    ("model", "precision", "what"),
    [(fused_models.CutGates, "fp32", "the output of 'down' is another"),
     (fused_models.CutGates, "bf16", "the output of 'down' is another"),
     (fused_models.CutQueries, "fp64", "the output of 'out' is another"),
     (fused_models.OddGates, "fp32", "its forward pass fails")],
)  # fmt: skip
def test_a_column_through_a_fused_matrix_is_refused_before_training(model: Any, precision: str, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        run_ranks(losses, 2, task_of(model), plan_of(TP2, batch=6, precision=precision))
    assert what in str(error.value)
    assert "'fused'" in str(error.value)


@pytest.mark.parametrize(
    ("model", "because"),
    [
        (fused_models.ScaledPair, "its forward pass is not that of nn.Linear"),
        (fused_models.PatchedPair, "its forward pass is not that of nn.Linear"),
        (fused_models.NormedPair, "computed from others"),
    ],
    ids=lambda value: getattr(value, "__name__", "because"),
)
def test_layers_that_do_more_than_a_product_close_the_axis(model: type[nn.Module], because: str) -> None:
    limits, why = tensor_axis(model())
    assert limits is None
    assert "'up'" in why and because in why


def test_rules_that_add_to_a_plan() -> None:
    model = fused_models.llama_with_norms()
    rules, alone = declared_rules(model), declared_rules(tensor_models.llama())
    assert rules is not None and alone is not None
    assert rules.style_of("lm_head") == "replicated" and rules.style_of("model.norm") == "replicated"
    assert rules.style_of("model.layers.1.self_attn.q_proj") == "column" and rules.counts == alone.counts
    chain = chain_of(model)
    assert chain is not None and chain.blocks == "model.layers"
    with pytest.raises(ConfigError, match="ships none"):
        declared_rules(fused_models.adds_to_nothing())


def test_fused_layers_say_their_parts() -> None:
    with pytest.raises(ConfigError, match="belong together"):
        Rules(tensor={"qkv": "fused"})
    model = fused_models.Fused()
    model.qkv = nn.Linear(4, 5)
    assert "have 32 rows, its weight 5" in tensor_axis(model)[1]


def weights_after_a_look() -> tuple[bool, bool]:
    """Return whether trying the rules leaves dropout's mode and the random numbers as they were."""
    from paceline.run.assemble import assemble

    task, plan = task_of(tensor_models.Whole), plan_of(TP2, batch=6)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    built = assemble(task, plan, world_here(), task.data, 16)
    return built.model.training, torch.equal(before, torch.random.get_rng_state())


def test_trying_the_rules_leaves_the_model_as_it_was() -> None:
    assert run_ranks(weights_after_a_look, 2) == [(True, True)] * 2
