"""How often this run has failed so far, and the rate of failures to expect from that."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.spec.journal.kinds import RecoveryRecord, RunEnded, RunStarted
from paceline.spec.journal.reading import read_kind
from paceline.spec.journal.timing.held_devices import held_in

FAILED = "failed"


@dataclass(frozen=True)
class FailuresSeen:
    """Failures of a run, in so many seconds of its devices until `since`, which counts on."""

    failures: int = 0
    device_seconds: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    def mtbf_seconds(self, assumed: float, devices: int) -> float:
        """Return the mean time between failures of a world of so many devices, of which `assumed` seconds were assumed.

        What was assumed counts as one failure in that time (the mean of a gamma distribution of the rate with that
        prior); where nothing was, the run's own failures say it all.
        """
        seen = self.device_seconds / devices + time.perf_counter() - self.since
        if math.isfinite(assumed):
            return (assumed + seen) / (1 + self.failures)
        return seen / self.failures if self.failures else math.inf


def failures_seen(run_dir: Path) -> FailuresSeen:
    """Return how often a run has failed: ranks that were lost, and earlier starts that failed or left no end."""
    lost = sum(each.rank is not None for each in read_kind(run_dir, RecoveryRecord))
    ended = {each.attempt: each.status for each in read_kind(run_dir, RunEnded)}
    starts = [each.attempt for each in read_kind(run_dir, RunStarted)]
    broken = sum(ended.get(attempt, FAILED) == FAILED for attempt in starts[:-1])
    return FailuresSeen(lost + broken, sum(each.seconds * each.devices for each in held_in(run_dir)))
