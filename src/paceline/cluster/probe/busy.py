"""How busy this machine is with other work: what makes a probe's figures too low, and how long such figures count."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.cluster.probe.records import ProbeRecord

LOOK_SECONDS = 0.5
MOST_BUSY, MOST_STOLEN = 0.15, 0.03  # of the cores: what an idle machine's own services take stays below
LEAST_CORE_SHARE = 0.85  # of its cores that a probe got, on a machine that was idle
MOST_SPREAD = 0.5  # of the repeats of a training step
COUNTS_SECONDS = 3600.0  # figures of a busy machine, from their date on
BUSY_ERROR = 0.6  # relative half-width of the interval that they earn: as assumed figures do
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Times:
    """Seconds (in ticks) that all cores have spent since the start: at work, idle, and taken by the host."""

    busy: int
    idle: int
    stolen: int


def read_times(path: Path = STAT) -> Times | None:
    """Return the times that the kernel tells; None where it tells none."""
    try:
        numbers = [int(number) for number in path.read_text("utf-8").splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    user, nice, system, idle, waiting, hard, soft, stolen = [*numbers, *[0] * (8 - len(numbers))]
    return Times(user + nice + system + hard + soft, idle + waiting, stolen)


def reasons_between(before: Times | None, after: Times | None) -> list[str]:
    """Return what was in the way between two looks at an otherwise idle moment, in words; empty where nothing was."""
    if before is None or after is None:
        return []
    busy, idle, stolen = after.busy - before.busy, after.idle - before.idle, after.stolen - before.stolen
    total = max(1, busy + idle + stolen)
    found = [f"other programs took {busy / total:.0%} of the cores"] if busy > MOST_BUSY * total else []
    return found + ([f"the host took {stolen / total:.0%} of them away"] if stolen > MOST_STOLEN * total else [])


def look_around(seconds: float = LOOK_SECONDS) -> list[str]:
    """Return what is in a probe's way on this machine now, after watching it for a moment."""
    before = read_times()
    time.sleep(seconds)  # it is this stretch of time that is measured
    return reasons_between(before, read_times())


def reasons_of(record: ProbeRecord) -> list[str]:
    """Return why a probe's figures are not those of an idle machine; empty where nothing speaks against them."""
    found = list(record.get("busy", []))
    if record["kind"] == "cpu" and record["core_share"] < LEAST_CORE_SHARE:
        found.append(f"the probe got only {record['core_share']:.0%} of its cores")
    if refused := record.get("refused", 0):
        found.append(f"{refused} of its collectives could not be told from computing")
    if record["relative_spread"] > MOST_SPREAD:
        found.append(f"repeats differed by {record['relative_spread']:.0%}")
    return found


def busy_text(reasons: Sequence[str]) -> str:
    """Return what to tell of figures that were measured on a busy machine."""
    return (
        f"this machine was busy while it was probed ({', '.join(reasons)}): some figures may be too low, forecasts get "
        f"wider intervals, and they count for {COUNTS_SECONDS / 3600:.0f} h only; probe again when it is idle"
    )


def has_expired(record: ProbeRecord, now: datetime.datetime | None = None) -> bool:
    """Return whether a probe was made on a busy machine, and so long ago that its figures no longer count."""
    if not reasons_of(record):
        return False
    age = (now or datetime.datetime.now(datetime.UTC)) - datetime.datetime.fromisoformat(record["date"])
    return age.total_seconds() > COUNTS_SECONDS
