"""Small profiles and clusters with round numbers, for tests of the planner."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from paceline.plan.cost.components import terms_of
from paceline.plan.cost.memory.peak_memory import memory_components
from paceline.plan.cost.pricing import forward_backward_components
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.time.axes import axis_components, bubble_components
from paceline.plan.cost.time.compute import optimizer_component
from paceline.plan.cost.time.network import network_components
from paceline.plan.search.search import SearchResult
from paceline.spec.cluster import Cluster, Device, Figure, Link
from paceline.spec.forecast import Term
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.profile import BlockProfile, ModelProfile


def measured(value: float) -> Figure:
    return Figure(value, "measured", "a round number")


def block(name: str, kind: str = "decoder", recomputable: bool = True, **changes: float) -> BlockProfile:
    base = BlockProfile(
        name=name,
        kind=kind,
        parameters=1_000_000,
        matmul_flops=2e9,
        attention_flops=1e8,
        moved_elements=1e6,
        saved_elements=4e5,
        saved_fp32_elements=1e5,
        selective_elements=2e5,
        input_elements=5e4,
        transient_elements=1e5,
        operators=30,
        matmul_width=512,
        recomputable=recomputable,
    )
    return dataclasses.replace(base, **changes)


def profile(layers: int = 4, **changes: float) -> ModelProfile:
    blocks = [block("embedding", "embedding", False, matmul_flops=0.0, attention_flops=0.0)]
    blocks += [block(f"layers.{index}", **changes) for index in range(layers)]
    closed = dict.fromkeys(("cp", "tp", "pp", "ep"), "no rules")
    return ModelProfile("round", tuple(blocks), tokens_per_sample=256, source="analytic", closed_axes=closed)


def opened(model: ModelProfile | None = None, *axes: str) -> ModelProfile:
    """Return the profile with every axis open, or only those named."""
    model = model or profile()
    closed = {axis: why for axis, why in (model.closed_axes or {}).items() if axes and axis not in axes}
    return dataclasses.replace(model, closed_axes=closed)


def cluster(devices: int = 4, kind: str = "cpu", memory_bytes: float = 64e9, **changes: object) -> Cluster:
    device = Device(
        name="round device",
        kind=kind,
        memory_bytes=measured(memory_bytes),
        memory_bytes_per_second=measured(1e10),
        matmul_flops={"fp32": ((64, 1e11), (1024, 1e11)), "bf16": ((64, 4e11), (1024, 4e11))},
        matmul_source="measured",
        peak_flops={},
        launch_seconds=measured(1e-6),
        runtime_bytes=measured(1e8),
        attention_flops={"fp32": ((128, 5e10),), "bf16": ((128, 5e10),)},
    )
    base = Cluster(
        device=device,
        devices=devices,
        devices_per_node=devices,
        links=(Link("process", measured(1e-4), measured(1e9)),),
        price_usd_per_device_hour=measured(2.0),
        watts_per_device=measured(500.0),
        carbon_g_per_kwh=Figure(math.nan, "unknown"),
    )
    return dataclasses.replace(base, **changes)


def plan(layout: Layout, micro_batch: int = 1, batch: int = 64, **changes: object) -> Plan:
    accumulation = accumulation_for(batch, layout.data_degree, micro_batch)
    base = Plan(layout, 3, micro_batch, accumulation, batch, "none", "fp32")
    return dataclasses.replace(base, **changes)


def plans_of(result: SearchResult) -> list[Plan]:
    """Return the plans that fit, best first, without their prices: a candidate's has each term in words."""
    sheet = Sheet(result.candidates.context, result.candidates.columns)
    return [sheet.plan(place) for place in range(len(sheet.columns))]


def compute_terms(context: PricedTask, chosen: Plan) -> tuple[Term, ...]:
    return terms_of(forward_backward_components(context.sheet(chosen))[0], 0)


def axis_terms(context: PricedTask, chosen: Plan) -> tuple[Term, ...]:
    return terms_of(axis_components(context.sheet(chosen)), 0)


def bubble_seconds(context: PricedTask, chosen: Plan) -> float:
    sheet = context.sheet(chosen)
    (bubble,) = terms_of(bubble_components(sheet, *forward_backward_components(sheet)), 0)
    return bubble.value


def network_terms(context: PricedTask, chosen: Plan, forward_backward_seconds: float) -> tuple[Term, ...]:
    return terms_of(network_components(context.sheet(chosen), np.array([forward_backward_seconds])), 0)


def memory_terms(context: PricedTask, chosen: Plan) -> tuple[Term, ...]:
    return terms_of(memory_components(context.sheet(chosen)), 0)


def optimizer_seconds(context: PricedTask, chosen: Plan) -> float:
    return float(optimizer_component(context.sheet(chosen)).values[0])
