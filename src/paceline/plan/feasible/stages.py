"""Pipeline stages: which blocks each has, which device runs it, and what a schedule asks of a plan. Imports no torch.

A stage is a run of consecutive blocks of the chain. The first also has what comes before the blocks (the embedding),
the last what comes after (norm, head and loss). A device runs `virtual_stages` of them: stage s runs on device s mod pp
(Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

import dataclasses

from paceline.plan.feasible.split import split_by_cost
from paceline.plan.feasible.torch_version import HALVED_BACKWARD, older_refusal
from paceline.spec.plan import Plan, PlanSpec, parse_stages
from paceline.spec.profile import ModelProfile

INTERLEAVED = ("interleaved", "zero-bubble")  # schedules that may run several stages on each device
SPLIT_BACKWARD = ("zero-bubble",)  # schedules whose backward pass is one for inputs and a later one for weights


def stage_count(plan: Plan) -> int:
    """Return the number of stages over all devices."""
    return plan.layout.pp * plan.virtual_stages


def stages_of(pp_rank: int, plan: Plan) -> tuple[int, ...]:
    """Return the indices of the stages that a device runs, ascending."""
    return tuple(range(pp_rank, stage_count(plan), plan.layout.pp))


def blocks_per_stage(plan: Plan, blocks: int) -> tuple[int, ...]:
    """Return how many of the chain's blocks each stage has: the plan's split, or one as even as can be without it."""
    count = stage_count(plan)
    return plan.stages or tuple(blocks * (i + 1) // count - blocks * i // count for i in range(count))


def with_pipeline(plan: Plan, asked: PlanSpec, profile: ModelProfile) -> Plan:
    """Return the plan with its schedule, stages and a number of micro-batches that fills the pipeline.

    What `asked` leaves open: 1F1B (interleaved where several stages per device are asked for), stages split by cost.
    A plan without a pipeline is returned as it is.
    """
    pp = plan.layout.pp
    if pp == 1:
        return plan
    schedule = asked.schedule
    if schedule == "auto":
        schedule = "interleaved" if asked.virtual_stages > 1 else "1f1b"
    virtual = asked.virtual_stages or (2 if schedule == "interleaved" else 1)
    return dataclasses.replace(
        plan,
        schedule=schedule,
        virtual_stages=virtual,
        stages=parse_stages(asked.stages) or split_by_cost(profile, pp * virtual),
        accumulation=fill_pipeline(plan.accumulation, pp, schedule),
    )


def fill_pipeline(accumulation: int, pp: int, schedule: str) -> int:
    """Return the smallest number of micro-batches, not below `accumulation`, with which a schedule runs.

    A pipeline needs a micro-batch per device to have all of them at work; the interleaved schedules take them in rounds
    of equal size.
    """
    count = max(accumulation, pp) if pp > 1 else accumulation
    while schedule in INTERLEAVED and count % max(1, count // pp):
        count += 1
    return count


def refusal(plan: Plan, blocks: int) -> str | None:
    """Return why a plan's pipeline cannot run on a chain of `blocks` blocks, None where it can."""
    return stage_refusal(plan, blocks) or fill_refusal(plan) or split_backward_refusal(plan)


def stage_refusal(plan: Plan, blocks: int) -> str | None:
    """Return why a chain of `blocks` blocks does not make the plan's stages, each of which needs one at least."""
    pp, count = plan.layout.pp, stage_count(plan)
    if pp == 1:
        return None if plan.virtual_stages == 1 else "virtual stages need a pipeline of pp > 1"
    if plan.virtual_stages > 1 and plan.schedule not in INTERLEAVED:
        return f"the schedule {plan.schedule} runs one stage per device; interleaved and zero-bubble run several"
    if blocks < count:
        return f"the model's {blocks} blocks are fewer than {count} pipeline stages"
    if plan.stages and (len(plan.stages) != count or sum(plan.stages) != blocks or min(plan.stages) < 1):
        return f"stages of {', '.join(map(str, plan.stages))} blocks are not {count} stages of the model's {blocks}"
    return None


def fill_refusal(plan: Plan) -> str | None:
    """Return why the plan's micro-batches do not fill its pipeline, and how many would."""
    needed = fill_pipeline(plan.accumulation, plan.layout.pp, plan.schedule)
    if needed == plan.accumulation:
        return None
    return (
        f"{plan.accumulation} micro-batches do not fill a pipeline of {plan.layout.pp} ({plan.schedule}); {needed} do"
    )


def split_backward_refusal(plan: Plan) -> str | None:
    """Return what rules out a schedule whose backward pass is split into one for inputs and one for weights."""
    if plan.schedule not in SPLIT_BACKWARD or plan.layout.pp == 1:
        return None
    layout = plan.layout
    if layout.dp_shard * layout.cp * layout.dp_replicate > 1:
        return f"{plan.schedule} takes weight gradients past the hooks with which FSDP2 sums them over ranks"
    if plan.recompute in ("selective", "budget"):
        return f"{plan.schedule} walks the graph twice, and selective recompute gives up what it kept after one walk"
    if plan.compile:
        return f"{plan.schedule} cannot split the backward pass of compiled blocks"
    return older_refusal(HALVED_BACKWARD, plan.schedule, "whose split backward pass is right")


def pipeline_limits(plan: Plan, profile: ModelProfile) -> str | None:
    """Return why a plan's pipeline cannot run on a model, None where it can."""
    return refusal(plan, sum(block.recomputable for block in profile.blocks))
