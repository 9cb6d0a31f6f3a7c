"""Prepare a task to be planned: what planning needs to know of it, whatever the cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from paceline.errors import ConfigError
from paceline.plan.choice import Prepared
from paceline.spec.amounts import batch_samples, total_steps
from paceline.spec.arguments import has_checkpoint, run_directory
from paceline.spec.load import Spec
from paceline.spec.model_folder import FRESH
from paceline.spec.profile import ModelProfile
from paceline.spec.steps.growth import course_of
from paceline.spec.task import ModelSpec, Task
from paceline.task.data.facts import DataFacts, data_facts, is_own
from paceline.task.data.listed_once import listed_once
from paceline.task.data.order.budget import TokenBudget, budget_of, rows_of_task
from paceline.task.data.order.lengths import RowLengths
from paceline.task.data.source import open_sources
from paceline.task.models.sizes import check_name
from paceline.task.profile.of_task import profile_task
from paceline.task.settled import settle


def prepare_task(spec: Spec, *, say: Callable[[str], None] | None = None) -> Prepared:
    """Return what planning a spec's task needs to know of it. `say` hears of slow preparations.

    Raises the errors of data and model. Imports no torch for built-in models and text.
    """
    with listed_once():
        return _prepared(spec, say)


def _prepared(spec: Spec, say: Callable[[str], None] | None) -> Prepared:
    if isinstance(spec.task.model, ModelSpec):
        check_name(spec.task.model.name)  # before hours of tokenising
    settled = settle(spec, say)
    spec, task = settled.spec, settled.spec.task
    facts = data_facts(task.data, say)
    refuse_unmeasured(spec, facts)
    by_length = task.batch_rows != "fixed" and task.global_batch.unit == "tokens"
    budget = _budget(task) if by_length else None
    # Where rows are filled up to the longest, tokens make as many samples as the longest would.
    items = budget.longest if budget else facts.items_per_sample
    batch = batch_samples(task, items)
    steps = total_steps(task, batch, items, facts.samples)
    modelled = _without_weights(task) if has_checkpoint(run_directory(spec)) else task
    profile = _profile(modelled, facts, budget or _uneven_rows(task, facts, batch), batch, steps)
    course, read = course_of(task.growth, batch, facts.items_per_sample), task.selection.candidates_of
    stretches = [(count, read(samples)) for count, samples in course.stretches(steps=steps)]
    taken = sum(count * samples for count, samples in stretches)
    if facts.end is not None and taken > facts.end:
        raise ConfigError(
            f"the mixture ends after {facts.end:,} samples, and the task takes {taken:,}",
            "every source that still has a weight is then read as often as its limit allows",
            f'task.stop = "{_steps_within(facts.end, stretches)} steps", later limits, or a source without one',
        )
    if facts.end is not None and taken + (spare := _passed_over(spec, stretches)) > facts.end:
        raise ConfigError(
            f"the mixture ends after {facts.end:,} samples, and the task takes {taken:,} and up to {spare:,} more",
            "on_spike = 'rollback' passes over samples, and others are trained on instead",
            f'task.stop = "{_steps_within(facts.end - spare, stretches)} steps", later limits, a source without one, or'
            " run.health.on_spike = 'skip'",
        )
    return Prepared(spec, facts, profile, batch, steps, settled.decisions)


def _budget(task: Task) -> TokenBudget:
    """Return what cuts the batches of a task whose rows follow from lengths."""
    source, _ = open_sources(task.data, task.seed)
    return budget_of(source, task.seed, int(task.global_batch.value))


def _uneven_rows(task: Task, facts: DataFacts, batch: int) -> RowLengths | None:
    """Return the batches of samples that are filled up to the longest beside them; None of other samples."""
    if not facts.longest:
        return None
    source, _ = open_sources(task.data, task.seed)
    return rows_of_task(task, source, batch)


def _profile(task: Task, facts: DataFacts, rows: RowLengths | None, batch: int, steps: int) -> ModelProfile:
    """Return the profile of the task's model: of rows of different lengths on the longest sample there is, and how full
    batches are against as many of these as the plan has."""
    if rows is None:
        return profile_task(task, facts)
    of_tokens = facts.unit == "tokens"
    longest = min(rows.longest, facts.items_per_sample) if of_tokens else facts.items_per_sample
    profile = profile_task(task, dataclasses.replace(facts, items_per_sample=longest))
    return dataclasses.replace(profile, tokens_per_sample=longest, fills=rows.fills(steps * batch, batch))


def _passed_over(spec: Spec, stretches: Sequence[tuple[int, int]]) -> int:
    """Return how many samples a run passes over at most, in going back for spikes; stretches as below."""
    health = spec.run.health
    if health.on_spike != "rollback":
        return 0
    steps, largest = sum(count for count, _ in stretches), max((batch for _, batch in stretches), default=0)
    return health.most_skips * -(-steps // health.skips_window) * largest


def _steps_within(samples: int, stretches: Sequence[tuple[int, int]]) -> int:
    """Return how many steps no more than so many samples are enough for; stretches are (steps, samples of each)."""
    steps = 0
    for count, batch in stretches:
        whole = min(count, samples // batch)
        steps, samples = steps + whole, samples - whole * batch
        if whole < count:
            break
    return steps


def refuse_unmeasured(spec: Spec, facts: DataFacts) -> None:
    """Raise ConfigError where an option looks at held-out data and there are none: it would have no effect, unsaid."""
    if facts.validation_samples or spec.task.evaluate.sets:
        return
    asked, measured = spec.task.evaluate, spec.task.evaluate.metrics
    wanted = {
        "task.evaluate.patience": asked.patience,
        "run.checkpoints.save_best": spec.run.checkpoints.save_best,
        "task.evaluate.metrics": ", ".join(str(getattr(each, "__name__", each)) for each in measured),
    }
    if found := [f"{name} = {str(value).lower()}" for name, value in wanted.items() if value]:
        own = is_own(spec.task.data)
        raise ConfigError(
            f"no data are held out, and {' and '.join(found)} would have no effect",
            "evaluations are made on held-out data"
            + (", and validation_fraction holds out nothing of a data set of your own" if own else ""),
            f"a pair of data sets: return train, validation{_from(spec.task)}, or task.evaluate.sets"
            if own
            else "more data, another task.data.validation_fraction, or task.evaluate.sets",
        )


def _from(task: Task) -> str:
    """Return where the task's data are made, after a blank; "" where they were given as an object."""
    source = task.data if isinstance(task.data, str) else getattr(task.data, "source", "")
    return f" from {source}" if isinstance(source, str) and source else ""


def _without_weights(task: Task) -> Task:
    """Return a task that has its weights in a checkpoint: the files that it started from may be gone."""
    if not isinstance(task.model, ModelSpec) or not task.model.starts_from:
        return task
    return dataclasses.replace(task, model=dataclasses.replace(task.model, weights=FRESH))
