"""Whether steps wait for the host: for its cores, for Python, or for the code between two steps."""

from __future__ import annotations

from paceline.units import format_seconds
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.communication import held_up_seconds
from paceline.verdict.steps_seen import StepsSeen

KIND = "host"
NEVER_AHEAD = 0.02  # of a step: a host that waits for its device for less than this is never ahead of it


def host_part(seen: StepsSeen) -> BoundPart:
    """Return the part of a step whose length the host decides."""
    return _with_device(seen) if seen.knows("idle") else _alone(seen)


def _alone(seen: StepsSeen) -> BoundPart:
    """Return the host's part where the host itself computes.

    That is for how long the thread that trains has no core, or waits for other threads that have none, whichever is
    longer; and what lies beside a step.
    """
    # On a busy machine a rank that has a core waits for one that has none: the rank that waits longest counts.
    # Scoring candidates, and measuring the noise scale, are passes: computing that lies beside the step's own.
    queued, between = seen.most("queued_here"), seen.most("between")
    other = max(0.0, seen.most("other") - seen.most("scoring"))
    evidence = []
    if seen.knows("queued_here"):
        evidence.append(f"the thread that trains had work and no core for {format_seconds(queued)} of a step")
    if (held_up := held_up_seconds(seen)) > queued:
        evidence = [f"ranks wait up to {format_seconds(held_up)} of a step for threads that had work and no core"]
        queued = held_up
    evidence.append(f"{format_seconds(other)} of a step are the loop's own, beside data and passes")
    if seen.knows("between"):
        evidence.append(f"{format_seconds(between)} lie between two steps: callbacks, records, and the loop's body")
    advice = (
        f"cores that no other process uses{', or fewer ranks on this machine' if seen.ranks > 1 else ''}"
        if queued >= other + between
        else "less work between two steps: rarer evaluations, callbacks and logging in the loop's body"
    )
    return BoundPart(KIND, share_of(queued + other + between, seen.whole_seconds), tuple(evidence), advice)


def _with_device(seen: StepsSeen) -> BoundPart:
    """Return the host's part where a device computes.

    That is what the device had nothing to do in, and the passes in which the host did not wait for the device.
    """
    beside = ("data", "saving", "evaluating", "scoring")
    dry = max(0.0, seen.most("idle") - sum(map(seen.most, beside)))
    evidence = [f"the device had nothing to do for {format_seconds(seen.most('idle'))} between two steps"]
    if seen.knows("awaited"):
        evidence.append(f"the host waited {format_seconds(seen.least('awaited'))} of a step for the device")
        if seen.most("awaited") + seen.most("held") < NEVER_AHEAD * seen.step_seconds:
            dry += seen.least("forward_backward")
            evidence.append("so it is never ahead: the passes take as long as it takes to start their kernels")
    advice = "plan.compile = true, a larger micro-batch, or less Python in the model: fewer and larger kernels"
    return BoundPart(KIND, share_of(dry, seen.whole_seconds), tuple(evidence), advice)
