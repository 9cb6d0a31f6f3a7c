"""Records of runs as a journal has them, made here, and a watch over them whose clock a test moves."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.observe.alerts.outbox import Outbox
from paceline.observe.alerts.rules.ending import BudgetSpent
from paceline.observe.alerts.rules.machine import DiskFull, MemoryNear
from paceline.observe.alerts.rules.progress import NoStep, Slow
from paceline.observe.alerts.rules.rule import AlertRule
from paceline.observe.alerts.rules.run_seen import AlertSeen
from paceline.observe.alerts.rules.table import PLAIN
from paceline.observe.alerts.watch import AlertWatch
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    EvaluationRecord,
    RanksRecord,
    RunEnded,
    RunStarted,
    StepRecord,
)
from paceline.spec.journal.record import Record, read
from paceline.spec.journal.watching import AlertRecord
from paceline.spec.watch.alerts import AlertsSpec

STEP_SECONDS = 0.5
BEGAN = 1_700_000_000.0
EVALUATION_SECONDS, SAVE_SECONDS = 30.0, 4.0


def started(steps: int = 1000, **run: Any) -> RunStarted:
    """Return the start of a run on CUDA devices that was forecast right."""
    options = {"checkpoint_every": "100 steps", "evaluate_every": "50 steps", **run}
    return read(RunStarted, {
        "time": BEGAN, "attempt": 1, "step": 0, "world_size": 4, "spec": {"task": {}, "run": options},
        "plan": {"batch_samples": 8}, "facts": {"items_per_sample": 16},
        "forecast": {"steps": steps, "step_seconds": {"value": STEP_SECONDS, "low": 0.4, "high": 0.6}},
        "cluster": {"device": {"kind": "cuda", "memory_bytes": {"value": 80e9}}},
    })  # fmt: skip


def step(number: int, time: float, loss: float | None = None, seconds: float = STEP_SECONDS, **more: Any) -> StepRecord:
    """Return a step's record."""
    loss = 2.0 + 5.0 * number**-0.4 if loss is None else loss
    return read(StepRecord, {"time": time, "step": number, "loss": loss, "grad_norm": 1.0, "peak_bytes": 40 * 10**9,
                             "seconds": {"total": seconds}, "tokens_per_second": 1.0, **more})  # fmt: skip


def ranks(number: int, time: float, most: float = 0.41) -> RanksRecord:
    """Return the record of where ranks spent their time; rank 3 is the slowest."""
    return RanksRecord(number, 100, 4, "cuda", {"computing": {"min": 0.39, "median": 0.4, "max": most, "rank": 3}},
                       time=time)  # fmt: skip


def healthy(steps: int = 1000, noise: float = 0.05) -> Iterator[Record]:
    """Yield the records of a run that nothing is the matter with: noise, evaluations and saves included."""
    draw, now = random.Random(1), BEGAN + 40.0
    yield started(steps)
    for number in range(1, steps + 1):
        seconds = STEP_SECONDS * draw.uniform(0.9, 1.3)
        now += seconds
        yield step(number, now, 2.0 + 5.0 * number**-0.4 + draw.gauss(0.0, noise), seconds)
        if number % 50 == 0:
            now += EVALUATION_SECONDS
            yield EvaluationRecord(number, 2.5, 100.0, EVALUATION_SECONDS, time=now)
        if number % 100 == 0:
            now += SAVE_SECONDS
            yield ranks(number, now)
            yield CheckpointRecord(number, f"step-{number}", 10**6, SAVE_SECONDS, SAVE_SECONDS, None, time=now)
    yield RunEnded("complete", 0, None, steps, now - BEGAN, time=now)


class Watched:
    """A watch over records that a test hands it, on machines whose figures the test sets."""

    def __init__(self, run_dir: Path, spec: AlertsSpec | None = None, outbox: Outbox | None = None,
                 load: float = 1.0) -> None:  # fmt: skip
        self.memory_share, self.disk, self.spent = 0.5, (50.0, 100.0), {}  # type: ignore[var-annotated]
        self.load = load
        seen = AlertSeen(spec or AlertsSpec())
        rules: list[AlertRule] = [kind(seen) for kind in PLAIN if kind not in (NoStep, MemoryNear, Slow)]
        rules += [NoStep(seen, load=lambda: self.load), Slow(seen, lambda: self.load),
                  MemoryNear(seen, lambda: self.memory_share),
                  DiskFull(seen, lambda: self.disk), BudgetSpent(seen, self._spending, 0.8)]  # fmt: skip
        self.rules = [rule for rule in rules if rule.name not in seen.spec.off]
        self.said: list[str] = []
        self.watch = AlertWatch(run_dir, "asr-2", seen, self.rules, outbox or Outbox(()), say=self.said.append)

    def _spending(self) -> Mapping[str, tuple[float, float, str]]:
        return self.spent

    def take(self, *records: Record, after: float = 0.0) -> list[AlertRecord]:
        """Return what changes with records, so many seconds after the last of them."""
        moment = max((each.time for each in records if each.time is not None), default=BEGAN)
        return self.watch.judge(records, moment + after)

    def through(self, records: Iterator[Record], every_seconds: float = 0.5) -> list[AlertRecord]:
        """Return all that changes over records, with looks between them as a run's watch has."""
        found: list[AlertRecord] = []
        now = BEGAN
        for record in records:
            while record.time is not None and now < record.time:
                found += self.watch.judge((), now)
                now += every_seconds
            found += self.watch.judge((record,), max(now, record.time or now))
        return found


def steady(steps: int, seconds: float = STEP_SECONDS, plan: int = 1000) -> list[Record]:
    """Return a start and some of its steps, none of them one after which something long is due."""
    return [started(plan, evaluate_every="none"), *(step(each, BEGAN + each * seconds, seconds=seconds)
                                                   for each in range(1, steps + 1))]  # fmt: skip
