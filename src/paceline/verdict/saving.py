"""Whether training waits for its checkpoints."""

from __future__ import annotations

from paceline.units import format_seconds
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.steps_seen import StepsSeen

KIND = "checkpoint"


def saving_part(seen: StepsSeen) -> BoundPart | None:
    """Return the part of a step, with what lies between two steps, in which training waits for checkpoints.

    Where checkpoints are written beside training, a save that is not done when the next one is due is waited for.
    """
    if not seen.knows("saving"):
        return None
    waited = seen.most("saving")
    evidence = [f"training waits {format_seconds(waited)} for each step for its checkpoints"]
    if waited > 0:
        evidence.append(f"a step itself takes {format_seconds(seen.step_seconds)}")
    advice = (
        "a longer run.checkpoint_every, or faster storage for run.dir; run.checkpoints.asynchronous = 'on' writes"
        " beside training, and run.checkpoints.memory_every keeps frequent ones in memory"
    )
    return BoundPart(KIND, share_of(waited, seen.whole_seconds), tuple(evidence), advice)
