"""Summary: all that a report says about a run, as frozen data made from the journal's records alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.report.compare import (
    Promise,
    TermGroup,
    basis_of,
    memory_groups,
    promises_of,
    reference_start,
    time_groups,
)
from paceline.report.curves import Losses, Speed, losses_of, series_of, speed_of
from paceline.report.format import plural
from paceline.report.phases import Phase, Start, phases_of, resume_steps, starts_of, surviving
from paceline.report.records import Records, StepTable, gather, json_safe, number, table, text
from paceline.report.series import Series
from paceline.spec.journal.record import SCHEMA
from paceline.units import format_seconds

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
    fields: dict[str, Any]


@dataclass(frozen=True)
class Reproduce:
    """What it takes to run the same thing again."""

    command: tuple[str, ...]
    spec: dict[str, Any]
    provenance: dict[str, str]
    versions: dict[str, str]
    host: str
    seed: int | None
    data: dict[str, Any]
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
    basis: str
    promises: tuple[Promise, ...]
    time_groups: tuple[TermGroup, ...]
    memory_groups: tuple[TermGroup, ...]
    losses: Losses
    speed: Speed
    series: dict[str, Series]
    checkpoints: Checkpoints
    decisions: tuple[Event, ...]
    faults: tuple[Event, ...]
    verification: dict[str, Any] | None
    cluster: dict[str, Any]
    placement: dict[str, Any]
    reproduce: Reproduce
    error: dict[str, str] | None
    remarks: tuple[str, ...]

    def promise(self, name: str) -> Promise:
        """Return one promise by name."""
        return next(promise for promise in self.promises if promise.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain data that JSON holds without loss; errors of forecasts are included."""
        plain = dataclasses.asdict(self)
        for key in ("promises", "time_groups", "memory_groups"):
            for item, source in zip(plain[key], getattr(self, key), strict=True):
                item["error"] = source.error
        safe: dict[str, Any] = json_safe(plain)
        return safe


def _status(end: Mapping[str, Any], done: int, planned: int | None, wall_seconds: float) -> tuple[str, str]:
    steps = f"{done:,} of {plural(planned, 'step')}" if planned else plural(done, "step")
    took = f"{steps} in {format_seconds(wall_seconds)}"
    status = text(end.get("status")) or UNFINISHED
    words = {
        "complete": f"Finished: {took}.",
        "requeue": f"Stopped early with a checkpoint, to be started again: {took}.",
        "stopped": f"Stopped by its caller: {took}.",
        "failed": f"Failed after {took}.",
        UNFINISHED: f"No end on record (still running, or killed): {took} so far.",
    }
    return status, words.get(status, f"Ended as '{status}': {took}.")


def _checkpoints(records: Records) -> Checkpoints:
    written = records.of("checkpoint")
    sizes = [number(record.get("bytes")) for record in written]
    last = written[-1] if written else {}
    step = number(last.get("step"))
    return Checkpoints(
        count=len(written),
        last_step=None if step is None else int(step),
        last_path=text(last.get("path")),
        last_bytes=sizes[-1] if sizes else None,
        total_bytes=sum(size or 0.0 for size in sizes),
        total_seconds=sum(number(record.get("seconds")) or 0.0 for record in written),
    )


def _events(records: Records, kind: str) -> tuple[Event, ...]:
    known = ("schema", "kind", "time", "attempt")
    return tuple(
        Event(number(r.get("time")), r["attempt"], json_safe({k: v for k, v in r.items() if k not in known}))
        for r in records.of(kind)
    )


def _reproduce(start: Mapping[str, Any]) -> Reproduce:
    spec = table(start.get("spec"))
    seed, command = number(table(spec.get("task")).get("seed")), start.get("command")
    return Reproduce(
        command=tuple(text(word) for word in command) if isinstance(command, list) else (),
        spec=json_safe(spec),
        provenance={key: text(value) for key, value in table(start.get("provenance")).items()},
        versions={key: text(value) for key, value in table(start.get("versions")).items()},
        host=text(start.get("host")),
        seed=None if seed is None else int(seed),
        data=json_safe(table(start.get("facts"))),
        parameters=number(start.get("parameters")),
    )


def _remarks(records: Records, steps: StepTable) -> tuple[str, ...]:
    remarks = []
    if not records.starts:
        remarks.append("The journal has no run_started record: plan, forecast and spec are unknown.")
    if records.schema > SCHEMA:
        remarks.append(f"The journal has schema {records.schema}; this report knows {SCHEMA} and may miss fields.")
    bad = int((~np.isfinite(steps.column("loss"))).sum())
    if bad:
        remarks.append(f"{plural(bad, 'step')} without a finite loss; the curve leaves them out.")
    plans = [text(start.get("plan_text")) for start in records.starts]
    if len(set(plans)) > 1:
        remarks.append("The plan changed between starts; step time and memory are held against the last plan.")
    return tuple(remarks)


def summarise(records: Iterable[Mapping[str, Any]], run_dir: str = "") -> Summary:
    """Return what the records of a journal say about a run.

    Any prefix of a journal gives a summary: what is not on record is None, zero or empty. Raises nothing.
    """
    found = gather(records)
    reference, attempts, steps = reference_start(found), starts_of(found), surviving(found)
    first = (*found.starts, {})[0]
    basis = basis_of(found, reference)
    done = int(steps.column("step").max()) if len(steps) else int(max(resume_steps(found).values(), default=0))
    planned = number(table(first.get("forecast")).get("steps")) or number(table(reference.get("forecast")).get("steps"))
    moments = [moment for span in found.spans.values() for moment in span]
    wall_seconds = max(moments) - min(moments) if moments else 0.0
    ends: list[dict[str, Any]] = [r for r in found.of("run_ended") if r["attempt"] == attempts[-1].number]
    end = (ends or [{}])[-1]
    status, status_text = _status(end, done, int(planned) if planned else None, wall_seconds)
    share = 1.0 if status == "complete" else done / planned if planned else None
    facts, spec = table(reference.get("facts")), table(reference.get("spec"))
    headline, error = reference.get("headline"), table(end.get("error"))
    return Summary(
        schema=1,
        run_dir=run_dir,
        name=text(table(spec.get("task")).get("name")) or "run",
        headline=tuple(text(line) for line in headline) if isinstance(headline, list) else (),
        status=status,
        status_text=status_text,
        started=min(moments, default=None),
        ended=max(moments, default=None),
        wall_seconds=wall_seconds,
        steps_done=done,
        steps_planned=int(planned) if planned else None,
        items_seen=float(np.nansum(steps.column("weight"))),
        unit=text(facts.get("unit")) or "items",
        plan_text=text(reference.get("plan_text")),
        world_size=attempts[-1].world_size if attempts else None,
        attempts=attempts,
        phases=phases_of(found, attempts),
        basis=basis.words,
        promises=promises_of(found, reference, basis, attempts, share),
        time_groups=time_groups(reference, basis.steps),
        memory_groups=memory_groups(found, reference),
        losses=losses_of(found, steps, facts),
        speed=speed_of(found, reference, basis),
        series=series_of(found, steps),
        checkpoints=_checkpoints(found),
        decisions=_events(found, "decision"),
        faults=_events(found, "fault"),
        verification=json_safe(found.of("verify")[-1]) if found.of("verify") else None,
        cluster=json_safe(table(reference.get("cluster"))),
        placement=json_safe(table(reference.get("placement"))),
        reproduce=_reproduce(reference),
        error={key: text(error.get(key)) for key in ("what", "because", "try")} if error else None,
        remarks=_remarks(found, steps),
    )
