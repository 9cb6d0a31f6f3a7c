"""fit: train a task without writing a loop, from a script, a notebook or a prompt."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.config.called import OVERRIDES, checked_call
from paceline.errors import HandedBack, PacelineError, Requeue, of_rank
from paceline.report.build import build_report
from paceline.report.summary import Summary
from paceline.session.start import trained
from paceline.session.together import as_error
from paceline.session.verbs.spec_given import spec_of
from paceline.spec.arguments import run_directory
from paceline.spec.cluster import ClusterSpec
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.run import RunSpec
from paceline.spec.survive.faults import FaultPlan
from paceline.spec.task import Task
from paceline.supervise.blame import Outcome
from paceline.uncaught import is_prompt


@checked_call(overrides=OVERRIDES)
def fit(
    task: Task | Spec | Mapping[str, object] | str | Path,
    plan: str | Mapping[str, object] | PlanSpec | Plan = "auto",
    *,
    cluster: str | int | Mapping[str, object] | ClusterSpec = "auto",
    run: Mapping[str, object] | RunSpec | None = None,
    verify: bool | None = None,
    faults: str | Path | Sequence[Mapping[str, object]] | FaultPlan | None = None,
    overrides: Sequence[str] = (),
) -> Summary:
    """Plan, prove and train the task to its end and return the report.

    `task` may be the path of a spec file, whose other tables hold too: `overrides` change options of it
    ("task.stop=5 steps"), and `plan`, `cluster` and `run` that are given stand in the place of its tables.

    On several devices it starts fresh processes, which get the task by value: models, data sets and objectives
    may be defined in a notebook cell (that needs the extra 'notebook'), which shows the report as a table. Raises a
    PacelineError where the run failed, and Requeue where it was stopped early with a checkpoint, or at a prompt
    HandedBack; calling it again goes on from there. `verify=False` leaves the proof out, on record. `faults` are made
    on purpose, to rehearse them: a TOML file, or its tables.
    """
    spec = spec_of(task, plan, cluster, overrides, run, verify, faults)
    outcome = trained(spec)
    if outcome.exit_code == Requeue.exit_code:
        because = "the run was stopped early"
        raise HandedBack(because) if is_prompt() else Requeue(f"{because}; its checkpoint is saved")
    if outcome.exit_code:
        raise _failure(outcome, run_directory(spec))
    return build_report(run_directory(spec))


def _failure(outcome: Outcome, run_dir: Path) -> PacelineError:
    """Return why a run has failed, as whoever failed has told it; print the traceback of another process."""
    code = outcome.exit_code
    if outcome.error is None:
        unknown = {"what": f"the run in {run_dir} failed", "because": f"exit code {code}", "try": "see its report.html"}
        return as_error({**unknown, "exit_code": code})
    if not outcome.is_printed:
        print(outcome.error.get("traceback", ""), end="", file=sys.stderr)
    what = str(outcome.error["what"])
    if "rank" in outcome.error:
        what = of_rank(what, outcome.error["rank"], bool(outcome.error.get("names_ranks")))
    return as_error({**outcome.error, "what": what, "exit_code": code})
