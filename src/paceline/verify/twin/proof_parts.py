"""The parts of a proof, a line for each part: what is run, by which check, and whether `train` runs the part too.

A part turns a subject (a plan to prove) into jobs: twins of the task, each with the check that holds it against one
device. To add to the proof, write a function that returns jobs and give it a line in PARTS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckName
from paceline.spec.task import DataSpec, ModelSpec
from paceline.task.known_sum import is_known_sum
from paceline.task.models.sizes import is_named
from paceline.units import Amount
from paceline.verify.compare.tolerance import DTYPES
from paceline.verify.process.group import Job
from paceline.verify.twin.layout import light_layouts, smallest_layouts, twin_layouts
from paceline.verify.twin.task import EVEN, FEW, LONG, UNEVEN, WHOLE_BATCH, Rows, in_one_piece, twin_plan, twin_task

LOW = ("bf16", "fp16")
MOST_COPIES = 3  # of a twin whose copies are kept in step as the plan says
RATES_STEPS = 1000  # of a schedule of the user's own, where the task is counted in samples, tokens or epochs
COPIES_STEPS = 5  # of it: two outer steps, and one after which copies differ
# How much is proven: before training on several devices or on one alone, of one layout, of every layout up to a size.
BRIEF, ALONE, WHOLE, SWEEP = "brief", "alone", "whole", "sweep"


@dataclass(frozen=True)
class Subject:
    """A plan to be held against one device, and in which precisions."""

    spec: Spec
    plan: Plan
    data_vocab: int | None
    dtypes: Sequence[str] = DTYPES
    exact: bool = False  # whether twins keep the degrees of the layout

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """What the twins run as."""
        return (self.plan.layout,) if self.exact else twin_layouts(self.plan.layout)

    @property
    def strictest(self) -> str:
        """The precision of parts that run in one alone."""
        return max(self.dtypes, key=DTYPES.index)

    def job(self, part: str, dtype: str, layout: Layout, rows: Rows = UNEVEN, check: CheckName = "steps") -> Job:
        """Return the job of one twin of the task."""
        task = twin_task(self.spec.task, self.plan, self.data_vocab, layout=layout, rows=rows)
        layers = task.model.layers if isinstance(task.model, ModelSpec) else 0
        plan = twin_plan(self.plan, dtype, layout=layout, rows=rows, layers=layers)
        return Job(dataclasses.replace(self.spec, task=task), plan, check, part, rows.masked)


@dataclass(frozen=True)
class ProofPart:
    """One part of a proof."""

    jobs: Callable[[Subject], list[Job]]
    scopes: tuple[str, ...]  # of BRIEF, ALONE, WHOLE and SWEEP: where it runs


def uneven_rows(subject: Subject) -> list[Job]:
    """Return the main twins: ranks of different numbers of rows, three micro-batches, masked labels."""
    return _uneven_rows(subject, subject.layouts)


def light_uneven_rows(subject: Subject) -> list[Job]:
    """Return the main twins on as few ranks as will do, for the proof before training."""
    return _uneven_rows(subject, light_layouts(subject.plan.layout))


def _uneven_rows(subject: Subject, layouts: Sequence[Layout]) -> list[Job]:
    first, *others = layouts
    jobs = [subject.job(UNEVEN.name, dtype, first) for dtype in subject.dtypes]
    return jobs + [subject.job(UNEVEN.name, subject.strictest, layout) for layout in others]


def even_rows(subject: Subject) -> list[Job]:
    """Return a twin whose ranks have equal numbers of rows: what is right of uneven ones alone is wrong here."""
    return [subject.job(EVEN.name, subject.strictest, subject.layouts[0], EVEN)]


def few_rows(subject: Subject) -> list[Job]:
    """Return a twin of which a rank has fewer rows than micro-batches, so that a row that does not count stands in."""
    layout = subject.layouts[0]
    return [subject.job(FEW.name, subject.strictest, layout, FEW)] if layout.data_degree > 1 else []


def real_length(subject: Subject) -> list[Job]:
    """Return a twin of one layer whose rows are as long as the task's, for text in a built-in family."""
    task = subject.spec.task
    named = isinstance(task.model, ModelSpec) and is_named(task.model.name)
    if not named or not isinstance(task.data, DataSpec) or subject.data_vocab is None:
        return []
    job = subject.job(LONG.name, subject.strictest, subject.layouts[0], LONG, "plain attention")
    return [dataclasses.replace(job, steps=1)]


