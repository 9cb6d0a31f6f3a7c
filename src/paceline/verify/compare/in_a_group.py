"""Does the program itself ask for the process group? A process computes first numbers without a group and in one.

The reference is computed on a rank of the layout. A model, an objective, data, an optimizer or a metric that ask
torch.distributed for ranks or the size of the world, such as a loss that is divided by it, would do there what they do
in the layout, and the two would agree on other numbers than those of one device. So would those of a program that reads
memory which nobody wrote: the process alone has other contents there (unwritten.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import ConfigError, NothingToLearn
from paceline.launch.here import without_place
from paceline.run.numerics.precision import MASTER_DTYPES, cast_floats
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.spec.import_paths import is_import_path
from paceline.spec.optimizers import names_of, rule_of
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof, FirstDifference
from paceline.spec.steps.turns import main_turn
from paceline.spec.steps.update import OptimizerSpec
from paceline.spec.task import Task
from paceline.task.coupling import is_coupled
from paceline.task.data.protocol import Source
from paceline.task.data.source import open_sources
from paceline.task.metrics.metric import LossTotal
from paceline.task.metrics.own import OwnMetric
from paceline.task.metrics.resolve import metrics_of
from paceline.task.models.build import evaluating
from paceline.task.models.held import buffers_kept
from paceline.task.objective import Objective, logits_of
from paceline.task.turns import Turn, turns_of
from paceline.verify.compare.diagnosis import NOT_REPRODUCIBLE
from paceline.verify.compare.difference import wide
from paceline.verify.compare.rates import FAMILY, RatesByStep, own_rates, rates_apart
from paceline.verify.compare.tolerance import tolerance
from paceline.verify.compare.unwritten import other_contents
from paceline.verify.reference.passes import (
    backward,
    counted,
    mean_gradients,
    micro_batches,
    own_parameters,
    reference_model,
    reference_randomness,
    update,
)
from paceline.verify.reference.peers import NoPeers
from paceline.verify.reference.plain_documents import placed_plainly
from paceline.verify.reference.plain_optimizer import plain_optimizers

LIKELY = (
    "{name} is {alone:.6g} in a process alone and {together:.6g} in the same process in a group of {ranks}: what runs"
    " there asks for ranks or the size of the world, as an objective, a model or data may. An objective returns the sum"
    " of its rows' losses and how many items they count, and divides by no number of ranks: the step divides once, by"
    " the items of all"
)
LIKELY_UPDATE = (
    "{name} is {alone:.6g} in a process alone and {together:.6g} in the same process in a group of {ranks}: the"
    " optimizer asks for ranks or the size of the world. A step has summed gradients over all ranks and divided them"
    " once, and an optimizer takes them as they are"
)
LIKELY_METRIC = (
    "{name} is {alone:.6g} in a process alone and {together:.6g} in the same process in a group of {ranks}: a metric of"
    " one's own asks for ranks or the size of the world. It returns sums of the rows that it is given, which are added"
    " up over all ranks, and divides by no number of ranks"
)
ABOUT = {"weights": LIKELY_UPDATE, "evaluation": LIKELY_METRIC}
UNWRITTEN = (
    "{name} is {alone:.6g} or {together:.6g}, by what lies in memory that nobody wrote: torch.empty, numpy.empty or a"
    " tensor made of a size alone (torch.Tensor(n)) is read before it is written. A proof fills such memory alike"
    " everywhere, training does not: torch.zeros, or write before reading"
)
WHAT = {
    "gradients": "the gradients of {}",
    "weights": "the change of {} by an update",
    "evaluation": "the metric {} of the first rows",
}
At = tuple[str, str]  # (quantity, name)


@dataclass(frozen=True)
class FirstNumbers:
    """What one process computes of the first rows: loss, weight, and the norms of gradients and of a first update.

    An update is made by an optimizer of the user's alone, and metrics are the user's: that ours ask for no ranks is
    known.
    """

    numbers: dict[At, float]
    rates: RatesByStep = field(default_factory=dict)  # of a schedule of the user's own: then they are all


def first_numbers(task: Task, plan: Plan, source: Source, items_per_sample: int) -> FirstNumbers | None:
    """Return the first numbers of a task with its initial weights, None where random numbers belong to no sample.

    The twin that keeps a schedule of the user's own is asked for its rates alone: others have the rest.
    """
    if task.schedule.is_own:
        return FirstNumbers({}, own_rates(task))
    with torch.random.fork_rng(devices=[]):  # what the program draws by itself later is what it would have been
        return _first_numbers(task, plan, source, items_per_sample)


def _first_numbers(task: Task, plan: Plan, source: Source, items_per_sample: int) -> FirstNumbers | None:
    dtype, turns = MASTER_DTYPES[plan.precision], turns_of(task, source.unit)
    model = reference_model(task, source, items_per_sample, dtype)
    objectives = [turn.objective for turn in turns]
    randomness = reference_randomness(task, plan, source, model, objectives, dtype)
    if randomness.survey.strays:
        return None
    whole = any(is_coupled(model, objective) for objective in objectives)
    found: dict[At, float] = {}
    main = turns[main_turn(task)].objective
    if (metrics := own_metrics(task, source, main)) and has_evaluations(task):
        rows = next(iter(micro_batches(task, plan, source, 1, whole)))[1]
        found |= _metrics(model, main, metrics, placed_plainly(main, cast_floats(rows, dtype)))
    for turn, own in zip(turns, own_parameters(model, turns), strict=True):
        loss, weight = _first_items(model, turn, micro_batches(task, plan, source, 1, whole), randomness, dtype)
        of = f" of {turn.name}" if turn.name else ""
        found |= {("weight", f"weight{of}"): weight, ("loss", f"loss{of}"): loss}
        norms = {name: wide(p.grad).norm() for name, p in model.named_parameters() if p.grad is not None}
        found |= {("gradients", f"{name}{of}"): float(norm) for name, norm in norms.items()}
        if weight and _has_own_rule(task.optimizer):
            moved = _moved(task.optimizer, model, own, weight)
            found |= {("weights", f"{name}{of}"): float(norm) for name, norm in moved.items()}
    return FirstNumbers(found)


def has_evaluations(task: Task) -> bool:
    """Return whether a task has held-out data: one that has none is never evaluated, whatever its metrics."""
    return bool(task.evaluate.sets) or open_sources(task.data, task.seed)[1] is not None


def own_metrics(task: Task, source: Source, objective: Objective) -> list[OwnMetric]:
    """Return the metrics that are functions of the user's: that ours ask for no ranks is known."""
    named = tuple(each for each in task.evaluate.metrics if not isinstance(each, str) or is_import_path(each))
    made = metrics_of(dataclasses.replace(task.evaluate, metrics=named), source, objective)
    return [each for each in made if isinstance(each, OwnMetric)]


