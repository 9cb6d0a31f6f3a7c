"""Outlook: what a step of a plan would take with one thing otherwise, by forecast. A run carries it along.

So whoever finds while a run lives what bounds its steps can say at once what a change would bring, and plans nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from paceline.cluster.vary import varied_figures
from paceline.plan.cost.components import terms_of
from paceline.plan.cost.memory.usable import needed_terms, usable_bytes
from paceline.plan.cost.pricing import held_components, time_components
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.feasible.micro_batch import with_micro_batch
from paceline.plan.feasible.refusals import refusal
from paceline.plan.risk.sensitivity import calibrated_as
from paceline.spec.layout import largest_part
from paceline.spec.plan import RECOMPUTE, SCHEDULES, Plan

WIDE = ("fp32", "fp64")
TIMES = 2.0  # how much more of a figure of the cluster is tried


def outlook_of(context: PricedTask, plan: Plan) -> dict[str, object]:
    """Return what steps of a plan take by forecast, now and with each of some changes, as plain data for a journal.

    `step_seconds`, `pass_seconds` (forward and backward passes alone) and `bubble_seconds` (a pipeline fills and
    drains) are those of the plan; each of `changes` has a `cause` (what it is an answer to), its `text`, the same
    seconds, and whether it `fits` the memory. Empty where the time of a step is not known.
    """
    now = _priced(context, [plan])[0]
    if not math.isfinite(now.step_seconds):
        return {}
    makers = (_micro_batches, _pipelines, _cheaper, _figures)
    changes = [change for make in makers for change in make(context, plan)]
    return {**dataclasses.asdict(now), "changes": [dataclasses.asdict(each) for each in changes]}


@dataclass(frozen=True)
class _Priced:
    step_seconds: float
    pass_seconds: float
    bubble_seconds: float


@dataclass(frozen=True)
class _Changed(_Priced):
    cause: str
    text: str
    fits: bool


def _priced(context: PricedTask, plans: list[Plan]) -> list[_Priced]:
    components = time_components(context.sheet(*plans))
    found = []
    for at in range(len(plans)):
        terms = terms_of(components, at)
        passes = sum(term.value for term in terms if term.clock == "forward_backward")
        bubble = sum(term.value for term in terms if term.kind == "bubble")
        found.append(_Priced(sum(term.value for term in terms), passes, bubble))
    return found


def _micro_batches(context: PricedTask, plan: Plan) -> Iterator[_Changed]:
    """Yield what larger micro-batches would take: two, four, eight ... times as many samples in a pass, and all."""
    most = largest_part(plan.batch_samples, plan.layout.data_degree, plan.rows)
    sizes = [plan.micro_batch * 2**power for power in range(1, 32) if plan.micro_batch * 2**power < most]
    plans = [with_micro_batch(plan, size) for size in (*sizes, most) if size > plan.micro_batch]
    yield from _changed(context, plans, "memory", lambda changed: f"plan.micro_batch = {changed.micro_batch}")


def _pipelines(context: PricedTask, plan: Plan) -> Iterator[_Changed]:
    """Yield what a pipeline takes with smaller micro-batches, of which a step has more, and with other schedules."""
    if plan.layout.pp == 1:
        return
    sizes = [plan.micro_batch // 2**power for power in range(1, 32) if plan.micro_batch >= 2**power]
    smaller = [with_micro_batch(plan, size) for size in sizes]
    yield from _changed(context, smaller, "pipeline", lambda changed: f"plan.micro_batch = {changed.micro_batch}")
    schedules = [dataclasses.replace(plan, schedule=name) for name in SCHEDULES if name != plan.schedule]
    yield from _changed(context, schedules, "pipeline", lambda changed: f"plan.schedule = '{changed.schedule}'")


def _cheaper(context: PricedTask, plan: Plan) -> Iterator[_Changed]:
    """Yield what the plan takes where it computes less: in bf16, compiled, with less recompute."""
    found = {}
    if plan.precision in WIDE:
        found["plan.precision = 'bf16'"] = dataclasses.replace(plan, precision="bf16")
    if not plan.compile:
        found["plan.compile = true"] = dataclasses.replace(plan, compile=True)
    for less in RECOMPUTE[: RECOMPUTE.index(plan.recompute)]:
        if less != "budget":  # which of the blocks is another question
            found[f"plan.recompute = '{less}'"] = dataclasses.replace(plan, recompute=less, recompute_blocks=())
    for text, changed in found.items():  # a sheet is of one precision, compiled or not
        yield from _changed(context, [changed], "cheaper", partial(_word, text))


def _word(text: str, plan: Plan) -> str:
    return text


def _changed(context: PricedTask, plans: list[Plan], cause: str, text: Callable[[Plan], str]) -> Iterator[_Changed]:
    """Yield what those of the plans take that can run, and whether each fits."""
    plans = [each for each in plans if refusal(each, context.profile) is None]
    if not plans:
        return
    memory, usable = held_components(context.sheet(*plans)), usable_bytes(context.cluster)
    for at, (changed, priced) in enumerate(zip(plans, _priced(context, plans), strict=True)):
        held = sum(term.value for term in needed_terms(context.cluster, terms_of(memory, at)))
        yield _Changed(**vars(priced), cause=cause, text=text(changed), fits=not held > usable)


def _figures(context: PricedTask, plan: Plan) -> Iterator[_Changed]:
    """Yield what steps take on a cluster of which one rate is twice as high."""
    cluster = context.cluster
    for varied in varied_figures(cluster, plan.precision):
        other = calibrated_as(varied.cluster(TIMES), cluster.device)
        priced = _priced(dataclasses.replace(context, cluster=other), [plan])[0]
        text = f"{varied.name} {TIMES:g} times as fast ({varied.text(TIMES)})"
        yield _Changed(**vars(priced), cause=varied.bounds, text=text, fits=True)