def story(subject: Subject) -> list[Job]:
    """Return the main twin as a whole run: the training loop, evaluations, a checkpoint and resumes."""
    return [subject.job("story", subject.strictest, subject.layouts[0], check="story")]


def whole_batch(subject: Subject) -> list[Job]:
    """Return the check that a batch in pieces has the loss of the whole batch; none for a plan that cuts no batch.

    Ranks that read different samples cut a batch too.
    """
    return [] if in_one_piece(subject.plan) and subject.plan.layout.data_degree == 1 else [_whole_batch(subject)]


def whole_batch_of_ones_own(subject: Subject) -> list[Job]:
    """Return `whole_batch` for an objective or a model that is not ours: ours are known to be sums."""
    return [] if is_known_sum(subject.spec.task) else whole_batch(subject)


def cut_batch_of_ones_own(subject: Subject) -> list[Job]:
    """Return `whole_batch_of_ones_own` for one device, whose batch is cut by accumulation alone: no layout to prove."""
    return whole_batch_of_ones_own(subject) if subject.plan.accumulation > 1 else []


def _whole_batch(subject: Subject) -> Job:
    return subject.job("whole batch", "fp64", Layout(), WHOLE_BATCH, "whole batch")


def own_rates(subject: Subject) -> list[Job]:
    """Return the check of a schedule of the user's own, which no twin of another check keeps."""
    task = subject.spec.task
    if not task.schedule.is_own or subject.plan.layout.devices == 1:
        return []
    job = subject.job("learning rates", subject.strictest, subject.layouts[0], check="rates")
    stop = task.stop if task.stop.unit == "steps" else Amount(RATES_STEPS, "steps")
    own = dataclasses.replace(job.spec.task, schedule=task.schedule, stop=stop)
    return [dataclasses.replace(job, spec=dataclasses.replace(job.spec, task=own), steps=int(stop.value))]


def low_precision(subject: Subject) -> list[Job]:
    """Return a twin in the plan's own precision, where that is less than fp32."""
    precision = subject.plan.precision
    return [subject.job("low precision", precision, subject.layouts[0], check="low")] if precision in LOW else []


def light_low_precision(subject: Subject) -> list[Job]:
    """Return a twin of the fewest ranks for each axis in the plan's own precision, of which less is measured."""
    if subject.plan.precision not in LOW:
        return []
    layouts = smallest_layouts(subject.plan.layout)
    return [subject.job("low precision", subject.plan.precision, one, check="low, brief") for one in layouts]


def copies(subject: Subject) -> list[Job]:
    """Return twins whose copies are kept in step as the plan says, where that is not by exact sums in every step.

    There is one for shards of copies, and one for each axis that splits a copy otherwise.
    """
    sync, layout = subject.plan.sync, subject.plan.layout
    if sync.is_plain:
        return []
    number = min(MOST_COPIES, layout.dp_replicate)
    twins = [Layout(dp_replicate=number, **{axis: 2}) for axis in ("cp", "tp", "pp") if getattr(layout, axis) > 1]
    if layout.dp_shard > 1 or not twins:
        twins.insert(0, Layout(dp_replicate=number, dp_shard=min(2, layout.dp_shard)))
    jobs = [subject.job("copies in step", "fp64", twin, check="copies") for twin in twins]
    small = dataclasses.replace(sync, every=min(2, sync.every))
    return [
        dataclasses.replace(job, plan=dataclasses.replace(job.plan, sync=small), steps=COPIES_STEPS) for job in jobs
    ]


PARTS: tuple[ProofPart, ...] = (
    ProofPart(whole_batch, (WHOLE,)),  # first: of a loss that is no sum nothing else says anything
    ProofPart(whole_batch_of_ones_own, (BRIEF, SWEEP)),
    ProofPart(cut_batch_of_ones_own, (ALONE,)),
    ProofPart(own_rates, (BRIEF, WHOLE, SWEEP)),
    ProofPart(light_uneven_rows, (BRIEF,)),
    ProofPart(uneven_rows, (WHOLE, SWEEP)),
    ProofPart(even_rows, (WHOLE,)),
    ProofPart(few_rows, (WHOLE,)),
    ProofPart(real_length, (WHOLE,)),
    ProofPart(story, (WHOLE,)),
    ProofPart(low_precision, (WHOLE,)),
    ProofPart(light_low_precision, (BRIEF,)),
    ProofPart(copies, (BRIEF, WHOLE)),
)


def jobs_of(subject: Subject, scope: str = WHOLE) -> list[Job]:
    """Return what to run for a plan, in the order in which it is reported."""
    return [job for part in PARTS if scope in part.scopes for job in part.jobs(subject)]
