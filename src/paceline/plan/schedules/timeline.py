"""Pipeline: when every pass of a step runs, from the order on a device and what a stage takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.plan.feasible.stages import SPLIT_BACKWARD
from paceline.plan.schedules.orders import Pass, pipeline_orders


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in one stage: forward, backward for inputs, backward for weights."""

    forward: float
    backward: float
    weights: float

    @property
    def total(self) -> float:
        """Seconds of all passes of a micro-batch."""
        return self.forward + self.backward + self.weights


@dataclass(frozen=True)
class Done:
    """A pass with its begin and end in seconds."""

    kind: str
    stage: int
    micro: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline, device by device."""

    schedule: str
    rows: tuple[tuple[Done, ...], ...]

    @property
    def seconds(self) -> float:
        """From the first pass to the end of the last."""
        return max(row[-1].end for row in self.rows)

    def busy(self, device: int) -> float:
        """Return the seconds in which a device computes."""
        return sum(done.end - done.begin for done in self.rows[device])

    @property
    def bubble(self) -> float:
        """Idle time over busy time of the busiest device: (p - 1) / m for equal stages under GPipe and 1F1B."""
        busiest = max(self.busy(device) for device in range(len(self.rows)))
        return self.seconds / busiest - 1

    def in_flight(self, device: int) -> int:
        """Return the most forward passes whose activations a device holds at once, until B (not W) has used them."""
        held = most = 0
        for done in self.rows[device]:
            held += {"F": 1, "B": -1, "W": 0}[done.kind]
            most = max(most, held)
        return most


def pipeline_timeline(
    schedule: str, devices: int, micro_batches: int, stages: Sequence[StageTimes], send_seconds: float = 0.0
) -> Timeline:
    """Return when every pass runs. `stages` has the times of every stage, devices x virtual stages of them.

    A pass starts when its device has done the passes before it and its input has arrived: from the stage before (F) or
    the stage after (B), `send_seconds` later where that stage is on another device. Sends hold up nobody else.
    Schedules that do not split the backward pass run both its parts as one. Raises ConfigError for what a schedule
    cannot run.
    """
    if not stages or len(stages) % devices:
        what = f"{len(stages)} stages on {devices} devices"
        raise ConfigError(what, "every device runs equally many", f"{devices * max(1, len(stages) // devices)} stages")
    if min(min(times.forward, times.backward, times.weights) for times in stages) < 0 or send_seconds < 0:
        raise ConfigError("a stage with negative seconds", "time does not run backwards", "0 or more")
    split = schedule in SPLIT_BACKWARD
    lasts = [_seconds(times, split) for times in stages]
    orders = pipeline_orders(schedule, devices, micro_batches, len(stages) // devices)
    rows: list[list[Done]] = [[] for _ in orders]
    ends: dict[Pass, float] = {}
    waiting = set(range(devices))
    while waiting:
        moved = False
        for device in sorted(waiting):
            row, order = rows[device], orders[device]
            while len(row) < len(order):
                work = order[len(row)]
                ready = _ready(work, ends, len(stages), send_seconds if devices > 1 else 0.0)
                if ready is None:
                    break
                begin = max(ready, row[-1].end if row else 0.0)
                ends[work] = begin + lasts[work.stage][work.kind]
                row.append(Done(work.kind, work.stage, work.micro, begin, ends[work]))
                moved = True
            if len(row) == len(order):
                waiting.discard(device)
        assert moved, f"{schedule} waits for itself"
    return Timeline(schedule, tuple(map(tuple, rows)))


def _seconds(times: StageTimes, split: bool) -> dict[str, float]:
    backward = times.backward if split else times.backward + times.weights
    return {"F": times.forward, "B": backward, "W": times.weights}


def _ready(work: Pass, ends: dict[Pass, float], stages: int, send_seconds: float) -> float | None:
    """Return when what a pass needs is there; None while that is not known."""
    needs: list[tuple[Pass, float]] = []
    if work.kind == "F" and work.stage > 0:
        needs = [(Pass("F", work.stage - 1, work.micro), send_seconds)]
    elif work.kind == "B":
        needs = [(Pass("F", work.stage, work.micro), 0.0)]
        if work.stage < stages - 1:
            needs.append((Pass("B", work.stage + 1, work.micro), send_seconds))
    elif work.kind == "W":
        needs = [(Pass("B", work.stage, work.micro), 0.0)]
    if any(need not in ends for need, _ in needs):
        return None
    return max((ends[need] + after for need, after in needs), default=0.0)
