"""The verdict on a run's steps, from the journal's records."""

from __future__ import annotations

import numpy as np

from paceline.history.records import SECONDS, Records, number
from paceline.spec.journal.kinds import CheckpointRecord, RanksRecord
from paceline.verdict.steps_seen import seen_of
from paceline.verdict.verdict import BoundVerdict, judge


def bound_of(records: Records) -> BoundVerdict | None:
    """Return what bounds the steps of the newest start that made any; None where none has."""
    attempts = records.steps.column("attempt")
    if not len(attempts):
        return None
    last = int(attempts.max())
    steps = records.steps.where(attempts == last)
    counted = steps.where(np.arange(len(steps)) > 0) if len(steps) > 1 else steps  # the first one warms up
    outlook = records.start(last).outlook
    columns = {**{name: name for name in SECONDS}, "waiting": "waiting_seconds"}
    means = {name: float(counted.column(column).mean()) for name, column in columns.items()}
    first, counts = int(counted.column("step").min()), max(1, len(counted))
    saves = [each for each in records.of(CheckpointRecord) if (each.attempt or 1) == last and each.tier is None]
    # The save of the last step is waited for once the steps are made.
    between = [each for each in saves if first <= (each.step or 0) < int(counted.column("step").max())]
    means["saving"] = sum(number(each.cost_seconds) or 0.0 for each in between) / counts
    told = [record for record in records.of(RanksRecord) if (record.attempt or 1) == last]
    seen = seen_of(told, means, len(counted), records.start(last).world_size or 1)
    return None if seen is None else judge(seen, outlook)
