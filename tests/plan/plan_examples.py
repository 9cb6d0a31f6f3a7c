"""Small profiles and clusters with round numbers, for tests of the planner."""

from __future__ import annotations

import dataclasses
import math

from paceline.cluster.cluster import Cluster, Device, Figure, Link
from paceline.plan.layout import Layout, accumulation_for
from paceline.plan.plan import Plan
from paceline.task.profile import BlockProfile, ModelProfile


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
    return ModelProfile(
        "round",
        tuple(blocks),
        tokens_per_sample=256,
        source="analytic",
        closed_axes={"tp": "no rules", "cp": "no rules"},
    )


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
