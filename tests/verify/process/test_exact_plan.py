"""A layout that is given is proven with the options of its plan: each is taken, or is one that a proof leaves out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.errors import DoesNotFit
from paceline.spec.adapt.adapter import AdapterSpec
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.sync import Sync
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.data.facts import DataFacts
from paceline.task.profile.of_task import profile_task
from paceline.units import Amount
from paceline.verify.process.start import exact_plan

FACTS = DataFacts(1000, 16, "tokens", 257, 0, 0, "text", "none")
LEFT_OUT = {"compile"}  # docs/guide/plan/verifying.md says so
# An option -> a value that is not its default, what the plan has of it, and the layout that it needs.
GIVEN: dict[str, tuple[Any, Any, dict[str, int]]] = {
    "zero": (2, 2, {"dp_shard": 2}),
    "micro_batch": (3, 3, {"dp_shard": 2}),
    "rows": ("9+5", (9, 5), {"dp_shard": 2}),
    "recompute": ("full", "full", {"dp_shard": 2}),
    "recompute_save": (("attention",), ("attention",), {"dp_shard": 2}),
    "recompute_budget": (0.5, 0.5, {"dp_shard": 2}),
    "offload": ("optimizer", "optimizer", {"dp_shard": 2}),
    "frozen": ("spread", "spread", {"dp_shard": 2}),
    "precision": ("bf16", "bf16", {"dp_shard": 2}),
    "schedule": ("gpipe", "gpipe", {"pp": 2}),
    "virtual_stages": (2, 2, {"pp": 2}),
    "stages": ("3+1", (3, 1), {"pp": 2}),
    "cp_method": ("ring", "ring", {"cp": 2}),
    "expert_slots": (1.5, 1.5, {"dp_shard": 2}),
    "sync": (Sync(kind="outer", every=2), Sync(kind="outer", every=2), {"dp_replicate": 2}),
}


def spec_of(base_dtype: str = "") -> Spec:
    model = ModelSpec("llama-1m", hidden=32, layers=4, heads=4, kv_heads=2, ffn=48, vocab=257)
    adapter = AdapterSpec(kind="lora", rank=4, alpha=8, base_dtype=base_dtype)
    return Spec(task=Task("p", model, DataSpec(seq_len=16), global_batch=Amount(14, "samples"), adapter=adapter))


def proven(name: str, value: Any, layout: dict[str, int]) -> Plan:
    spec = spec_of("nf4" if name == "frozen" else "")
    more = {"schedule": "interleaved"} if name == "virtual_stages" else {}
    return exact_plan(spec, PlanSpec(**layout, **more, **{name: value}), profile_task(spec.task, FACTS))


def test_every_option_of_a_plan_is_tried_here() -> None:
    both = {field.name for field in dataclasses.fields(Plan)} & {field.name for field in dataclasses.fields(PlanSpec)}
    assert set(GIVEN) == both - LEFT_OUT


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_asked_for_is_in_the_plan(name: str) -> None:
    value, expected, layout = GIVEN[name]
    assert getattr(proven(name, value, layout), name) == expected


def test_what_cannot_be_spread_is_refused() -> None:
    spec = spec_of()  # whose frozen weights are in no four bits
    with pytest.raises(DoesNotFit, match="forward"):
        exact_plan(spec, PlanSpec(dp_shard=2, frozen="spread"), profile_task(spec.task, FACTS))
