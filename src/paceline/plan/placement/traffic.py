"""What a device sends along every axis of the mesh in a step: the collectives that the price counts, on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.cost.collectives.collective import Collective
from paceline.plan.cost.collectives.of_a_step import collectives
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.ring import wire_share
from paceline.spec.plan import Plan

AXES = ("tp", "cp", "ep", "dp_shard", "pp", "dp_replicate")
STANDS_FOR = {"fsdp": "dp_shard", "expert_shard": "dp_shard"}  # devices that share one copy's state, those of cp too
NAMES = {"all_gather": "all-gathers", "reduce_scatter": "reduce-scatters", "all_reduce": "all-reduces",
         "all_to_all": "all-to-alls", "send": "sends"}  # fmt: skip


@dataclass(frozen=True)
class AxisTraffic:
    """Bytes that one device sends along an axis in a step, and how they come about."""

    axis: str
    bytes_per_step: float
    text: str


def axis_traffic(context: PricedTask, plan: Plan) -> tuple[AxisTraffic, ...]:
    """Return the traffic of the axes that span several devices, in the order of AXES.

    `dp_shard` stands for all devices that share one copy's state, those of `cp` included.
    """
    sheet = context.sheet(plan)
    # A ring over all data ranks goes through the links of its outer axis, the slower ones.
    stands_for = {**STANDS_FOR, "data": "dp_replicate" if plan.layout.dp_replicate > 1 else "dp_shard"}
    sent: dict[str, list[tuple[float, str]]] = {axis: [] for axis in AXES}
    for one in collectives(sheet):
        size, _ = plan.layout.group(one.axis)
        if size > 1:
            wire = float(wire_share(one.kind, size) * one.buffer_bytes[0])
            sent[stands_for.get(one.axis, one.axis)].append((wire, _told(one)))
    degrees = {axis: plan.layout.group(axis)[0] for axis in AXES} | {"dp_shard": plan.layout.state_degree}
    return tuple(
        AxisTraffic(axis, sum(wire for wire, _ in parts), ", ".join(text for wire, text in parts if wire))
        for axis, parts in sent.items()
        if degrees[axis] > 1
    )


def _told(one: Collective) -> str:
    calls, whole = float(one.calls[0]), float(one.buffer_bytes[0])
    return f"{calls:,.4g} {NAMES[one.kind]} of {one.what} ({whole:.3g} B together)"
