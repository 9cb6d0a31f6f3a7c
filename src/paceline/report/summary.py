"""Summary: all that a report says about a run, as frozen data made from the journal's records alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.account.advice.advice import CostAdvice
from paceline.account.advice.advise import advice_on
from paceline.account.budget_left import BudgetLeft, budgets_left
from paceline.history.goodput import MeasuredGoodput, goodput_of
from paceline.history.phases import Phase, Start, phases_of, resume_steps, starts_of, surviving
from paceline.history.records import Records, StepTable, gather, json_safe, number, table, text
from paceline.plan.explain.hours import day_text
from paceline.report.bound.from_records import bound_of
from paceline.report.compare import (
    Promise,
    TermGroup,
    announced_start,
    basis_of,
    memory_groups,
    promises_of,
    reference_start,
    time_groups,
)
from paceline.report.curves import Losses, Speed, losses_of, series_of, speed_of
from paceline.report.format import quantities, signed_percent
from paceline.report.held_out.curves import MetricCurve, metrics_of_records
from paceline.report.held_out.written_texts import WrittenTexts, written_of
from paceline.report.notebook.table import inline_html
from paceline.report.series import Series
from paceline.report.watched.lines import health_lines, nodes_seen
from paceline.spec.journal.kinds import (
    CheckpointRecord,
    DecisionRecord,
    EvaluationRecord,
    FaultRecord,
    MovedRecord,
    RunEnded,
    RunStarted,
    SourcesRecord,
    VerifyRecord,
)
from paceline.spec.journal.record import SCHEMA, own_fields, plain
from paceline.spec.journal.watching import HealthSample, NodeSample
from paceline.units import format_seconds, plural
from paceline.verdict.verdict import BoundVerdict

UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints a run wrote; seconds are what they cost training."""

    count: int
    last_step: int | None
    last_path: str
    last_bytes: float | None
    total_bytes: float
    total_seconds: float


@dataclass(frozen=True)
class Event:
    """A decision or a fault: when, in which start, and the record's own fields."""

    time: float | None
    attempt: int
    fields: dict[str, object]


@dataclass(frozen=True)
class Reproduce:
    """What it takes to make a run again: its command, its spec, and what it was made with."""

    command: tuple[str, ...]
    spec: dict[str, object]
    provenance: dict[str, str]
    versions: dict[str, str]
    host: str
    seed: int | None
    data: dict[str, object]
    parameters: float | None


@dataclass(frozen=True)
class Summary:
    """A run in numbers. Unknown is None everywhere; times are seconds since the epoch."""

    schema: int
    run_dir: str
    name: str
    headline: tuple[str, ...]
    status: str  # "complete", "requeue", "failed", or "unfinished" where the journal has no end
    status_text: str
    started: float | None
    ended: float | None
    wall_seconds: float
    steps_done: int
    steps_planned: int | None
    items_seen: float
    unit: str
    plan_text: str
    world_size: int | None
    attempts: tuple[Start, ...]
    phases: tuple[Phase, ...]
    goodput: MeasuredGoodput
    basis: str
    promises: tuple[Promise, ...]
    time_groups: tuple[TermGroup, ...]
    memory_groups: tuple[TermGroup, ...]
    losses: Losses
    metrics: tuple[MetricCurve, ...]  # of held-out samples besides the loss, and of further sets
    written: tuple[WrittenTexts, ...]  # by the model, first and last
    sources: dict[str, dict[str, object]]  # of a mixture: what each source has given, by its name
    speed: Speed
    bound: BoundVerdict | None  # what bounds a step, by the newest start
    series: dict[str, Series]
    checkpoints: Checkpoints
    decisions: tuple[Event, ...]
    faults: tuple[Event, ...]
    moved: dict[str, object] | None  # since the weights that the run started from
    verification: dict[str, object] | None
    cluster: dict[str, object]
    placement: dict[str, object]
    reproduce: Reproduce
    error: dict[str, str] | None
    remarks: tuple[str, ...]
    advice: tuple[CostAdvice, ...]  # what would make it cheaper, the largest saving first
    budgets: tuple[BudgetLeft, ...]  # what is left of each, and what that buys
    nodes: str = ""  # what samples of the nodes had at most
    nodes_sensed: bool = False  # whether sensors of heat or energy are among what `nodes` says
    health: tuple[str, ...] = ()  # what stood out of training

    def promise(self, kind: str) -> Promise:
        """Return one promise by its kind: `step_time`, `memory`, `run_time`, `money`, `energy` or `carbon`.

        `step time` is taken for `step_time`.
        """
        kind = kind.replace(" ", "_")
        return next(promise for promise in self.promises if promise.kind == kind)

    def __str__(self) -> str:
        """Return what `print` shows: how the run ended, and each promise beside what was measured."""
        lines = [f"{self.name}: {self.plan_text}", self.status_text, *([self.error["what"]] if self.error else [])]
        for each in self.promises:
            forecast, measured = quantities((each.forecast, each.measured), each.unit)
            lines.append(f"{each.name}: {forecast} forecast, {measured} measured ({signed_percent(each.error)})")
        return "\n".join([*lines, f"the page: {self.run_dir}/report.html"])

    def _repr_html_(self) -> str:
        """Return what a notebook shows of it: how the run ended, and what it took against what was forecast."""
        lines = [self.status_text, *([self.bound.text] if self.bound else [])]
        lines += [self.error["what"]] if self.error else []
        rows = [
            (p.name, *quantities((p.forecast, p.measured), p.unit), signed_percent(p.error), p.verdict)
            for p in self.promises
        ]
        head = ("", "forecast", "measured", "off by", "of its 80 % interval")
        return inline_html(f"{self.name}: {self.plan_text}", lines, head, rows)

    def as_dict(self) -> dict[str, object]:
        """Return the summary as plain data that JSON holds without loss; errors of forecasts are included."""
        plain = dataclasses.asdict(self)
        for key in ("promises", "time_groups", "memory_groups"):
            for item, source in zip(plain[key], getattr(self, key), strict=True):
                item["error"] = source.error
        safe: dict[str, object] = json_safe(plain)
        return safe


