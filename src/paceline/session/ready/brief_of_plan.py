"""From a planned task to the brief that its ranks are told."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from paceline.plan.cost.memory.usable import usable_bytes
from paceline.plan.explain.headline import headline_lines
from paceline.plan.planned import Planned
from paceline.plan.risk.outlook import outlook_of
from paceline.plan.smaller import smaller_plans
from paceline.spec.arguments import has_checkpoint, run_directory
from paceline.spec.journal.kinds import DecisionRecord, VerifyRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.records.decided import PLAN
from paceline.spec.optimizers import optimizer_key
from paceline.supervise.told.brief import Brief
from paceline.supervise.told.typed import typed_command
from paceline.task.models.huggingface.start import start_decision
from paceline.task.profile.plain import pack_profile
from paceline.uncaught import is_notebook


def make_brief(
    planned: Planned, verified: VerifyRecord | None = None, decisions: Sequence[DecisionRecord] = ()
) -> Brief:
    """Return the brief of a planned task.

    `verified` is the proof, if there was one, and `decisions` are those made since planning.
    """
    plan, cluster, forecast = planned.plan, planned.cluster, planned.forecast
    task, items = planned.spec.task, forecast.tokens_per_second * forecast.step_seconds.value
    # A plan counts such a batch in samples of the longest, and a step takes more samples than that.
    cut_by_tokens = task.batch_rows == "by_length" and planned.facts.unit == "tokens"
    price = cluster.price_usd_per_device_hour.value
    peak = planned.peak_flops(plan.precision) * cluster.devices
    evidence = {"step_seconds": forecast.step_seconds.value, "peak_bytes": forecast.peak_bytes.value}
    decision = DecisionRecord(PLAN, dataclasses.asdict(planned.spec.plan), str(plan), planned.reason, evidence)
    return Brief(
        plan=plan,
        steps=planned.steps,
        items_per_sample=planned.facts.items_per_sample,
        unit=planned.facts.unit,
        items_of_sample=math.nan if cut_by_tokens else items / task.selection.candidates_of(planned.batch_samples),
        items_of_batch=items if cut_by_tokens else math.nan,
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
        command=typed_command(),
        redraws=is_notebook(),
    )


def _started(planned: Planned) -> list[DecisionRecord]:
    """Return which model a folder became and which weights it starts from, where it starts from any."""
    found = None if has_checkpoint(run_directory(planned.spec)) else start_decision(planned.spec.task.model)
    return [found] if found is not None else []
