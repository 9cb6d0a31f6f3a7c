"""The story: a whole run on the twin, with its loop, evaluations, checkpoint and restarts, against one device.

The ranks train three steps, or eight of a batch that grows by a schedule, with `Training` itself, which reads the rows,
sets the learning rate, evaluates after every step and saves after the last of them. A second `Training` then goes on
from that checkpoint on another layout of the same ranks, a third under the plan itself, and a fourth on one device
alone; each makes one step more. All of it is held against one unbroken run of one device, and so is what the run wrote
into its journal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.errors import ConfigError, NeedsWholeWeights, NumericalStop, Requeue
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, FirstDifference, Rounding
from paceline.spec.run import RunSpec
from paceline.spec.task import Task
from paceline.spec.watch.evaluate import EvaluateSpec
from paceline.spec.watch.samples import SamplesSpec
from paceline.supervise.told.brief import Brief
from paceline.task.data.protocol import Source
from paceline.task.data.source import open_sources
from paceline.units import Amount
from paceline.verify.compare.asked import Asked
from paceline.verify.compare.difference import Difference
from paceline.verify.compare.in_a_group import has_evaluations
from paceline.verify.compare.layout import first_difference, overflow
from paceline.verify.compare.tolerance import larger
from paceline.verify.process.shared_folder import shared_folder
from paceline.verify.reference.passes import with_own_model
from paceline.verify.rounding.conditioning import Again, beyond_rounding, settled
from paceline.verify.story.cause import caused
from paceline.verify.story.plans import (
    Act,
    acts_of,
    planned_steps,
    story_freezing,
    story_growth,
    story_schedule,
    story_sizes,
)
from paceline.verify.story.reference import Unbroken, unbroken, unbroken_again
from paceline.verify.story.story_differences import journal_differences, restored_differences, step_differences
from paceline.verify.twin.chosen import ChosenSource
from paceline.verify.twin.fold import for_twin, shortened


def story(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    items_per_sample: int,
    steps: int = 0,
    kept: dict[object, object] | None = None,
    *,
    on_copies: bool = False,
) -> CheckProof:
    """Return whether a whole run under the plan equals one device's, on every rank alike.

    The story has steps of its own number; `steps` and `kept` are there for other checks. With `on_copies` the run goes
    on where every rank has all weights.
    """
    exact = dataclasses.replace(plan, precision="fp64")
    again = functools.partial(story, task, exact, world, source, items_per_sample, on_copies=on_copies)
    return settled(*_told(task, plan, world, source, on_copies), again)


def _told(task: Task, plan: Plan, world: World, source: Source, on_copies: bool) -> tuple[CheckProof, Rounding | None]:
    """Return what a story in the plan's own precision finds, and what rounding explains of it."""
    began = time.perf_counter()
    spec = _spec(task, plan, world, source)
    found: list[Difference] = []
    first: FirstDifference | None = None
    rounding: Rounding | None = None
    with (
        shared_folder(world, "story") as run_dir,
        contextlib.redirect_stdout(io.StringIO()),
    ):  # status lines of a run nobody watches
        for act, expected, again in _expected(spec, plan, acts_of(spec.task, plan, world, on_copies)):
            ends = world.share(expected.overflows())
            if ends:
                left_out = f"one device's own numbers overflow in step {ends} of the run"
                return CheckProof(
                    True, plan.precision, 0, time.perf_counter() - began, {}, None, left_out=left_out
                ), None
            act = dataclasses.replace(act, sizes=world.share(expected.sizes))
            told: list[Difference] = []
            if act.world.size == world.size or world.is_first:
                told = _play(act, spec, run_dir, expected)
            told = world.share(told)
            found += told
            wrong, explained = beyond_rounding(told, plan.precision, again, world)
            rounding = rounding or explained
            if expected.traits is not None:  # on rank 0
                first = caused(first_difference(wrong, told, act.plan, expected.traits), act, expected.changed())
            first = world.share(first)
            if first is not None:
                break
    worst: dict[str, float] = {}
    for difference in found:
        worst[difference.quantity] = larger(worst.get(difference.quantity, 0.0), difference.relative)
    seconds = time.perf_counter() - began
    made = len(story_sizes(task, plan))
    whole = CheckProof(first is None, plan.precision, made, seconds, worst, first)
    return whole, None if first else rounding


