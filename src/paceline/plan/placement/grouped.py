"""A spec on groups of different devices, planned: `paceline plan` where `[cluster.groups]` stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.cluster.groups import Group, resolve_groups
from paceline.errors import DoesNotFit
from paceline.plan.placement.uneven import Uneven, Work, plan_uneven
from paceline.plan.planned import plan_task
from paceline.spec.amounts import batch_samples, total_steps
from paceline.spec.forecast import Forecast
from paceline.spec.load import Spec
from paceline.spec.optimizers import optimizer_key
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile
from paceline.task.data.facts import DataFacts, data_facts
from paceline.task.profile.of_task import profile_task
from paceline.task.settled import settle


@dataclass(frozen=True)
class JointPlan:
    """One layout over all groups, in unequal rows: what `paceline train` runs, and its price."""

    plan: Plan
    forecast: Forecast
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Grouped:
    """A task on groups of different devices: the ways to use them all, fastest first, and those that do not fit.

    `joint` is the plan that trains, None where none fits; the other ways are priced beside it.
    """

    groups: tuple[Group, ...]
    profile: ModelProfile
    facts: DataFacts
    ways: tuple[Uneven, ...]
    refused: tuple[str, ...]
    batch_samples: int
    steps: int
    remarks: tuple[str, ...]
    joint: JointPlan | None = None


def plan_groups(spec: Spec, *, say: Callable[[str], None] | None = None) -> Grouped:
    """Return the ways of a spec's task on its groups. Raises DoesNotFit where neither the layout that trains nor any of
    those that are priced beside it can be had, and the errors of data and model.
    """
    spec = settle(spec, say).spec
    task = spec.task
    groups = resolve_groups(spec.cluster)
    facts = data_facts(task.data, say)
    profile = profile_task(task, facts)
    batch = batch_samples(task, facts.items_per_sample)
    steps = total_steps(task, batch, facts.items_per_sample, facts.samples)
    ways: tuple[Uneven, ...] = ()
    refused: tuple[str, ...] = ()
    none: DoesNotFit | None = None
    try:
        ways, refused = plan_uneven(Work(profile, spec.plan, batch, steps, optimizer_key(task.optimizer)), groups)
    except DoesNotFit as error:
        none, refused = error, (f"{error.what}: {error.because}",)
    remarks = (*(remark for group in groups for remark in group.remarks), *facts.notes)
    joint = None
    try:
        planned = plan_task(spec, say=say)
        joint = JointPlan(planned.plan, planned.forecast, planned.remarks)
    except DoesNotFit as error:
        if none is not None:
            raise DoesNotFit(none.what, f"{none.because}; one layout over all: {error.because}", error.try_) from error
        refused = (*refused, f"one layout over all: {error.what}: {error.because}")
    return Grouped(groups, profile, facts, ways, refused, batch, steps, remarks, joint)
