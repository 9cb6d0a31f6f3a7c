"""What an update of whole parameters gathers: the term against the bytes that ranks really gather, and by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from distributed import run_ranks
from plan_examples import cluster, measured, memory_terms, opened, optimizer_seconds, plan
from tests_shared import SEQ_LEN, decoder_task, plan_of, run_steps
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.plan.cost.collectives.of_weights import gathered_bytes, tensors
from paceline.plan.cost.columns import columns_of
from paceline.plan.cost.components import terms_of
from paceline.plan.cost.pricing import price
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.gathers import gather_components
from paceline.run.updates.several_rules import JoinedOptimizer
from paceline.spec.cluster import Link
from paceline.spec.layout import Layout
from paceline.spec.optimizers import RULES, gathered_values
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import ModelSpec
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.decoder import profile_decoder

MODEL = ModelSpec("llama-1m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, vocab=64, tied=False)


class Gathers(TorchDispatchMode):
    """Notes the bytes that each all-gather makes on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "all_gather" in str(func):
            self.bytes.append(result.nbytes)
        return result


def gathered(optimizer: str, layout: Layout) -> tuple[list[int], int, int]:
    """Return the bytes of each all-gather of the second update, and the elements of matrices and of vectors."""
    seen, update, steps = Gathers(), JoinedOptimizer.step, []

    def watched(self: JoinedOptimizer, *args: Any) -> Any:
        steps.append(None)
        if len(steps) < 2:  # which has no state yet
            return update(self, *args)
        with seen:
            return update(self, *args)

    JoinedOptimizer.step = watched  # type: ignore[method-assign]
    task = decoder_task(optimizer=OptimizerSpec(optimizer, lr=1e-3), model=MODEL)
    _, built = run_steps(task, plan_of(layout, zero=3), 2)
    sizes = [(p.dim(), p.numel()) for p in built.model.parameters()]
    return seen.bytes, sum(n for dim, n in sizes if dim == 2), sum(n for dim, n in sizes if dim < 2)


def columns_for(layout: Layout) -> Any:
    return columns_of([plan(layout, batch=12)])


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        ("muon", Layout(dp_shard=2)),
        ("adafactor", Layout(dp_shard=2)),
        pytest.param("muon", Layout(dp_replicate=2, dp_shard=2), marks=pytest.mark.deep),
        pytest.param("muon", Layout(dp_shard=2, tp=2), marks=pytest.mark.deep),
    ],
    ids=str,
)
def test_the_term_counts_the_bytes_that_ranks_gather(optimizer: str, layout: Layout) -> None:
    taken, matrices, vectors = run_ranks(gathered, layout.devices, optimizer, layout)[0]
    # Adafactor keeps one value of each of a vector's, and rows and columns of a matrix; Muon leaves vectors to AdamW.
    of_vectors = 3 * 4 * vectors if optimizer == "adafactor" else 0
    shards, tensor = gathered_bytes(columns_for(layout), np.array([float(matrices)]), optimizer)
    assert sum(taken) - of_vectors == float(shards[0] + tensor[0])
    assert sum(taken) > 0


def test_the_number_of_collectives_is_about_that_of_the_matrices() -> None:
    taken, _, _ = run_ranks(gathered, 2, "muon", Layout(dp_shard=2))[0]
    profile = profile_decoder(resolve_decoder(MODEL, 64, SEQ_LEN), SEQ_LEN)
    sheet = PricedTask(profile, cluster(2), 64, 1, "muon+adamw").sheet(plan(Layout(dp_shard=2)))
    assert 3 * float(tensors(sheet.heaviest)[0]) == pytest.approx(len(taken), rel=0.25)


def context(optimizer: str, devices: int = 4) -> PricedTask:
    return PricedTask(opened(), cluster(devices), 64, 10, optimizer)


def test_seconds_are_those_of_the_ring_and_of_the_copies() -> None:
    link = Link("process", measured(0.0), measured(1e9))
    free = PricedTask(opened(), cluster(4, links=(link,)), 64, 10, "muon+adamw")
    (term,) = terms_of(gather_components(free.sheet(plan(Layout(dp_shard=4)))), 0)
    gathered_in_all = 3 * 4 * 5e6  # weight, gradient and momentum of five million parameters
    assert term.value == pytest.approx(3 / 4 * gathered_in_all / 1e9 + 2 * gathered_in_all / 1e10)
    assert term.name == "optimizer gathering"
    assert term.clock == "optimizer"  # which runs then


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "a.module:factory"])
def test_rules_of_elements_gather_nothing(optimizer: str) -> None:
    assert gather_components(context(optimizer).sheet(plan(Layout(dp_shard=4)))) == []
    names = {term.name for term in memory_terms(context(optimizer), plan(Layout(dp_shard=4)))}
    assert "gathered for the update" not in names


def test_one_device_and_copies_gather_nothing() -> None:
    for layout in (Layout(), Layout(dp_replicate=4)):
        shown = context("muon+adamw", layout.devices)
        assert terms_of(gather_components(shown.sheet(plan(layout))), 0) == ()
        forecast = price(shown, plan(layout))
        assert not any("gather" in term.name and "optimizer" in term.name for term in forecast.time)


def test_every_device_updates_whole_parameters() -> None:
    one = optimizer_seconds(context("muon+adamw", 1), plan(Layout()))
    four = optimizer_seconds(context("muon+adamw"), plan(Layout(dp_shard=4)))
    assert 0.6 * one < four < one  # clipping alone is shared out
    assert optimizer_seconds(context("adamw"), plan(Layout(dp_shard=4))) == pytest.approx(
        optimizer_seconds(context("adamw", 1), plan(Layout())) / 4
    )


def test_what_is_gathered_is_held_beyond_what_the_step_has_left_free() -> None:
    small = dataclasses.replace(context("muon+adamw"), profile=_with_activations(0.0))
    held = {term.name: term.value for term in memory_terms(small, plan(Layout(dp_shard=4)))}
    free = held["activations"] + held["transients"] + held["weight copies"]
    assert held["gathered for the update"] == pytest.approx(3 * 4 * 1e6 - free)
    large = dataclasses.replace(context("muon+adamw"), profile=_with_activations(1e8))
    held = {term.name: term.value for term in memory_terms(large, plan(Layout(dp_shard=4)))}
    assert held["gathered for the update"] == 0.0


def _with_activations(elements: float) -> Any:
    kept = dict.fromkeys(
        ("saved_elements", "saved_fp32_elements", "selective_elements", "input_elements", "transient_elements"),
        elements,
    )
    profile = opened()
    return dataclasses.replace(profile, blocks=tuple(dataclasses.replace(b, **kept) for b in profile.blocks))


def test_rules_say_what_they_gather() -> None:
    of_parameters = {name for name, rule in RULES.items() if rule.scope == "parameter"}
    assert {name for name in RULES if gathered_values(name)} == of_parameters
    assert gathered_values("muon+adamw") == gathered_values("muon")
