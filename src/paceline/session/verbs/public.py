"""The verbs of the command line as functions, `paceline.plan` and its kin: thin, and free of imports until called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from paceline.config.called import OVERRIDES, SAY, argument, checked_call
from paceline.config.values import kind_of, literal
from paceline.errors import ConfigError

if TYPE_CHECKING:
    import datetime

    from paceline.account.bill import Bill
    from paceline.backtest.backtest import Backtest
    from paceline.plan.explain.compare_clusters import Comparison
    from paceline.plan.placement.grouped import Grouped
    from paceline.plan.planned import Planned
    from paceline.report.summary import Summary
    from paceline.session.verbs.proofs import Verification
    from paceline.session.verbs.run_folder import RunFolder
    from paceline.session.verbs.simulation import Simulation
    from paceline.spec.cluster import ClusterSpec
    from paceline.spec.load import Spec
    from paceline.spec.plan import Plan, PlanSpec
    from paceline.spec.task import Task

Say = Callable[[str], None]


@overload
def plan(
    task: Task | Spec | str | Path,
    plan: str | Mapping[str, object] | PlanSpec | Plan = "auto",
    *,
    cluster: str | int | Mapping[str, object] | ClusterSpec = "auto",
    overrides: Sequence[str] = (),
    measure: bool = False,
    say: Say | None = None,
) -> Planned: ...


@overload
def plan(
    task: Task | Spec | str | Path,
    plan: str | Mapping[str, object] | PlanSpec | Plan = "auto",
    *,
    cluster: list[str | int],
    overrides: Sequence[str] = (),
    say: Say | None = None,
) -> Comparison: ...


@checked_call(overrides=OVERRIDES, measure=argument("flag"), say=SAY)
def plan(
    task: Any,
    plan: Any = "auto",
    *,
    cluster: Any = "auto",
    overrides: Sequence[str] = (),
    measure: bool = False,
    say: Say | None = None,
) -> Planned | Comparison | Grouped:
    """Return the best plan of a task on a cluster with its price, as `paceline plan` prints it. Nothing is trained.

    A list as `cluster` compares: numbers of devices, names of devices, and every name with every number where there
    are both. A spec file with `[cluster.groups]` gives the ways to use all the groups (`Grouped`). `measure` times the
    task's own blocks on this machine first. `say` hears of slow preparations. Raises DoesNotFit where no plan fits, and
    ConfigError for what is no task, plan or cluster.
    """
    from paceline.plan.explain.compare_clusters import compare_clusters
    from paceline.session.verbs.planning import answer
    from paceline.session.verbs.spec_given import spec_of

    if not isinstance(cluster, list):
        return answer(spec_of(task, plan, cluster, overrides), measure=measure, say=say)
    if measure:
        raise ConfigError("measure with several clusters", "it speaks of one plan", "one of the clusters")
    names = [one for one in cluster if isinstance(one, str)]
    counts = [one for one in cluster if isinstance(one, int) and not isinstance(one, bool)]
    if not cluster or len(names) + len(counts) < len(cluster) or any(count < 1 for count in counts):
        because = "a list compares: names of devices, and numbers of them from 1 on"
        raise ConfigError(f"cluster = {cluster!r} cannot be used", because, '[8, 16], or ["h100-sxm", "a100-80"]')
    return compare_clusters(spec_of(task, plan, "auto", overrides), names, counts, say=say)


@checked_call(
    layout=argument("text", 'such as "dp_shard=2"', optional=True), every=argument("whole", minimum=0),
    steps=argument("whole", minimum=1), dtypes=argument("texts", 'such as ["fp32", "fp64"]', optional=True),
    overrides=OVERRIDES, say=SAY,
)  # fmt: skip
def verify(
    task: Task | Spec | str | Path,
    layout: str | None = None,
    *,
    every: int = 0,
    cluster: str | int | Mapping[str, object] | ClusterSpec = "auto",
    overrides: Sequence[str] = (),
    steps: int = 3,
    dtypes: Sequence[str] | None = None,
    say: Say | None = None,
) -> Verification:
    """Return whether a layout ("dp_shard=2"; None: the planner's) gives the numbers of one device, in small processes.

    `every=4` proves every layout of 2 to 4 ranks instead. `steps` updates are compared, in the precisions `dtypes`:
    ("fp32", "fp64"), and ("fp64",) for every layout. An unequal layout is no error here: `equal` is False, and
    `failure()` is the error that the command line ends with. Raises ConfigError for what is no layout or precision.
    """
    from paceline.session.verbs.proofs import verification
    from paceline.session.verbs.spec_given import spec_of

    spec = spec_of(task, "auto", cluster, overrides)
    return verification(spec, layout=layout, every=every, steps=steps, dtypes=dtypes, say=say)


@checked_call(
    days=argument("number", above=0.0, optional=True), policies=argument("texts"), runs=argument("whole", minimum=1),
    seed=argument("whole", minimum=0), intervals=argument("flag"), measured=argument("text", optional=True),
    overrides=OVERRIDES, say=SAY,
)  # fmt: skip
def simulate(
    task: Task | Spec | str | Path,
    plan: str | Mapping[str, object] | PlanSpec | Plan = "auto",
    *,
    cluster: str | int | Mapping[str, object] | ClusterSpec = "auto",
    overrides: Sequence[str] = (),
    days: float | None = None,
    policies: Sequence[str] = (),
    runs: int = 50,
    seed: int = 0,
    intervals: bool = False,
    measured: str | Path | None = None,
    say: Say | None = None,
) -> Simulation:
    """Return how a task's run goes on machines that fail, as `paceline simulate` prints it. Nothing is trained.

    Without `days` runs go on until the task is done. `policies` are names with settings ("spares,every=30min"; empty:
    those that the command line compares); all meet the same failures, `runs` times. `intervals` looks for the best
    interval between checkpoints too. `measured` is the directory of a run that went on after faults, whose rate and
    costs are taken. Raises ConfigError where nothing is known of how often the machines fail.
    """
    from paceline.session.verbs.simulation import simulation
    from paceline.session.verbs.spec_given import spec_of

    spec = spec_of(task, plan, cluster, overrides)
    return simulation(
        spec, days=days, policies=policies, runs=runs, seed=seed, intervals=intervals, say=say,
        measured=None if measured is None else Path(measured),
    )  # fmt: skip


@checked_call()
def backtest(files: str | Path | Sequence[str | Path]) -> Backtest:
    """Return the scores of forecasts against tables of measurements (.csv, .jsonl, .parquet) and folders of runs.

    Raises DataError for a file that is no table, and for a folder without a run.
    """
    from paceline.session.verbs.scores import backtest_of

    return backtest_of(_paths(files, "files", "paths of tables"))


@checked_call(run_dir=argument("text"))
def report(run_dir: str | Path) -> Summary:
    """Write RUN_DIR/report.html and return what is in it: what a run took against what was forecast.

    Raises ConfigError where the folder is not a run's, StorageError where its journal is empty or nothing can be
    written.
    """
    from paceline.report.build import build_report, write_report

    run = load_run(run_dir)
    summary = build_report(run.dir)
    write_report(run.dir, summary)
    return summary


@checked_call(by=argument("text"), price_class=argument("text"), prices=argument("text", optional=True))
def bill(
    runs: str | Path | Sequence[str | Path] = "runs",
    by: str = "run",
    *,
    since: datetime.date | str | None = None,
    until: datetime.date | str | None = None,
    prices: str | Path | None = None,
    price_class: str = "",
) -> Bill:
    """Return what runs cost: device-hours by what the devices did, money, energy and carbon.

    `runs` are runs' directories, or folders that hold them; `by` is run, start, plan, device, kind, day, month, or the
    name of a tag. `since` and `until` are days, such as "2026-11-01". `prices` is a file with prices of your own.
    Raises ConfigError where there is no run, and for what is no day.
    """
    from paceline.account.bill import make_bill
    from paceline.account.days import day_of
    from paceline.account.prices import read_prices

    paths, book = _paths(runs, "runs", "paths of runs"), read_prices(Path(prices) if prices else None)
    return make_bill(paths, by, day_of(since, "since"), day_of(until, "until"), book, price_class)


@checked_call(run_dir=argument("text"))
def load_run(run_dir: str | Path) -> RunFolder:
    """Return a run that is over, or still goes on, from its directory: records, spec, checkpoints, weights, report.

    Raises ConfigError where the folder is not a run's.
    """
    from paceline.session.verbs.run_folder import open_run

    return open_run(Path(run_dir))


def _paths(given: object, name: str, wanted: str) -> list[Path]:
    """Return the paths of an argument that takes one or several. Raises ConfigError for what is none."""
    paths = [given] if isinstance(given, str | Path) else given
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | Path) for path in paths):
        raise ConfigError(f"{name} = {literal(given)} cannot be used", f"it is {kind_of(given)}", wanted)
    return [Path(path) for path in paths]
