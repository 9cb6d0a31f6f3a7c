"""RunComparison: runs beside each other at the same step, all held against the first run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.errors import ConfigError
from paceline.history.records import number
from paceline.observe.compare.differ import DifferentOption, differences
from paceline.observe.compare.noise import Noise, Sampled, noise_of
from paceline.observe.compare.run_kinds import RunKinds, same_but_for_the_seed, same_work, seed_of
from paceline.observe.live.run import LiveRun
from paceline.observe.live.series import StepValues
from paceline.observe.live.spent import spent_so_far
from paceline.report.compare import median
from paceline.report.format import quantity
from paceline.report.series import Series, thin, trend
from paceline.spec.journal.kinds import EvaluationRecord, MemoryRecord, RunStarted
from paceline.spec.run_files import called, is_run
from paceline.units import plural

MOST_RUNS, LEAST_RUNS = 20, 2
LAST_SHARE, LEAST_LAST, MOST_LAST = 0.1, 20, 500  # of the steps that all have: losses are means over the last ones
POINTS = 300
STEPS, SEEDS = "steps", "seeds"
ALONE = "another run of each may say otherwise"
UNITS = {"step seconds": "s", "peak bytes": "B", "USD": "USD", "kWh": "kWh"}  # of figures that have one
CALLED = {"step seconds": "step time", "peak bytes": "memory", "USD": "money", "kWh": "energy"}
BATCH = "plan.batch_samples"  # the option that says how many samples a step has
OpensRun = Callable[[], contextlib.AbstractContextManager[LiveRun]]


@dataclass(frozen=True)
class ComparedRun:
    """A run's own figures. Losses are at the step that all runs have reached; unknown is None."""

    name: str
    run_dir: str
    task: str
    status: str
    steps: int
    plan: str
    devices: int | None
    loss: float | None  # mean over the last steps that all have, NaN where it is no number at that step
    held_out: float | None  # at the last step at which all were evaluated
    step_seconds: float | None
    items_per_second: float | None
    peak_bytes: float | None
    device_hours: float | None
    usd: float | None
    kwh: float | None
    group: int  # runs of one group differ by their seed alone


@dataclass(frozen=True)
class ComparedFigure:
    """How a run differs from the first one in one figure.

    `plus_minus` is half of a 95 % interval and `sure` how sure it is which of the two is lower, from 0.5 to 1; None
    where the noise is not known. `noise` says what it is from: `steps` of one run each, or `seeds`: several runs of a
    kind. Steps tell nothing of how far two runs of one kind are apart: by them a run is `lower`, and not `better`.
    """

    figure: str
    run: str
    against: str
    difference: float
    relative: float | None
    plus_minus: float | None
    sure: float | None
    noise: str
    lower: str  # the run whose figure is lower by more than the noise; empty where none is
    better: str  # the same, where the noise is that between runs

    @property
    def called(self) -> str:
        """What the figure is called where people read: as in the table of the runs."""
        return CALLED.get(self.figure, self.figure)

    @property
    def difference_text(self) -> str:
        """The difference with its sign and unit."""
        return f"{'+' if self.difference >= 0 else ''}{_amount(self.difference, UNITS.get(self.figure, ''))}"

    @property
    def noise_text(self) -> str:
        """Half of the interval in the figure's unit; "" where the noise is not known."""
        return "" if self.plus_minus is None else f"± {_amount(self.plus_minus, UNITS.get(self.figure, ''))}"

    @property
    def text(self) -> str:
        """The difference in one line."""
        percent = "" if self.relative is None else f" ({self.relative:+.1%})"
        noise = f" {self.noise_text}" if self.noise_text else ""
        words = f"{self.run} against {self.against}: {self.difference_text}{noise}{percent}"
        if not self.difference and not self.plus_minus:
            return f"{self.run} against {self.against}: equal"
        if self.sure is None:
            return f"{words}; its noise is not known"
        if not self.lower:
            return f"{words}; not told from noise ({self.sure:.0%} sure of its sign)"
        sure = min(self.sure, 0.9999)
        if not self.better:
            return f"{words}; lower in {self.lower}, {sure:.4g} sure by its steps alone: {ALONE}"
        return f"{words}; {self.better} is better, {sure:.4g} sure"


def _amount(value: float, unit: str) -> str:
    """Return a difference in the unit that its figure is printed in elsewhere; a loss in four figures."""
    return quantity(value, unit) if unit else f"{value:.4g}"


