"""Whether steps wait for their pipeline to fill and to drain."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.spec.journal.record import number
from paceline.units import format_seconds
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.steps_seen import StepsSeen

KIND = "pipeline"


def bubble_seconds(seen: StepsSeen, outlook: Mapping[str, object] | None) -> float:
    """Return how long the slowest stage waits in a step while the pipeline fills and drains; 0 without a pipeline.

    The planner says how much of the computing that is, and the computing is measured. On a CPU the rank cannot have
    waited for more than it waited at all; on CUDA the wait lies within the passes.
    """
    bubble, passes = (number((outlook or {}).get(name)) for name in ("bubble_seconds", "pass_seconds"))
    if not bubble or not passes or seen.ranks < 2:
        return 0.0
    if seen.knows("waiting", "computing"):
        return min(seen.least("waiting"), seen.most("computing") * bubble / passes)
    return seen.most("forward_backward") * bubble / (passes + bubble)


def pipeline_part(seen: StepsSeen, bubble: float) -> BoundPart | None:
    """Return the part of a step that the bubble takes, so many seconds of it; None where there is none."""
    if not bubble > 0:
        return None
    of = f"of a step of {format_seconds(seen.step_seconds)}"
    evidence = (f"the slowest stage waits {format_seconds(bubble)} {of} while the pipeline fills and drains",
                "what the schedule leaves idle, by forecast, of the computing that was measured")  # fmt: skip
    advice = (
        "more micro-batches in a step (a smaller plan.micro_batch, a larger task.global_batch), fewer stages, or"
        " plan.schedule = 'interleaved' or 'zero-bubble'"
    )
    return BoundPart(KIND, share_of(bubble, seen.whole_seconds), evidence, advice)
