"""Brief: what the planner decided, as the processes of a run receive it. Plain data, so that it travels as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.plan.cost.memory.usable import usable_bytes
from paceline.plan.explain.headline import headline_lines
from paceline.plan.planned import Planned
from paceline.plan.risk.outlook import outlook_of
from paceline.plan.smaller import SmallerPlan, smaller_from_dict, smaller_plans
from paceline.scratch import Scratch
from paceline.spec.arguments import has_checkpoint, run_directory
from paceline.spec.journal.kinds import DecisionRecord, VerifyRecord
from paceline.spec.journal.planned import PlannedRecord, planned_from_dict
from paceline.spec.optimizers import optimizer_key
from paceline.spec.plan import Plan, plan_from_dict
from paceline.task.models.huggingface.start import start_decision
from paceline.task.profile.plain import pack_profile
from paceline.uncaught import is_notebook

BRIEF_VARIABLE = "PACELINE_BRIEF"


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
    redraws: bool = False  # whether steps are shown where text may change: in one line, over and over

    def to_json(self) -> str:
        """Return the brief as JSON text."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @contextlib.contextmanager
    def file(self) -> Iterator[str]:
        """Give the path of a file that holds the brief while the processes that read it run."""
        with Scratch("brief") as folder:
            path = Path(folder) / "brief.json"
            path.write_text(self.to_json())
            yield str(path)


def make_brief(
    planned: Planned, verified: VerifyRecord | None = None, decisions: Sequence[DecisionRecord] = ()
) -> Brief:
    """Return the brief of a planned task.

    `verified` is the proof, if there was one, and `decisions` are those made since planning.
    """
    plan, cluster, forecast = planned.plan, planned.cluster, planned.forecast
    price = cluster.price_usd_per_device_hour.value
    peak = planned.peak_flops(plan.precision) * cluster.devices
    evidence = {"step_seconds": forecast.step_seconds.value, "peak_bytes": forecast.peak_bytes.value}
    decision = DecisionRecord("plan", dataclasses.asdict(planned.spec.plan), str(plan), planned.reason, evidence)
    return Brief(
        plan=plan,
        steps=planned.steps,
        items_per_sample=planned.facts.items_per_sample,
        unit=planned.facts.unit,
        device=cluster.device.kind,
        threads=planned.threads,
        step_seconds=forecast.step_seconds.value,
        usd_per_second=price * cluster.devices / 3600 if math.isfinite(price) else math.nan,
        model_flops_per_step=forecast.model_flops_per_step,
        peak_flops=peak,
        record=PlannedRecord(
            cluster=dataclasses.asdict(cluster),
            forecast=dataclasses.asdict(forecast),
            placement=dataclasses.asdict(planned.placement),
            facts=dataclasses.asdict(planned.facts),
            parameters=planned.profile.parameters,
            profile=pack_profile(planned.profile),
            optimizer=optimizer_key(planned.spec.task.optimizer),
            headline=tuple(headline_lines(planned)),
            provenance={key: str(origin) for key, origin in planned.spec.provenance.items()},
            decisions=(*planned.settled, decision, *_started(planned), *decisions),
            outlook=outlook_of(planned.search.candidates.context, plan),
            verify=verified,
        ),
        usable_bytes=usable_bytes(cluster),
        smaller=smaller_plans(planned.search.candidates.context, plan),
        redraws=is_notebook(),
    )


def _started(planned: Planned) -> list[DecisionRecord]:
    """Return which model a folder became and which weights it starts from, where it starts from any."""
    found = None if has_checkpoint(run_directory(planned.spec)) else start_decision(planned.spec.task.model)
    return [found] if found is not None else []


def brief_from_json(text: str) -> Brief:
    """Return the brief that `to_json` wrote."""
    data = json.loads(text)
    smaller = tuple(map(smaller_from_dict, data.get("smaller", ())))
    plan, record = plan_from_dict(data["plan"]), planned_from_dict(data["record"])
    return Brief(**{**data, "plan": plan, "record": record, "smaller": smaller})


def take_brief() -> Brief | None:
    """Return the brief that a supervisor left for this process, or None.

    It is given once: it belongs to the first run of the process, and a second run has a plan of its own.
    """
    path = os.environ.pop(BRIEF_VARIABLE, None)
    return brief_from_json(Path(path).read_text()) if path else None
