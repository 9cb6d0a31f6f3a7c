"""The forecast against what was measured: per step and term by term, in memory, and for the whole run.

A forecast has many terms and a running step only a few clocks, so terms are put into groups that one clock measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.account.timeline import held_devices
from paceline.history.phases import Start
from paceline.history.records import NO_START, Records, StepTable, number, table, text
from paceline.report.watched.metered import metered_energy
from paceline.spec.journal.kinds import MemoryRecord, RunStarted
from paceline.spec.journal.older import kind_and_clock
from paceline.spec.journal.rates import AMOUNTS, rate_of
from paceline.spec.journal.steady import BUSY, FIRST
from paceline.spec.journal.watching import NodeSample
from paceline.units import plural

LEARNT = "learnt"  # the kind of term that earlier runs add: it corrects the sum, so every group has its share of it
STEP_TIME, MEMORY, RUN_TIME = "step_time", "memory", "run_time"
MONEY, ENERGY, CARBON = "money", "energy", "carbon"
CLOCKS = ("forward_backward", "reduce", "optimizer", "data", "other")
PROMISES = {
    STEP_TIME: "step time",
    MEMORY: "memory",
    RUN_TIME: "run time",
    MONEY: "money",
    ENERGY: "energy",
    CARBON: "carbon",
}  # kind -> as it is printed: no code reads the printed name
METERS = ("weights", "gradients", "optimizer", "runtime")  # kinds of memory that a meter of their own measures
ACTIVATIONS = "activations_and_buffers"
JOINT = "activations_and_runtime"


@dataclass(frozen=True)
class TermLine:
    """One term of the forecast, as it was announced."""

    name: str
    value: float | None
    formula: str
    source: str
    kind: str
    clock: str


@dataclass(frozen=True)
class TermGroup:
    """Terms that one clock or one meter measures together: seconds per step, or bytes on a device."""

    name: str
    forecast: float | None
    measured: float | None
    terms: tuple[TermLine, ...]
    note: str = ""

    @property
    def error(self) -> float | None:
        """Measured over forecast, minus one."""
        return relative(self.measured, self.forecast)


@dataclass(frozen=True)
class Promise:
    """One promise of the forecast and what became of it.

    `verdict` is "inside" the interval, "below" it, "above" it, or "unknown"; `measured_how` says how the measured
    side was obtained, and an estimate is called one.
    """

    kind: str  # a key of PROMISES: what code knows the promise by
    unit: str  # "s", "B", "USD", "kWh" or "g"
    forecast: float | None
    low: float | None
    high: float | None
    measured: float | None
    verdict: str
    source: str
    measured_how: str
    name: str  # as it is printed
    is_estimate: bool = False  # whether the measured side is worked out from other figures

    @property
    def error(self) -> float | None:
        """Measured over forecast, minus one."""
        return relative(self.measured, self.forecast)


@dataclass(frozen=True)
class Basis:
    """The steps that medians are taken over, and in words which ones were left out."""

    steps: StepTable
    all_steps: StepTable  # under the same plan, none left out
    words: str


def relative(measured: float | None, forecast: float | None) -> float | None:
    """Return measured over forecast minus one; None where either is unknown or the forecast is zero."""
    return None if measured is None or not forecast else measured / forecast - 1


def median(values: NDArray[np.float64]) -> float | None:
    """Return the median of the finite values; None where there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else None


def reference_start(records: Records) -> RunStarted:
    """Return the start whose forecast steps and memory are held against: the last one that has a forecast."""
    with_forecast = [start for start in records.starts if start.forecast]
    return (with_forecast or list(records.starts) or [NO_START])[-1]


def announced_start(records: Records) -> RunStarted:
    """Return the start whose forecast the whole run is held against: the first one that has a forecast."""
    return next((start for start in records.starts if start.forecast), (*records.starts, NO_START)[0])


def basis_of(records: Records, reference: RunStarted) -> Basis:
    """Return the steps run under the reference's plan, without first steps and those with a checkpoint or evaluation.

    Where nothing is left, warm-up steps and then all steps are taken, and the words say so.
    """
    same = [
        start.attempt or 1
        for start in records.starts
        if start.plan == reference.plan and start.world_size == reference.world_size
    ]
    steps = records.steps
    if same:
        steps = steps.where(np.isin(steps.column("attempt"), same))
    other = len(records.steps) - len(steps)
    steps, grown = _of_first_batch(steps, reference)
    left_out = records.unsteady
    why = [left_out.get(pair, "") for pair in steps.numbers()]
    first = np.array([reason == FIRST for reason in why], dtype=bool)
    busy = np.array([reason in BUSY for reason in why], dtype=bool)
    tail = f"; {plural(other, 'step')} under another plan left out" if other else ""
    tail += f"; {plural(grown, 'step')} of another global batch left out" if grown else ""
    for mask, words in (
        (~first & ~busy, "without the first step of each start and steps with a checkpoint or an evaluation"),
        (~first, "without the first step of each start (every other step has a checkpoint or an evaluation)"),
        (~(first & False), "the first step of a start included: there are no others"),
    ):
        if mask.any():
            kept = steps.where(mask)
            return Basis(kept, steps, f"medians over {plural(len(kept), 'step')}, {words}{tail}")
    return Basis(steps, steps, "no step was completed")


