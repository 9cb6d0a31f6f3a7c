"""Steps: the timeline of one step of a planned pipeline."""

from __future__ import annotations

from pathlib import Path

from paceline.durable import write_output
from paceline.errors import ConfigError
from paceline.plan.choice import Choice
from paceline.plan.feasible.stages import blocks_per_stage
from paceline.plan.schedules.draw import timelines_svg
from paceline.plan.schedules.timeline import StageTimes, Timeline, pipeline_timeline
from paceline.plan.schedules.trace import pipeline_trace
from paceline.spec.plan import Plan
from paceline.spec.profile import BlockProfile, ModelProfile

DRAWN_PASSES = 6000  # more boxes than that are no picture any more


def write_timeline(planned: Choice, path: Path) -> None:
    """Write a step of the plan's pipeline as a picture (.svg) or as a trace (.json).

    Raises ConfigError for a plan without a pipeline, for other endings and for pictures of too many passes, and
    StorageError where the file cannot be written.
    """
    if path.suffix not in (".svg", ".json"):
        raise ConfigError(f"--timeline {path}", "a picture ends in .svg, a trace in .json", f"{path}.svg")
    timeline = plan_timeline(planned)
    passes = sum(map(len, timeline.rows))
    if path.suffix == ".svg" and passes > DRAWN_PASSES:
        raise ConfigError(f"a picture of {passes:,} passes", "nobody could read it", f"{path.with_suffix('.json')}")
    write_output(path, timelines_svg([timeline]) if path.suffix == ".svg" else pipeline_trace(timeline))


def plan_timeline(planned: Choice) -> Timeline:
    """Return one step of the planned pipeline, by its exact schedule.

    Stages take time in proportion to their FLOPs, twice as long backward as forward, and a forward pass more under full
    recompute, or its part where a memory budget gives that to some blocks. The busiest device is busy for as long as
    the forecast's terms but those of the pipeline itself.
    """
    plan, profile = planned.plan, planned.profile
    if plan.layout.pp == 1:
        raise ConfigError(f"the plan has no pipeline: {plan}", "a timeline shows its stages", "--set plan.pp=2")
    flops = stage_flops(profile, plan)
    busiest = max(sum(flops[device :: plan.layout.pp]) for device in range(plan.layout.pp))
    terms = planned.forecast.time
    busy = sum(term.value for term in terms if term.kind not in ("sends", "bubble"))
    sends = sum(term.value for term in terms if term.kind == "sends")
    again = plan.recompute_share("full")
    unit = busy / plan.accumulation / busiest / (3 + again)  # seconds of a forward FLOP
    stages = [StageTimes(work * unit, work * unit * (1 + again), work * unit) for work in flops]
    hops = 2 * (plan.accumulation * plan.virtual_stages + plan.layout.pp - 1)
    return pipeline_timeline(plan.schedule, plan.layout.pp, plan.accumulation, stages, sends / hops)


def stage_flops(profile: ModelProfile, plan: Plan) -> list[float]:
    """Return the forward FLOPs of a sample in every stage; what stands before and after the blocks is with the ends."""
    chain = [block.recomputable for block in profile.blocks]
    first, last = chain.index(True), len(chain) - chain[::-1].index(True)
    inner = [block for block in profile.blocks[first:last] if block.recomputable]
    stages, begin = [], 0
    for count in blocks_per_stage(plan, len(inner)):
        stages.append(sum(map(_flops, inner[begin : begin + count])))
        begin += count
    stages[0] += sum(map(_flops, profile.blocks[:first]))
    stages[-1] += sum(map(_flops, profile.blocks[last:]))
    return stages


def _flops(block: BlockProfile) -> float:
    return block.matmul_flops + block.attention_flops