def _status(end: RunEnded | None, done: int, planned: int | None, wall_seconds: float) -> tuple[str, str]:
    steps = f"{done:,} of {plural(planned, 'step')}" if planned else plural(done, "step")
    took = f"{steps} in {format_seconds(wall_seconds)}"
    status = (end and end.status) or UNFINISHED
    if end is not None and end.goes_on is not None:
        return status, f"Saved until its hours begin, {day_text(end.goes_on)}: {took}."
    words = {
        "complete": f"Finished: {took}." if not planned or done >= planned else f"Finished, by early stopping: {took}.",
        "requeue": f"Stopped early with a checkpoint, to be started again: {took}.",
        "stopped": f"Stopped by its caller: {took}.",
        "failed": f"Failed after {took}.",
        UNFINISHED: f"No end on record (still running, or killed): {took} so far.",
    }
    return status, words.get(status, f"Ended as '{status}': {took}.")


def _moved(found: Records) -> dict[str, object] | None:
    """Return how far the model is from its starting weights, with the held-out loss at the start and the newest."""
    records = found.of(MovedRecord)
    if not records:
        return None
    losses = {record.step: record.loss for record in found.of(EvaluationRecord)}
    newest = max((step for step in losses if step), default=None)
    told = {"loss_at_start": losses.get(0), "loss_now": losses.get(newest), "loss_step": newest}
    return {**json_safe(plain(records[-1])), **json_safe(told)}


def _checkpoints(records: Records) -> Checkpoints:
    written = [record for record in records.of(CheckpointRecord) if record.tier is None]
    last = written[-1] if written else None
    return Checkpoints(
        count=len(written),
        last_step=last.step if last else None,
        last_path=last.path if last else "",
        last_bytes=last.bytes if last else None,
        total_bytes=sum(record.bytes or 0.0 for record in written),
        total_seconds=sum(number(record.seconds) or 0.0 for record in written),
    )


def _events(records: Sequence[DecisionRecord | FaultRecord]) -> tuple[Event, ...]:
    return tuple(Event(number(r.time), r.attempt or 1, json_safe(own_fields(r))) for r in records)


def _reproduce(start: RunStarted) -> Reproduce:
    seed = number(table(start.spec.get("task")).get("seed"))
    return Reproduce(
        command=start.command,
        spec=json_safe(start.spec),
        provenance={key: text(value) for key, value in start.provenance.items()},
        versions={key: text(value) for key, value in start.versions.items()},
        host=start.host,
        seed=None if seed is None else int(seed),
        data=json_safe(start.facts),
        parameters=start.parameters,
    )