def _of_first_batch(steps: StepTable, reference: RunStarted) -> tuple[StepTable, int]:
    """Return the steps of the batch that the forecast is of, and how many are of another, where the batch grows.

    All steps stay where none has that batch.
    """
    batch = number(reference.plan.get("batch_samples"))
    samples = steps.column("position_after") - steps.column("position_before")
    other = np.isfinite(samples) & (samples != batch)
    if batch is None or other.all():
        return steps, 0
    return steps.where(~other), int(other.sum())


def _terms(forecast: Mapping[str, object], key: str) -> list[TermLine]:
    listed = forecast.get(key)
    return [_term(term) for term in (listed if isinstance(listed, list | tuple) else []) if isinstance(term, dict)]


def _term(term: Mapping[str, object]) -> TermLine:
    name, formula, source = (text(term.get(key)) for key in ("name", "formula", "source"))
    return TermLine(name, number(term.get("value")), formula, source, *kind_and_clock(term))


def time_group(clock: str) -> str:
    """Return which group a time term of this clock belongs to; a clock that no step has counts to the rest."""
    return clock if clock in CLOCKS else "other"


def memory_group(kind: str) -> str:
    """Return which meter measures a memory term of this kind."""
    return kind if kind in METERS else ACTIVATIONS


def _total(terms: list[TermLine], learnt: float = 1.0) -> float | None:
    values = [term.value for term in terms if term.value is not None]
    return sum(values) * learnt if values else None


def _without_learnt(terms: list[TermLine]) -> tuple[list[TermLine], float, str]:
    """Return the terms of formulas, the factor by which earlier runs corrected their sum, and a note that says so."""
    formulas = [term for term in terms if term.kind != LEARNT]
    learnt = next((term for term in terms if term.kind == LEARNT), None)
    base = _total(formulas)
    if learnt is None or learnt.value is None or not base:
        return formulas, 1.0, ""
    factor = 1 + learnt.value / base
    return formulas, factor, f"forecast x {factor:.3f}, {learnt.name}"


def _communicates_inside(plan: Mapping[str, object]) -> bool:
    """Return whether collectives run inside forward and backward, where no clock of their own can time them."""
    layout = table(plan.get("layout"))
    return not layout or any((number(layout.get(axis)) or 1) > 1 for axis in ("dp_shard", "cp", "tp", "pp", "ep"))


def time_groups(reference: RunStarted, steps: StepTable) -> tuple[TermGroup, ...]:
    """Return the step's groups of time terms with the medians of the clocks that measure them, in seconds."""
    terms, learnt, note = _without_learnt(_terms(reference.forecast, "time"))
    sorted_terms: dict[str, list[TermLine]] = {name: [] for name in CLOCKS}
    for term in terms:
        sorted_terms[time_group(term.clock)].append(term)
    clocks = {name: steps.column(name) for name in sorted_terms}
    names = {"forward_backward": "forward and backward", "reduce": "gradient reduction"}
    notes = {}
    world, waiting = reference.world_size or 1, steps.column("waiting_seconds")
    if world > 1 and np.isfinite(waiting).any():
        clocks["forward_backward"] = clocks["forward_backward"] + np.nan_to_num(clocks["reduce"]) - waiting
        clocks["reduce"] = waiting
        names = {"forward_backward": "computing forward and backward", "reduce": "communication and waiting"}
        notes["reduce"] = "time in which rank 0 did not compute: collectives, peers that were slower, a shared core"
    elif _communicates_inside(reference.plan):
        sorted_terms["forward_backward"] += sorted_terms.pop("reduce")
        clocks["forward_backward"] = clocks["forward_backward"] + np.nan_to_num(clocks.pop("reduce"))
        names["forward_backward"] = "forward, backward and communication"
        notes["forward_backward"] = "communication runs inside forward and backward, so one clock measures the sum"
    groups = []
    for key, own in sorted_terms.items():
        measured = median(clocks[key])
        if own or measured:
            said = "; ".join(filter(None, (notes.get(key, ""), note if own else "")))
            groups.append(TermGroup(names.get(key, key), _total(own, learnt), measured, tuple(own), said))
    return tuple(groups)


