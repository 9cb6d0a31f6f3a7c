"""Whether training waits for its evaluations."""

from __future__ import annotations

from paceline.units import format_durations
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.steps_seen import StepsSeen

KIND = "evaluation"


def evaluating_part(seen: StepsSeen) -> BoundPart | None:
    """Return the part of a step, with what lies between two steps, in which the run evaluates or writes texts.

    None where it does neither. Reading held-out samples is a part of it: nobody reads those ahead.
    """
    took = seen.most("evaluating")
    if took <= 0:
        return None
    step, taken = format_durations(seen.step_seconds, took)
    advice = (
        "a longer run.evaluate_every, fewer run.evaluate_samples, or held-out data that are cheaper to read"
        " (`paceline data prepare`)"
    )
    evidence = (f"evaluations and texts take {taken} for each step, and a step itself {step}",)
    return BoundPart(KIND, share_of(took, seen.whole_seconds), evidence, advice)