def _spec(task: Task, plan: Plan, world: World, source: Source) -> Spec:
    """Return the spec of the run: amounts in samples, which are to be counted in steps, and uneven parts to evaluate.

    A task that is never evaluated is not in its story either. One whose held-out data are further sets alone, or have
    items in few samples, is evaluated on what it trains on.
    """
    held_out, evaluates = open_sources(task.data, task.seed)[1], has_evaluations(task)
    if evaluates:
        chosen = isinstance(source, ChosenSource)
        held_out = source if held_out is None or chosen else for_twin(held_out, task)
    selection, sizes = task.selection, story_sizes(task, plan)
    read, saved = sizes[0], len(sizes) - 1
    # An epoch ends within the second step, and another one later. Candidates of a step are not the same sample twice:
    # of equal losses rounding would say which is the larger one.
    source = shortened(source, 2 * read if selection.selects else read + -(-read // 2))
    return Spec(
        task=dataclasses.replace(
            task,
            data=(source, held_out),
            schedule=story_schedule(task.schedule, read, planned_steps(sizes)),
            growth=story_growth(task, plan, source.items_per_sample),
            optimizer=story_freezing(task.optimizer),
            batch_rows="fixed",
            # What decides on steps, or ends a run early, would do so in the story, which one device knows nothing of;
            # prompts and further sets are of the task's own vocabulary and length.
            callbacks=(),
            samples=SamplesSpec(),
            evaluate=EvaluateSpec(metrics=task.evaluate.metrics if evaluates else ()),
        ),
        cluster=ClusterSpec(learn=False),
        run=RunSpec(
            checkpoint_every=Amount(saved * read, "samples"),
            evaluate_every=Amount(read, "samples") if evaluates else None,
            evaluate_samples=2 * world.size + 1,
            check_every=Amount(1, "steps"),
            record_samples=True,
        ),
    )


def _expected(spec: Spec, plan: Plan, acts: Sequence[Act]) -> Iterator[tuple[Act, Unbroken, Again | None]]:
    """Yield every start of the run with what one device computes and how it does again, which rank 0 alone knows."""
    world = acts[0].world
    known: dict[object, Unbroken] = {}
    source = spec.task.data[0]
    asked = Asked(spec.task, plan, source, source.items_per_sample)
    for act, last in zip(acts, [acts[1].plan, *(act.plan for act in acts[1:])], strict=True):
        cut = (last.layout.data_degree, last.accumulation, last.rows)
        given = (asked, last, spec.run.evaluate_samples)
        if cut not in known:
            known[cut] = unbroken(*given) if world.is_first else Unbroken()
        again = unbroken_again(*given) if world.is_first else None
        yield act, known[cut], again


def _play(act: Act, spec: Spec, run_dir: Path, expected: Unbroken) -> list[Difference]:
    """Start the run, as `train` does, let it make the steps of the act, and return all differences in order of cause.

    Every rank of the act's world calls it.
    """
    spec = dataclasses.replace(spec, task=with_own_model(spec.task))
    items, unit = spec.task.data[0].items_per_sample, spec.task.data[0].unit
    brief = Brief(
        act.plan, planned_steps(act.sizes), items, unit, "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord()
    )
    training = Training(spec, brief, act.world, run_dir)
    found: list[Difference] = []
    if act.resumed:
        found += restored_differences(training, expected.at(act.saved, act.world), act)
    with contextlib.closing(iter(training)) as batches:  # leaves as a `break` does: the run is stopped, not complete
        for step, batch in zip(range(act.begins, act.begins + act.steps), batches, strict=False):
            passed = expected.at(step, act.world)
            try:
                stats = training.step(batch)
            except Requeue as stop:  # a signal that Training took for its own is meant for the proof
                raise KeyboardInterrupt from stop
            except NumericalStop:
                return [*found, overflow(passed.step, step)]
            except ConfigError as error:  # which layout it is about: the story goes on another one than was asked for
                kind = NeedsWholeWeights if isinstance(error, NeedsWholeWeights) else ConfigError
                raise kind(
                    f"{act.resumed}: {error.what}" if act.resumed else error.what, error.because, error.try_
                ) from error
            found += step_differences(training, batch, stats, passed, act, run_dir)
            found += journal_differences(run_dir, passed, act)
    return found
