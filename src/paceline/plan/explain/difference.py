"""Difference: plans told apart, and the options that make the planner take a given one."""

from __future__ import annotations

from paceline.plan.cost.columns import AXES
from paceline.spec.plan import Plan, counts_text


def difference(chosen: Plan, other: Plan) -> str:
    """Return what another plan has in place of the chosen one's settings: "tp 4→2, micro-batch 1 x 8"."""
    mine, theirs = chosen.layout, other.layout
    parts = [
        f"{axis} {getattr(mine, axis)}→{getattr(theirs, axis)}"
        for axis in AXES
        if getattr(mine, axis) != getattr(theirs, axis)
    ]
    if theirs.state_degree > 1 and (other.class_text != chosen.class_text or mine.state_degree == 1):
        parts.append(other.class_text)
    pipelines = [(plan.schedule, plan.virtual_stages) for plan in (chosen, other)]
    if theirs.pp > 1 and (pipelines[0] != pipelines[1] or mine.pp == 1):
        several = f" with {other.virtual_stages} stages a device" if other.virtual_stages > 1 else ""
        parts.append(f"{other.schedule}{several}")
    if (other.micro_batch, other.accumulation) != (chosen.micro_batch, chosen.accumulation):
        parts.append(f"micro-batch {other.micro_batch} x {other.accumulation}")
    if (other.recompute, other.recompute_budget) != (chosen.recompute, chosen.recompute_budget):
        share = f" {other.recompute_budget:g}" if other.recompute == "budget" else ""
        parts.append("no recompute" if other.recompute == "none" else f"{other.recompute} recompute{share}")
    return ", ".join(parts) or "the same plan"


def plan_options(plan: Plan, has_experts: bool) -> tuple[str, ...]:
    """Return the options of a spec that leave the planner this plan alone, such as "plan.tp=2".

    Degrees of 1 are left out: the others make up all devices. Only `ep` does not multiply.
    """
    layout = plan.layout
    options = [f"plan.{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    options += ["plan.ep=1"] if has_experts and layout.ep == 1 else []
    if layout.state_degree > 1:
        options += [f"plan.zero={plan.zero}", f"plan.gradients={'whole' if plan.reduces_once else 'shards'}"]
    options += [f"plan.micro_batch={plan.micro_batch}", f"plan.recompute={plan.recompute}"]
    options += [f"plan.rows={counts_text(plan.rows)}"] if plan.rows else []
    options += [f"plan.recompute_budget={plan.recompute_budget:g}"] if plan.recompute == "budget" else []
    options += [f"plan.offload={plan.offload}"] if plan.offload != "none" else []
    options += [f"plan.frozen={plan.frozen}"] if plan.frozen != "as-model" else []
    options.append(f"plan.precision={plan.precision}")
    if layout.pp > 1:
        options += [f"plan.schedule={plan.schedule}", f"plan.virtual_stages={plan.virtual_stages}"]
        options += [f"plan.stages={counts_text(plan.stages)}"] if plan.stages else []
    return tuple(options)
