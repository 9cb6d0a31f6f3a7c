"""Every layout of a task up to a number of ranks, each held against one device: `paceline verify --all N`."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

from paceline.errors import DoesNotFit, PacelineError
from paceline.plan.search.space import alone
from paceline.spec.layout import DATA_AXES, MODEL_AXES, Layout, layouts_over
from paceline.spec.load import Spec
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import ModelProfile
from paceline.spec.proof.records import Proof
from paceline.supervise.standby import Standby
from paceline.task.data.facts import data_facts
from paceline.task.profile.of_task import profile_task
from paceline.task.settled import settle
from paceline.verify.process.group import Result, run_jobs
from paceline.verify.process.start import STEPS, Say, exact_plan, proof_of, refused
from paceline.verify.rounding.verdict import ILL_CONDITIONED
from paceline.verify.twin.proof_parts import SWEEP, Subject, jobs_of

ALL_DTYPES = ("fp64",)  # the strictest proof; others cost as much again and show what it shows


def verify_all(
    spec: Spec,
    largest: int,
    *,
    steps: int = STEPS,
    dtypes: Sequence[str] = ALL_DTYPES,
    say: Say | None = None,
    progress: Say | None = None,
    standby: Standby | None = None,
) -> list[Proof]:
    """Return whether every layout of 2 to `largest` ranks that can be had equals one device.

    Each layout runs with its own degrees, on the twin of the task. Those that cannot be had say why in
    `refused_because`; an axis that is closed to the model is refused once. One that ends in an error, as when a rank
    dies, has it in `error` and is not equal. Processes are started once, forked from `standby` where there is one.
    `progress` is given a line for each layout when it is done.
    """
    spec = settle(spec, say).spec
    facts = data_facts(spec.task.data, say)
    profile = profile_task(spec.task, facts)
    plans, refusals = every_plan(spec, profile, largest)
    if say:
        ranks = f"2 to {largest} ranks" if largest > 2 else "2 ranks"
        say(f"verify   {len(plans)} layout{'' if len(plans) == 1 else 's'} of {ranks} in {', '.join(dtypes)}")
    proofs = [refused(name, refusal, steps, 0.0) for name, refusal in refusals]
    if plans:
        proofs += _prove(spec, plans, facts.vocab, steps, dtypes, say, progress, standby)
    return proofs


def every_plan(spec: Spec, profile: ModelProfile, largest: int) -> tuple[list[Plan], list[tuple[str, DoesNotFit]]]:
    """Return a plan for every layout of 2 to `largest` ranks that can be had, and (layout, why not) for the others."""
    plans: list[Plan] = []
    refusals: list[tuple[str, DoesNotFit]] = [
        (str(alone(axis, 2)), DoesNotFit(f"{axis} = 2 cannot be had", profile.closed_axes[axis]))
        for axis in (*DATA_AXES, *MODEL_AXES)
        if profile.closed_axes and axis in profile.closed_axes
    ]
    for ranks in range(2, largest + 1):
        for layout in every_layout(profile, ranks):
            try:
                plans.append(exact_plan(spec, PlanSpec(**dataclasses.asdict(layout)), profile))
            except DoesNotFit as refusal:
                refusals.append((str(layout), refusal))
    return plans, refusals


def every_layout(profile: ModelProfile, ranks: int) -> list[Layout]:
    """Return every layout of so many ranks over the axes that are open to the model."""
    closed = profile.closed_axes or {}
    divisors = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    axes = [axis for axis in (*DATA_AXES, *MODEL_AXES) if axis not in closed]
    if not any(block.experts for block in profile.blocks):
        axes = [axis for axis in axes if axis != "ep"]
    return list(layouts_over(ranks, dict.fromkeys(axes, divisors)))


def _prove(
    spec: Spec,
    plans: Sequence[Plan],
    data_vocab: int | None,
    steps: int,
    dtypes: Sequence[str],
    say: Say | None,
    progress: Say | None,
    standby: Standby | None,
) -> list[Proof]:
    """Return the proofs of plans, proven in one group of processes."""
    began = time.perf_counter()
    proofs_jobs = [jobs_of(Subject(spec, plan, data_vocab, dtypes, exact=True), SWEEP) for plan in plans]
    jobs = [job for ours in proofs_jobs for job in ours]
    count = itertools.count(1)

    def told(index: int, result: Result) -> None:
        if progress:
            done = f"{next(count):>{len(str(len(jobs)))}}/{len(jobs)}"
            progress(f"verify   {done}  {jobs[index].plan.layout}: {_outcome_text(result)}")
        if say and isinstance(result, PacelineError):
            for note in getattr(result, "__notes__", ()):
                say(note)

    results = run_jobs(jobs, steps, told, standby)
    own = sum(result.seconds for result in results if not isinstance(result, PacelineError))
    shared = max(0.0, time.perf_counter() - began - own) / len(plans)  # starting processes, by layout
    proofs = []
    left = iter(results)
    for plan, asked in zip(plans, proofs_jobs, strict=True):
        ours = list(itertools.islice(left, len(asked)))
        errors = [result for result in ours if isinstance(result, PacelineError)]
        good = [result for result in ours if not isinstance(result, PacelineError)]
        seconds = shared + sum(result.seconds for result in good)
        if errors:
            failed, ran_as = refused(str(plan.layout), errors[0], steps, seconds), str(plan.layout)
            error = failed.refused_because
            proofs.append(dataclasses.replace(failed, ran_as=ran_as, refused_because=None, error=error))
        else:
            proofs.append(proof_of(plan, asked, good, steps, seconds))
    return proofs


def _outcome_text(result: Result) -> str:
    """Return how the comparison of one layout in one precision ended, for those who watch."""
    if isinstance(result, PacelineError):
        return f"FAILED, {result.what}"
    worst = result.differences
    verdict = "equal" if result.equal else "NOT equal"
    sizes = ", ".join(f"{name} {far:.0e}" for name, far in worst.items() if name in ("whole batch", "loss", "weights"))
    return f"{verdict} in {result.dtype}, {sizes} ({result.seconds:.1f} s)"


def table_rows(proofs: Sequence[Proof]) -> list[tuple[str, ...]]:
    """Return the records as rows of text, with a heading."""
    rows: list[tuple[str, ...]] = [("layout", "equal", "loss", "gradients", "grad norm", "weights", "seconds")]
    for proof in proofs:
        if proof.refused_because:
            continue
        worst = proof.differences
        sizes = [f"{worst[name]:.0e}" if worst else "-" for name in ("loss", "gradients", "grad_norm", "weights")]
        equal = "ill-conditioned" if proof.verdict == ILL_CONDITIONED else "yes" if proof.equal else "NO"
        rows.append((proof.layout, equal, *sizes, f"{proof.seconds:.1f}"))
    return rows