def _told_error(error: Mapping[str, object]) -> dict[str, str] | None:
    """Return what ended the newest start, with the traceback of an error of the user's code."""
    keys = ("what", "because", "try", *(["traceback"] if error.get("traceback") else []))
    return {key: text(error.get(key)) for key in keys} if error else None


def _remarks(records: Records, steps: StepTable) -> tuple[str, ...]:
    remarks = []
    if not records.starts:
        remarks.append("The journal has no run_started record: plan, forecast and spec are unknown.")
    if records.schema > SCHEMA:
        remarks.append(f"The journal has schema {records.schema}; this report knows {SCHEMA} and may miss fields.")
    bad = int((~np.isfinite(steps.column("loss"))).sum())
    if bad:
        remarks.append(f"{plural(bad, 'step')} without a finite loss; the curve leaves them out.")
    plans = [start.plan_text for start in records.starts]
    if len(set(plans)) > 1:
        remarks.append("The plan changed between starts; step time and memory are held against the last plan.")
    return tuple(remarks)


def summarise(records: Iterable[Mapping[str, object]], run_dir: str = "", nodes: Sequence[NodeSample] = ()) -> Summary:
    """Return what the records of a journal say about a run.

    Any prefix of a journal gives a summary: what is not on record is None, zero or empty. Raises nothing. What is left
    of a budget that the run shares needs its directory: the runs beside it have spent of it too. `nodes` are the
    samples of all nodes, where the journal's own are those of the first alone.
    """
    found = gather(records)
    nodes = nodes or found.of(NodeSample)
    reference, attempts, steps = reference_start(found), starts_of(found), surviving(found)
    basis = basis_of(found, reference)
    done = int(steps.column("step").max()) if len(steps) else int(max(resume_steps(found).values(), default=0))
    announced = number(announced_start(found).forecast.get("steps"))
    planned = number(reference.forecast.get("steps")) or announced  # a task may be made longer, or shorter
    moments = [moment for span in found.spans.values() for moment in span]
    wall_seconds = max(moments) - min(moments) if moments else 0.0
    end = next((end for end in reversed(found.of(RunEnded)) if attempts and end.attempt == attempts[-1].number), None)
    status, status_text = _status(end, done, int(planned) if planned else None, wall_seconds)
    phases = phases_of(found, attempts)
    is_whole = status == "complete" and not (planned and done < planned)
    share = 1.0 if is_whole and planned == announced else done / announced if announced else None
    goodput, bound = goodput_of(found, phases), bound_of(found)
    proofs, error = found.of(VerifyRecord), (end and end.error) or {}
    return Summary(
        schema=1,
        run_dir=run_dir,
        name=text(table(reference.spec.get("task")).get("name")) or "run",
        headline=reference.headline,
        status=status,
        status_text=status_text,
        started=min(moments, default=None),
        ended=max(moments, default=None),
        wall_seconds=wall_seconds,
        steps_done=done,
        steps_planned=int(planned) if planned else None,
        items_seen=float(np.nansum(steps.column("weight"))),
        unit=text(reference.facts.get("unit")) or "items",
        plan_text=reference.plan_text,
        world_size=attempts[-1].world_size if attempts else None,
        attempts=attempts,
        phases=phases,
        goodput=goodput,
        basis=basis.words,
        promises=promises_of(found, reference, basis, attempts, share, nodes),
        time_groups=time_groups(reference, basis.steps),
        memory_groups=memory_groups(found, reference),
        losses=losses_of(found, steps, reference.facts),
        metrics=metrics_of_records(found),
        written=written_of(found),
        sources=json_safe(dict(given[-1].given)) if (given := found.of(SourcesRecord)) else {},
        speed=speed_of(found, reference, basis),
        bound=bound,
        series=series_of(found, steps),
        checkpoints=_checkpoints(found),
        decisions=_events(found.of(DecisionRecord)),
        faults=_events(found.of(FaultRecord)),
        moved=_moved(found),
        verification=json_safe(plain(proofs[-1])) if proofs else None,
        cluster=json_safe(reference.cluster),
        placement=json_safe(reference.placement),
        reproduce=_reproduce(reference),
        error=_told_error(error),
        remarks=_remarks(found, steps),
        nodes=(seen := nodes_seen(nodes)).text,
        nodes_sensed=seen.sensed,
        health=tuple(health_lines(found.of(HealthSample))),
        advice=advice_on(found, reference, bound, goodput),
        budgets=budgets_left(found, Path(run_dir) if run_dir else None),
    )