def _metrics(model: nn.Module, objective: Objective, metrics: Iterable[OwnMetric], rows: Any) -> dict[At, float]:
    """Return what metrics make of some rows that are trained on; nothing where they cannot be had of these."""
    returned: list[object] = []
    hook = model.register_forward_hook(lambda module, given, output: returned.append(output))
    try:
        with evaluating(model), buffers_kept(model), torch.no_grad():
            torch.manual_seed(0)  # what is drawn to evaluate is alike in every process
            loss, weight = objective(model, rows)
            whole = logits_of(objective)
            outputs = returned[-1] if whole is None else whole(model, rows)
            whole_loss = LossTotal(float(loss), float(weight))
            values: dict[str, float] = {}
            for metric in metrics:
                totals = {name: value.numpy() for name, value in metric.measure(outputs, rows).items()}
                values |= metric.values(totals, whole_loss)
    except (ConfigError, IndexError):  # of rows that are not held out, or of a model that is called in parts
        return {}
    finally:
        hook.remove()
    return {("evaluation", name): value for name, value in values.items()}


def _has_own_rule(spec: OptimizerSpec) -> bool:
    """Return whether an optimizer is the user's own, which may ask for ranks too."""
    return any(rule_of(name) is None for name in names_of(spec))


def _moved(
    spec: OptimizerSpec, model: nn.Module, own: Iterable[nn.Parameter], weight: float
) -> dict[str, torch.Tensor]:
    """Make an update of some parameters and return the norms of how far it moves them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    mean_gradients(model, own, weight, names)
    before = {name: wide(parameter.detach()).clone() for parameter, name in names.items()}
    update(plain_optimizers(spec, model, own), spec.lr)
    return {name: (wide(parameter.detach()) - before[name]).norm() for parameter, name in names.items()}


def _first_items(
    model: nn.Module,
    turn: Turn,
    read: Iterable[tuple[np.ndarray, object]],
    randomness: SampleRandomness,
    dtype: torch.dtype,
) -> tuple[float, float]:
    """Run a turn on the first micro-batch of a step that has an item to learn from; return its loss and items.

    Raises NothingToLearn where none of the step has any.
    """
    without = 0
    for piece in read:
        try:
            return backward(model, turn, [piece], randomness, dtype, 1)
        except NothingToLearn:
            without += 1
    return 0.0, counted([0.0] * without, 1)


def numbers_alone(task: Task, plan: Plan, source: Source, items_per_sample: int) -> FirstNumbers | None:
    """Return the first numbers of a process alone, in whose memory that nobody wrote other values lie."""
    with other_contents():
        return first_numbers(task, plan, source, items_per_sample)


@contextlib.contextmanager
def without_peers() -> Iterator[None]:
    """Have the environment say nothing of other processes for a while."""
    kept = dict(os.environ)
    for name in kept.keys() - without_place(kept).keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


def differs_in_a_group(
    alone: FirstNumbers | None, task: Task, plan: Plan, source: Source, items_per_sample: int
) -> CheckProof | None:
    """Return the record of a program that computes other numbers in this process group than alone, None else.

    `alone` are those of `numbers_alone`: a program that reads what nobody wrote is told as that. One that computes
    others every time is none of these: the comparison with the layout has to tell. Raises ConfigError for one that
    calls other ranks, of which none is here.
    """
    if alone is None:
        return None
    began = time.perf_counter()
    given = (task, plan, source, items_per_sample)
    if alone.rates:
        ranks = torch.distributed.get_world_size()
        told = {"there": "in a process alone", "here": f"in the same process in a group of {ranks}"}
        return rates_apart(alone.rates, own_rates(task), 0, plan.precision, began, told)
    with NoPeers():
        here = first_numbers(*given)
    if here is None or (first := _first(alone, here, plan.precision)) is None:
        return None
    family, likely = FAMILY, ABOUT.get(first[0][0], LIKELY)
    if _first(alone, numbers_alone(*given), plan.precision) is None:
        family, likely = NOT_REPRODUCIBLE.family, UNWRITTEN
    elif _first(alone, here := first_numbers(*given) or here, plan.precision) is None:
        return None
    (quantity, name), far = first
    ours, known = here.numbers.get(first[0], math.nan), alone.numbers.get(first[0], math.nan)
    ranks = torch.distributed.get_world_size()
    difference = FirstDifference(
        quantity=quantity, name=name, step=1, rank=0, relative=far, ratio=ours / known if known else math.nan,
        ours=ours, reference=known, copies_agree=True, tensors=(name,), tensors_in_all=1, family=family,
        likely=likely.format(name=WHAT.get(quantity, "the {}").format(name), alone=known, together=ours, ranks=ranks),
    )  # fmt: skip
    return CheckProof(False, plan.precision, 1, time.perf_counter() - began, {quantity: far}, difference)


def are_alike(one: FirstNumbers | None, other: FirstNumbers | None, precision: str) -> bool:
    """Return whether two processes computed the same first numbers."""
    return one is None or (other is not None and one.rates == other.rates and _first(one, other, precision) is None)


def _first(alone: FirstNumbers, together: FirstNumbers | None, precision: str) -> tuple[At, float] | None:
    """Return the first number that is another one, and how far it is."""
    if together is None:
        return None
    for at in {**alone.numbers, **together.numbers}:
        far = _apart(alone.numbers.get(at, 0.0), together.numbers.get(at, 0.0))
        if far > tolerance("gradients", "fp64" if precision == "fp64" else "fp32"):
            return at, far
    return None


def _apart(known: float, ours: float) -> float:
    """Return how far two numbers are apart; two that are none are not."""
    if not (math.isfinite(known) and math.isfinite(ours)):
        return 0.0 if math.isfinite(known) == math.isfinite(ours) else math.inf
    return abs(ours - known) / max(abs(known), abs(ours), 1e-300)
