"""The price of a model of which most is frozen: no gradients, no state, and fewer products and bytes on the wire."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from plan_examples import cluster, compute_terms, network_terms
from plan_examples import plan as example_plan

from paceline.plan.cost.memory.peak_memory import memory_components
from paceline.plan.cost.sheet import PricedTask
from paceline.spec.adapt.adapter import Adaptation, AdapterSpec
from paceline.spec.layout import Layout
from paceline.spec.profile import ModelProfile
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.models.sizes import resolve_decoder
from paceline.task.profile.adapted import adapted_profile
from paceline.task.profile.decoder import profile_decoder
from paceline.units import format_bytes

VOCAB, SEQ = 61, 16
MODEL = ModelSpec("llama-1m", hidden=32, layers=3, heads=4, kv_heads=2, ffn=48, vocab=VOCAB, tied=False)
LORA = AdapterSpec(kind="lora", rank=4)


def profiled(spec: AdapterSpec) -> ModelProfile:
    model = build_model(MODEL, VOCAB, SEQ, 3, adaptation=Adaptation(spec))
    return adapted_profile(profile_decoder(resolve_decoder(MODEL, VOCAB, SEQ), SEQ), model)


def priced(spec: AdapterSpec) -> PricedTask:
    return PricedTask(profiled(spec), cluster(), 64, 10)


def memory_of(spec: AdapterSpec) -> dict[str, float]:
    sheet = priced(spec).sheet(example_plan(Layout(), precision="bf16"))
    return {column.name: float(column.values[0]) for column in memory_components(sheet)}


def test_the_frozen_base_has_no_gradients_and_no_state_and_rests_in_two_bytes() -> None:
    full, lora = memory_of(AdapterSpec()), memory_of(LORA)
    trained, parameters = profiled(LORA).trained_parameters, profiled(LORA).parameters
    assert full["gradients"] / 4 == full["optimizer state"] / 8 == profiled(AdapterSpec()).parameters
    assert lora["gradients"] / 4 == lora["optimizer state"] / 8 == trained and lora["weights"] / 4 == parameters
    narrow = 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    rested = memory_of(dataclasses.replace(LORA, base_dtype="bf16"))
    assert rested["weights"] == lora["weights"] - 2 * narrow and rested["weight copies"] == 2 * (parameters - narrow)


def test_products_of_the_backward_pass_and_what_is_reduced() -> None:
    chosen = example_plan(Layout(dp_replicate=2))
    for spec, low, high in ((AdapterSpec(), 2.0, 2.0), (LORA, 1.0, 1.4)):
        seconds = {term.name: term.value for term in compute_terms(priced(spec), chosen)}
        assert low <= round(seconds["products, backward"] / seconds["products, forward"], 9) <= high
    full, lora = (
        next(term.value for term in network_terms(priced(spec), chosen, 1.0) if term.name == "gradient reduction")
        for spec in (AdapterSpec(), LORA)
    )
    assert lora < full  # most of so small a model is latency


def test_the_update_is_of_what_is_trained() -> None:
    from paceline.plan.cost.time.compute import optimizer_component

    full, lora = (float(optimizer_component(priced(spec).sheet(example_plan(Layout()))).values[0])
                  for spec in (AdapterSpec(), LORA))  # fmt: skip
    share = profiled(LORA).trained_parameters / profiled(AdapterSpec()).parameters
    assert abs(lora / full - share) < 1e-9


def test_unpacking_four_bits_takes_time_for_every_micro_batch_and_for_every_pass() -> None:
    """Twice without recompute, a third time with it, and once more for DoRA's norm; the same at any micro-batch."""
    nf4 = dataclasses.replace(LORA, base_dtype="nf4")

    def seconds(spec: AdapterSpec, **options: Any) -> float:
        terms = compute_terms(priced(spec), example_plan(Layout(), precision="bf16", **options))
        return sum(term.value for term in terms if term.name == "unpacking of four bits")

    once = seconds(nf4, micro_batch=64) / 2
    assert once > 0 and seconds(LORA, micro_batch=64) == 0
    assert seconds(nf4, micro_batch=32) == pytest.approx(4 * once)
    assert seconds(nf4, micro_batch=64, recompute="full") == pytest.approx(3 * once)
    dora = dataclasses.replace(nf4, kind="dora")
    assert seconds(dora, micro_batch=64) == pytest.approx(3 * once)
    assert seconds(dataclasses.replace(dora, dropout=0.1), micro_batch=64) == pytest.approx(5 * once)


def test_whole_four_bits_say_what_spreading_them_would_save_and_take() -> None:
    nf4 = dataclasses.replace(LORA, base_dtype="nf4")

    def said(layout: Layout) -> str:
        terms = compute_terms(priced(nf4), example_plan(layout, precision="bf16"))
        return next(term.formula for term in terms if term.name == "unpacking of four bits")

    saved = format_bytes(0.5 * 3 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) / 2)
    for layout in (Layout(dp_shard=2), Layout(dp_replicate=2)):
        assert f"spread over 2 data ranks would save {saved} a device, and gathering take " in said(layout)
    assert "spread" not in said(Layout(pp=2)) and "spread" not in said(Layout())