@dataclass(frozen=True)
class RunComparison:
    """Runs beside each other. `step` is the last one that all have; losses are means over `last_steps` up to it.

    `held_out_step` is the last one after which all were evaluated, None where there is none.
    """

    runs: tuple[ComparedRun, ...]
    figures: tuple[ComparedFigure, ...]
    differences: tuple[DifferentOption, ...]
    step: int
    last_steps: int
    held_out_step: int | None
    note: str
    curves: tuple[tuple[Series, Series], ...]  # of each run: loss and seconds of steps


@dataclass(frozen=True)
class _Taken:
    """What is kept of a run while it is compared."""

    name: str
    run: ComparedRun
    start: RunStarted
    values: StepValues
    evaluations: dict[int, float]


def compare_runs(paths: Sequence[Path]) -> RunComparison:
    """Return the comparison of runs' directories. Raises ConfigError for one that is none, and for less than two."""
    live, named = [], set[Path]()
    for path in paths:
        if path.resolve() in named:
            raise ConfigError(f"{path} is named twice", "a run differs from itself in nothing", "name each run once")
        named.add(path.resolve())
        if path.suffix == ".toml" and not is_run(path):
            fix = "paceline plan says what each will take, and with --devices or --device compares clusters"
            raise ConfigError(f"{path} is not a run's directory", "a spec has not run", fix)
        if not is_run(path):
            raise ConfigError(f"{path} is not a run's directory", "it has no folder `journal`", "paceline compare A B")
        run = LiveRun(path)
        run.refresh()
        live.append(run)
    names = called([run.run_dir for run in live])
    return compare_live([(name, _reader(run)) for name, run in zip(names, live, strict=True)])


def _reader(run: LiveRun) -> OpensRun:
    return lambda: contextlib.nullcontext(run)


def compare_live(runs: Sequence[tuple[str, OpensRun]]) -> RunComparison:
    """Return the comparison of runs that are read while they may go on. Raises ConfigError for less than two."""
    if not LEAST_RUNS <= len(runs) <= MOST_RUNS:
        raise ConfigError(
            f"{plural(len(runs), 'run')} to compare", f"it takes {LEAST_RUNS} to {MOST_RUNS}", "name others"
        )
    taken = []
    for name, reader in runs:
        with reader() as run:
            taken.append(_take(name, run))
    for each in taken:
        if not len(each.values):
            raise ConfigError(
                f"{each.name} has made no step yet", "there is nothing to compare", "wait, or leave it out"
            )
    common = int(min(each.values.column("step")[-1] for each in taken))
    last = min(MOST_LAST, max(LEAST_LAST, math.ceil(common * LAST_SHARE)), common)
    groups = _groups([each.start for each in taken], same_but_for_the_seed)
    evaluated = set.intersection(*(set(each.evaluations) for each in taken))
    held_step = max((step for step in evaluated if step <= common), default=None)
    windows = [_window(each.values, "loss", common, last) for each in taken]
    compared = [_with(each.run, group, window, None if held_step is None else each.evaluations[held_step])
                for each, group, window in zip(taken, groups, windows, strict=True)]  # fmt: skip
    figures = _figures(compared, taken, common, last)
    is_by_seed = any(figure.noise == SEEDS for figure in figures)
    note = (
        "noise from several runs of a kind"
        if is_by_seed
        else "noise from the steps of single runs: what another run of the same kind would do is not in it, so none is"
        " called better; runs that differ by task.seed alone would tell"
    )
    curves = tuple(_curves(each.values) for each in taken)
    differing = differences([each.start for each in taken])
    if any(option.name == BATCH for option in differing):
        note += "; their batches differ, so at one step they have seen other numbers of samples"
    return RunComparison(tuple(compared), tuple(figures), differing, common, last, held_step, note, curves)


def _take(name: str, run: LiveRun) -> _Taken:
    values, spent = run.steps.taken(), {each.name: each.spent for each in spent_so_far(run)}
    peaks = [record.peak_bytes for record in run.of(MemoryRecord)] + [number(run.steps.last("peak_bytes"))]
    totals = values.column("total")[1:] if len(values) > 1 else values.column("total")
    rates = values.column("rate")
    own = ComparedRun(
        name=name,
        run_dir=str(run.run_dir),
        task=run.name,
        status=run.status(),
        steps=run.steps_done,
        plan=run.reference.plan_text,
        devices=run.reference.world_size,
        loss=None,
        held_out=None,
        step_seconds=median(totals),
        items_per_second=median(rates),
        peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        device_hours=spent.get("device_hours"),
        usd=spent.get("usd") or None,
        kwh=spent.get("kwh") or None,
        group=0,
    )
    evaluations = {each.step: each.loss for each in run.of(EvaluationRecord)}
    known = {step: loss for step, loss in evaluations.items() if step is not None and number(loss) is not None}
    return _Taken(name, own, run.reference, values, {step: loss for step, loss in known.items() if loss is not None})


