"""Whether steps wait for their batches."""

from __future__ import annotations

from paceline.units import format_durations, format_seconds
from paceline.verdict.bound_part import BoundPart, share_of
from paceline.verdict.steps_seen import StepsSeen

KIND = "data"


def data_part(seen: StepsSeen) -> BoundPart:
    """Return the part of a step in which a rank waits for its batch.

    The rank that waits longest counts: the others wait for it in their collectives. On CUDA only the time counts in
    which the device has nothing to do, since the host may wait while the device still computes; and what the host reads
    while the device computes, where the device is done first.
    """
    waited = seen.most("data")
    if seen.knows("idle"):
        waited = min(waited, seen.most("idle")) + seen.most("held")
    evidence = ["a step of {} waits {} for its batch".format(*format_durations(seen.step_seconds, waited))]
    if seen.ranks > 1 and seen.whole:
        evidence.append(f"rank {seen.spreads['data'].rank} waits longest" if seen.knows("data") else "")
    if seen.knows("ready"):
        evidence.append(f"{seen.least('ready'):.0%} of the batches were there when they were wanted")
    if seen.knows("read"):
        evidence.append(f"reading one takes {format_seconds(seen.most('read'))}")
    advice = (
        "cheaper reads: token shards (`paceline data prepare`) instead of text, task.data.images_in_memory and"
        " cache_images, a data set with rows made ahead; `paceline bench data SPEC` shows what steps take without their"
        " loader"
    )
    return BoundPart(KIND, share_of(waited, seen.whole_seconds), tuple(filter(None, evidence)), advice)