def memory_groups(records: Records, reference: RunStarted) -> tuple[TermGroup, ...]:
    """Return the forecast's memory terms by component with the bytes measured in the last `memory` record."""
    sorted_terms: dict[str, list[TermLine]] = {
        name: [] for name in ("weights", "gradients", "optimizer", ACTIVATIONS, "runtime")
    }
    terms, learnt, note = _without_learnt(_terms(reference.forecast, "memory"))
    for term in terms:
        sorted_terms[memory_group(term.kind)].append(term)
    components = next((record.components for record in reversed(records.of(MemoryRecord))), {})
    measured = {name: number(value) for name, value in components.items()}
    if JOINT in measured:  # where an allocator cannot tell the two apart
        sorted_terms[JOINT] = sorted_terms.pop(ACTIVATIONS) + sorted_terms.pop("runtime")
    for name in measured:
        sorted_terms.setdefault(name, [])
    return tuple(
        TermGroup(name.replace("_", " "), _total(own, learnt), measured.get(name), tuple(own), note if own else "")
        for name, own in sorted_terms.items()
        if own or measured.get(name) is not None
    )


def _promise(
    kind: str,
    unit: str,
    estimate: object,
    measured: float | None,
    how: str,
    share: float | None = 1.0,
    is_estimate: bool = False,
) -> Promise:
    """Return a promise with its verdict; `share` scales a whole run's estimate to the part that was run."""
    own = table(estimate)
    parts = [number(own.get(key)) for key in ("value", "low", "high")]
    scaled = [None if part is None or share is None else part * share for part in parts]
    value, low, high = scaled
    if value is None or measured is None or low is None or high is None:
        verdict = "unknown"
    else:
        verdict = "below" if measured < low else "above" if measured > high else "inside"
    source = text(own.get("source"))
    return Promise(kind, unit, value, low, high, measured, verdict, source, how, PROMISES[kind], is_estimate)


def promises_of(
    records: Records, reference: RunStarted, basis: Basis, attempts: tuple[Start, ...], share: float | None,
    nodes: Sequence[NodeSample] = (),
) -> tuple[Promise, ...]:  # fmt: skip
    """Return what was promised and what was measured for a step, for memory and for the whole run.

    Steps and memory are held against the reference's forecast. Time, money, energy and carbon of the run are held
    against the first forecast, scaled to `share`: what was done of its steps, more than all where `task.stop` has
    grown since. Money, energy and carbon
    are estimates: the device-seconds that the run held, as its bill counts them, times the forecast's own rate;
    but energy, and carbon by it, are the nodes' counters where `nodes`, samples of all of them, cover every start.
    """
    forecast = reference.forecast
    recorded = [number(record.peak_bytes) for record in records.of(MemoryRecord)]
    peaks = [*basis.all_steps.column("peak_bytes").tolist(), *(peak for peak in recorded if peak is not None)]
    peak = max((value for value in peaks if np.isfinite(value)), default=None)
    first = announced_start(records)
    whole = first.forecast
    world = first.world_size or number(first.cluster.get("devices"))
    seconds = sum(attempt.seconds for attempt in attempts) or None
    device_seconds = sum(held.seconds * held.devices for held in held_devices(records)) or None
    partly = "" if share in (None, 1.0) else f"; forecast scaled to the {share:.0%} of its steps that were done"
    promises = [
        _promise(STEP_TIME, "s", forecast.get("step_seconds"), median(basis.steps.column("total")), basis.words),
        _promise(MEMORY, "B", forecast.get("peak_bytes"), peak, "the highest peak on record"),
        _promise(RUN_TIME, "s", whole.get("run_seconds"), seconds, f"all starts, gaps left out{partly}", share),
    ]
    rates = {key: rate_of(key, whole, first.cluster, first.world_size) for key in AMOUNTS}
    metered = metered_energy(records, nodes, attempts, world) if device_seconds else None
    for kind, unit, key in ((MONEY, "USD", "usd"), (ENERGY, "kWh", "kwh"), (CARBON, "g", "carbon_g")):
        rate, origin = rates[key]
        measured = None if rate is None or device_seconds is None else rate * device_seconds
        how, is_estimate = f"estimate: {device_seconds or 0:,.0f} device-seconds {origin}", True
        if metered is not None and key == "kwh":
            measured, how, is_estimate = metered.kwh, metered.how, metered.is_estimate
        elif metered is not None and key == "carbon_g" and rate is not None and (before := rates["kwh"][0]):
            measured, how = metered.kwh * rate / before, f"estimate: the forecast's carbon of a kWh; {metered.how}"
        promises.append(_promise(kind, unit, whole.get(key), measured, f"{how}{partly}", share, is_estimate))
    return tuple(promises)