def _groups(starts: Sequence[RunStarted], is_same: Callable[[RunStarted, RunStarted], bool]) -> list[int]:
    """Return for each run the number of the first one that is the same."""
    return [next(index for index, other in enumerate(starts) if is_same(other, start)) for start in starts]


def _window(values: StepValues, name: str, until: int, last: int) -> Sampled:
    steps = values.column("step")
    return values.column(name)[(steps > until - last) & (steps <= until)]


def _with(run: ComparedRun, group: int, window: Sampled, held_out: float | None) -> ComparedRun:
    finite = window[np.isfinite(window)]
    loss = float(finite.mean()) if len(finite) else None
    if len(window) and not np.isfinite(window[-1]):  # it has diverged: what it was before is not how it stands
        loss = math.nan
    return replace(run, loss=loss, held_out=held_out, group=group)


def _curves(values: StepValues) -> tuple[Series, Series]:
    steps = values.column("step")
    smooth = trend(steps, values.column("loss"))
    loss = smooth if smooth.points else thin(steps, values.column("loss"), POINTS)
    return loss, thin(steps, values.column("total"), POINTS)


# ---- differences and their noise ---------------------------------------------------------------------------------


def _figures(runs: Sequence[ComparedRun], taken: Sequence[_Taken], until: int, last: int) -> list[ComparedFigure]:
    found = []
    starts = [each.start for each in taken]
    losses = RunKinds(tuple(run.group for run in runs), tuple(seed_of(start) for start in starts))
    # Who repeats a run with the same seed gets the same loss, and another time.
    rest = RunKinds(tuple(_groups(starts, same_work)), tuple(map(str, range(len(starts)))))
    for index in range(1, len(runs)):
        own = [
            _figure("training loss", "loss", runs, index, _loss_noise(taken[0], taken[index], until, last), losses),
            _figure("held-out loss", "held_out", runs, index, None, losses),
            _figure("step seconds", "step_seconds", runs, index, _speed_noise(taken[0], taken[index]), rest),
            _figure("peak bytes", "peak_bytes", runs, index, None, rest),
            _figure("USD", "usd", runs, index, None, rest),
            _figure("kWh", "kwh", runs, index, None, rest),
        ]
        found += [figure for figure in own if figure is not None]
    return found


def _figure(
    name: str, field: str, runs: Sequence[ComparedRun], index: int, noise: Noise | None, kinds: RunKinds
) -> ComparedFigure | None:
    values = [number(getattr(run, field)) for run in runs]
    first, own = values[0], values[index]
    if first is None or own is None:
        return None
    source = STEPS if noise else ""
    if (told := kinds.told(values, index)) is not None:
        (first, own, noise), source = told, SEEDS
    difference = own - first
    lower = runs[index].name if difference < 0 else runs[0].name
    is_beyond = noise is not None and abs(difference) > noise.half_width
    return ComparedFigure(
        figure=name,
        run=runs[index].name,
        against=runs[0].name,
        difference=difference,
        relative=difference / first if first else None,
        plus_minus=None if noise is None else noise.half_width,
        sure=None if noise is None else noise.sure(difference),
        noise=source,
        lower=lower if is_beyond else "",
        better=lower if is_beyond and source == SEEDS else "",
    )


def _loss_noise(first: _Taken, second: _Taken, until: int, last: int) -> Noise | None:
    """Return the noise of a difference of mean losses. Steps are paired: where data are shared, so is their noise."""
    windows = [_window_by_step(each.values, until, last) for each in (first, second)]
    steps = sorted(set(windows[0]) & set(windows[1]))
    return noise_of(np.array([windows[1][step] - windows[0][step] for step in steps], dtype=np.float64))


def _window_by_step(values: StepValues, until: int, last: int) -> dict[float, float]:
    steps = _window(values, "step", until, last)
    return dict(zip(steps.tolist(), _window(values, "loss", until, last).tolist(), strict=True))


def _speed_noise(first: _Taken, second: _Taken) -> Noise | None:
    """Return the noise of a difference of median step times."""
    found = [noise_of(each.values.column("total")[1:][-MOST_LAST:], lambda drawn: np.median(drawn, axis=1))
             for each in (first, second)]  # fmt: skip
    if found[0] is None or found[1] is None:
        return None
    return Noise(math.hypot(found[0].error, found[1].error), min(found[0].freedom, found[1].freedom))
