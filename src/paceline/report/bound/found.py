"""The verdict on a run's steps, from the journal's records."""

from __future__ import annotations

import numpy as np

from paceline.observe.verdict.seen import seen_of
from paceline.observe.verdict.verdict import BoundVerdict, judge
from paceline.report.records import SECONDS, Records
from paceline.spec.journal.kinds import RanksRecord


def bound_of(records: Records) -> BoundVerdict | None:
    """Return what bounds the steps of the newest start that made any; None where none has."""
    attempts = records.steps.column("attempt")
    if not len(attempts):
        return None
    last = int(attempts.max())
    steps = records.steps.where(attempts == last)
    counted = steps.where(np.arange(len(steps)) > 0) if len(steps) > 1 else steps  # the first one warms up
    columns = {**{name: name for name in SECONDS}, "waiting": "waiting_seconds"}
    means = {name: float(counted.column(column).mean()) for name, column in columns.items()}
    told = [record for record in records.of(RanksRecord) if (record.attempt or 1) == last]
    seen = seen_of(told, means, len(counted), records.start(last).world_size or 1)
    return None if seen is None else judge(seen)
