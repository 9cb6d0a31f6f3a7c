"""Options of the plan that the chosen layout has no use for, each with what would use it. Imports no torch."""

from __future__ import annotations

from paceline.config.values import literal
from paceline.spec.plan import Plan, PlanSpec


def uses(plan: Plan) -> dict[str, tuple[bool, str]]:
    """Return whether a plan uses each option that only some plans use, and why it does not where it does not."""
    pipelined = (plan.layout.pp > 1, "there is one pipeline stage: plan.pp is 1")
    return {
        "zero": (plan.layout.state_degree > 1, "no state is sharded: plan.dp_shard and plan.cp are 1"),
        "gradients": (plan.layout.state_degree > 1, "no state is sharded: plan.dp_shard and plan.cp are 1"),
        "schedule": pipelined,
        "virtual_stages": pipelined,
        "stages": pipelined,
        "expert_slots": (plan.layout.ep > 1, "no ranks share experts: plan.ep is 1"),
        "cp_method": (plan.layout.cp > 1, "no ranks share a sequence: plan.cp is 1"),
        "recompute_save": (
            plan.recompute in ("selective", "budget"), f"recompute = {plan.recompute} chooses nothing to keep"
        ),
    }  # fmt: skip


def unused_options(plan: Plan, asked: PlanSpec) -> tuple[str, ...]:
    """Return a sentence for each option that a spec sets to something of its own and that the plan has no use for."""
    default = PlanSpec()
    return tuple(
        f"plan.{name} = {_shown(getattr(asked, name))} changes nothing: {because}"
        for name, (used, because) in uses(plan).items()
        if not used and getattr(asked, name) != getattr(default, name)
    )


def _shown(value: object) -> str:
    return literal(list(value) if isinstance(value, tuple) else value)
