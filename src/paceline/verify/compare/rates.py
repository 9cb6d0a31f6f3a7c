"""Does a schedule of the user's own ask for ranks? Its rates alone, in a group, and on every rank of it.

A twin has a schedule of ours, under which rates change within its few steps. What the user's own says is asked here: a
rate that is multiplied by the number of ranks would follow the layout, and the experiment would be another on each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, FirstDifference
from paceline.spec.task import Task
from paceline.task.optimizer.own_rate import asked_anew
from paceline.verify.compare.diagnosis import NOT_REPRODUCIBLE
from paceline.verify.compare.tolerance import tolerance

FAMILY = "process group"
LIKELY = (
    "the learning rate of step {step} is {known:.6g} {there} and {ours:.6g} {here}: the schedule asks for ranks or the"
    " size of the world. The global batch is the task's on every layout, and so is its learning rate: a factor for the"
    " size of the batch belongs into task.optimizer.lr"
)
LIKELY_ANEW = (
    "the learning rate of step {step} is {known:.6g} {there} and {ours:.6g} {here}: the schedule follows how often it"
    " is asked, such as by a count of its calls. Ranks, resumes and looks ahead ask for any step at any time: a rate is"
    " a function of the step alone"
)
RatesByStep = Mapping[int, float]  # by step, from 1


def own_rates(task: Task) -> RatesByStep:
    """Return the rates of some steps of a task that is counted in steps, none where the schedule is ours."""
    schedule = task.schedule
    return asked_anew(schedule, task.optimizer.lr, int(task.stop.value)) if schedule.is_own else {}


def rates(
    task: Task, plan: Plan, world: World, source: Any, items_per_sample: int, steps: int, kept: dict[object, object]
) -> CheckProof:
    """Return whether every rank has the first rank's rates of `steps` steps. Every rank calls it."""
    began, own = time.perf_counter(), own_rates(task)
    if record := _asked_again(own, task, plan.precision, began, world):
        return record
    first, *others = world.gather(own)
    for rank, found in enumerate(others, 1):
        told = {"there": "on rank 0", "here": f"on rank {rank}"}
        if record := rates_apart(first, found, rank, plan.precision, began, told):
            return record
    return CheckProof(True, plan.precision, steps, time.perf_counter() - began, {"lr": 0.0}, None)


def _asked_again(own: RatesByStep, task: Task, precision: str, began: float, world: World) -> CheckProof | None:
    """Return the record of the first rank whose rates are others when asked for once more, None where none are."""
    told = {"there": "at first", "here": "when it is asked for again"}
    cause = NOT_REPRODUCIBLE.family, LIKELY_ANEW
    mine = rates_apart(own, own_rates(task), world.rank, precision, began, told, cause)
    return next((found for found in world.gather(mine) if found is not None), None)


def rates_apart(
    known: RatesByStep,
    ours: RatesByStep,
    rank: int,
    precision: str,
    began: float,
    told: Mapping[str, str],
    cause: tuple[str, str] = (FAMILY, LIKELY),
) -> CheckProof | None:
    """Return the record of the first step whose rate is another one, None where none is.

    `told` says in words where the one (`there`) and the other (`here`) were computed, `cause` the family and what is
    likely then.
    """
    for step in sorted({*known, *ours}):
        one, other = known.get(step, math.nan), ours.get(step, math.nan)
        far = abs(other - one) / max(abs(one), abs(other), 1e-300)
        if not far <= tolerance("lr", precision):
            break
    else:
        return None
    difference = FirstDifference(
        quantity="lr", name="learning rate", step=step, rank=rank, relative=far, ratio=other / one if one else math.nan,
        ours=other, reference=one, copies_agree=True, tensors=("learning rate",), tensors_in_all=1, family=cause[0],
        likely=cause[1].format(step=step, known=one, ours=other, **told),
    )  # fmt: skip
    return CheckProof(False, precision, step, time.perf_counter() - began, {"lr": far}, difference)
