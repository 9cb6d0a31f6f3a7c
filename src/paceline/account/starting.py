"""When a run was starting: from the beginning of a start to its first step, and from a fault to the step after it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.history.records import Records
from paceline.spec.journal.kinds import RecoveryRecord
from paceline.spec.journal.timing.held_devices import Period, joined


def unclaimed_starting(records: Records, beside: NDArray[np.float64], held: Sequence[Period]) -> list[float]:
    """Return for each stretch of held time the seconds in which the run was starting, and nothing else.

    `beside` has the end and the seconds of each evaluation and save, which may come before a first step.
    """
    periods = starting_periods(records)
    beginnings = [began for began, _ in periods]
    ends, lengths = beside[:, 0], beside[:, 1]
    found = []
    for began, ended in held:
        total = 0.0
        first = max(0, bisect.bisect_right(beginnings, began) - 1)
        for low, high in periods[first : bisect.bisect_left(beginnings, ended)]:
            low, high = max(low, began), min(high, ended)
            if high > low:
                own = np.minimum(ends, high) - np.maximum(ends - lengths, low)
                total += max(0.0, high - low - float(np.clip(own, 0.0, None).sum()))
        found.append(total)
    return found


def starting_periods(records: Records) -> list[Period]:
    """Return the periods in order and without an overlap. A start without a step was starting until its end."""
    steps, found = records.steps, []
    made = steps.column("time") - np.nan_to_num(steps.column("total"))
    attempts = steps.column("attempt")
    for start in records.starts:
        if (span := records.spans.get(start.attempt or 1)) is None:
            continue
        began = span[0] if start.began is None else min(span[0], start.began)
        own = made[(attempts == (start.attempt or 1)) & np.isfinite(made)]
        found.append((began, float(own.min()) if len(own) else span[1]))
    for recovery in records.of(RecoveryRecord):
        total = recovery.seconds.get("total")
        if recovery.time is not None and total is not None and math.isfinite(total):
            found.append((recovery.time - total, recovery.time - (recovery.seconds.get("step") or 0.0)))
    return joined([(began, ended) for began, ended in found if ended > began])
