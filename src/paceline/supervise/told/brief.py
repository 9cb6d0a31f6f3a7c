"""Brief: what the planner decided, as the processes of a run receive it. Plain data, so that it travels as JSON.

It imports nothing of the planner, which a rank has no use for. A brief is made of a plan in
`session/ready/brief_of_plan.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.scratch import Scratch
from paceline.spec.journal.planned import PlannedRecord, planned_from_dict
from paceline.spec.plan import Plan, plan_from_dict
from paceline.spec.survive.smaller import SmallerPlan, smaller_from_dict

BRIEF_VARIABLE, BRIEF_FILE = "PACELINE_BRIEF", "brief.json"


@dataclass(frozen=True)
class Brief:
    """The plan of a run, its length, and the record of how they came about."""

    plan: Plan
    steps: int
    items_per_sample: int
    unit: str  # what an item is: "tokens" or "samples"
    device: str  # "cpu" or "cuda"
    threads: int  # compute threads of a CPU rank, 0 for torch's choice
    step_seconds: float  # the forecast, for the status line
    usd_per_second: float  # of all devices together; NaN where no price is known
    model_flops_per_step: float
    peak_flops: float  # of all devices together, at the plan's precision; NaN where unknown
    record: PlannedRecord  # goes into the journal
    usable_bytes: float = math.nan  # of a device's memory, that a plan may fill
    smaller: tuple[SmallerPlan, ...] = ()  # plans that need less memory, the smallest change first
    # After so many steps batches that were read are trained on again: a measurement (`paceline bench data`).
    read_steps: int | None = None
    items_of_sample: float = math.nan  # items that the forecast counts for a sample of the order; NaN where unknown
    items_of_batch: float = math.nan  # and for a step, where a batch has as many samples as its tokens allow; else NaN
    command: tuple[str, ...] = ()  # that started the run, as it was typed; none where nobody typed one
    redraws: bool = False  # whether steps are shown where text may change: in one line, over and over

    def items_of_step(self, samples: int, weight: float) -> float:
        """Return how many items a step computed that took so many samples from the order.

        They are counted as the forecast counts them: tokens of rows as full as they come, whether the loss counts
        them or not, or samples. So a step's rate stands beside the forecast's, whatever an objective weighs.
        A batch that is cut by its tokens has about as many, whatever its samples: what the forecast's has.
        Without a forecast they are what its loss counts, its `weight`.
        """
        if math.isfinite(self.items_of_batch):
            return self.items_of_batch
        return samples * self.items_of_sample if math.isfinite(self.items_of_sample) else weight

    def to_json(self) -> str:
        """Return the brief as JSON text."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @contextlib.contextmanager
    def file(self) -> Iterator[str]:
        """Give the path of a file that holds the brief while the processes that read it run."""
        with Scratch("brief") as folder:
            path = Path(folder) / BRIEF_FILE
            path.write_text(self.to_json())
            yield str(path)


def brief_from_json(text: str) -> Brief:
    """Return the brief that `to_json` wrote."""
    data = json.loads(text)
    smaller = tuple(map(smaller_from_dict, data.get("smaller", ())))
    plan, record = plan_from_dict(data["plan"]), planned_from_dict(data["record"])
    command = tuple(data.get("command", ()))
    return Brief(**{**data, "plan": plan, "record": record, "smaller": smaller, "command": command})


def take_brief() -> Brief | None:
    """Return the brief that a supervisor left for this process, or None.

    It is given once: it belongs to the first run of the process, and a second run has a plan of its own.
    """
    path = os.environ.pop(BRIEF_VARIABLE, None)
    return brief_from_json(Path(path).read_text()) if path else None
