"""What a task's steps take with their loader and without: two halves of one short run that is thrown away."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import StorageError
from paceline.lock import take
from paceline.scratch import Scratch
from paceline.session.ready.brief_of_plan import make_brief
from paceline.session.start import plan_here, run_brief
from paceline.spec.journal.kinds import RanksRecord, StepRecord
from paceline.spec.journal.reading import read_records
from paceline.spec.load import Spec
from paceline.spec.survive.recovery import RecoverySpec
from paceline.spec.watch.exports import ExportsSpec
from paceline.units import Amount, format_durations, format_seconds
from paceline.verdict.steps_seen import seen_of
from paceline.verdict.verdict import BoundVerdict, judge

WARM_UP = 2  # steps that count to neither half
LEAST_GAIN = 1.05  # times as fast without the loader: less than this is said to be nothing


@dataclass(frozen=True)
class LoaderBench:
    """Medians of `steps` steps that read their batches, and of as many that trained on batches read before."""

    steps: int
    reading_seconds: float
    repeated_seconds: float
    data_seconds: float  # of a step that reads: waiting for the batch, on the rank that waits longest
    plan: str
    bound: BoundVerdict | None  # of the steps that read

    @property
    def times(self) -> float:
        """How many times as fast steps are without their loader."""
        return self.reading_seconds / self.repeated_seconds

    def lines(self) -> list[str]:
        """Return what is told to people."""
        without = (
            f"{self.times:.2f} times as fast: that much is the loader's"
            if self.times >= LEAST_GAIN
            else "no faster: the loader keeps up"
        )
        took, waited = format_durations(self.reading_seconds, self.data_seconds)
        found = [
            f"steps    {took} as they are, of which {waited} wait for data (medians of {self.steps})",
            f"cached   {format_seconds(self.repeated_seconds)} on batches that were read before, {without}",
        ]
        if self.bound:
            found += [f"verdict  {self.bound.text}", *(f"         {each}" for each in self.bound.evidence)]
            found += [f"try      {self.bound.advice}"]
        return found


def bench_data(spec: Spec, steps: int, say: Callable[[str], None]) -> LoaderBench:
    """Return what the steps of a spec take with their loader and without, `steps` of each, on this machine.

    Raises what planning raises, and the error of a run that failed.
    """
    last_read = WARM_UP + steps
    with Scratch("bench") as folder:
        own = _short(spec, Path(folder) / "run", last_read, last_read + steps)
        (Path(folder) / "run").mkdir()
        with take(Path(folder) / "run") as lock:
            planned = plan_here(own, say)
            say(f"plan     {planned.plan}")
            brief = dataclasses.replace(make_brief(planned), read_steps=last_read)
            outcome = run_brief(own, brief, lock, lambda line: None)
        if outcome.error is not None:
            from paceline.session.together import as_error

            raise as_error({**outcome.error, "exit_code": outcome.exit_code})
        if outcome.exit_code:
            raise StorageError("the measurement ended early", f"exit code {outcome.exit_code}", "start it again")
        return _measured(list(read_records(Path(folder) / "run")), steps, str(planned.plan))


def _short(spec: Spec, run_dir: Path, last_read: int, steps: int) -> Spec:
    """Return a spec that trains so many steps, and does nothing besides; ranks are compared after `last_read`."""
    task = dataclasses.replace(spec.task, stop=Amount(steps, "steps"))
    run = dataclasses.replace(
        spec.run,
        dir=str(run_dir),
        checkpoint_every=None,
        evaluate_every=None,
        check_every=Amount(last_read, "steps"),
        log_every=Amount(steps, "steps"),
        verify=False,
        tensorboard=False,
        exports=ExportsSpec(),
        recovery=RecoverySpec(retries=0),
    )
    cluster = dataclasses.replace(spec.cluster, learn=False)
    return dataclasses.replace(spec, task=task, run=run, cluster=cluster)


def _measured(records: list[object], steps: int, plan: str) -> LoaderBench:
    made = [each for each in records if isinstance(each, StepRecord) and (each.step or 0) > WARM_UP]
    reading, repeated = made[:steps], made[steps:]
    told = [each for each in records if isinstance(each, RanksRecord) and (each.step or 0) <= WARM_UP + steps]
    names = sorted({name for each in reading for name in each.seconds})
    means = {name: statistics.fmean(each.seconds.get(name, 0.0) for each in reading) for name in names}
    seen = seen_of(told, means, len(reading), 1)
    return LoaderBench(
        steps=steps,
        reading_seconds=statistics.median(each.seconds["total"] for each in reading),
        repeated_seconds=statistics.median(each.seconds["total"] for each in repeated),
        data_seconds=seen.most("data") if seen else means["data"],
        plan=plan,
        bound=judge(seen) if seen else None,
    )
