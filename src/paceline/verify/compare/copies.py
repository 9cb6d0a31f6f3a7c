"""Compare copies that are not summed exactly in every step with one device that takes the copies in turn.

Such a plan is another algorithm than one device's: what it computes depends on how many copies there are. So the
reference is the same algorithm on one device (reference/copies.py), in fp64, where rounding hides no mistake.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from paceline.checkpoint import load_latest, materialise_optimizer_state, save_checkpoint, training_state
from paceline.run.assemble import Assembled, assemble
from paceline.run.loop.loader import BatchStream
from paceline.run.numerics.precision import MASTER_DTYPES
from paceline.run.process.world import World
from paceline.run.updates.several_rules import JoinedOptimizer
from paceline.spec.plan import Plan
from paceline.spec.proof.records import CheckProof
from paceline.spec.task import Task
from paceline.task.data.protocol import Source
from paceline.task.optimizer.schedule import learning_rate
from paceline.verify.compare.diagnosis import traits_of
from paceline.verify.compare.difference import Difference
from paceline.verify.compare.layout import first_difference
from paceline.verify.compare.measures import number_differences, tensor_differences
from paceline.verify.compare.tolerance import QUANTITIES, larger
from paceline.verify.process.shared_folder import shared_folder
from paceline.verify.reference.copies import CopiesStep, clipped_at, copies_steps, first_norm
from paceline.verify.reference.passes import reference_model, with_own_model

SAVED = 3  # the step after which copies are saved and loaded again: between two outer steps, where every is 2
NUMBERS = ("weight", "loss", "grad_norm")  # of a step, over all copies
LOST = "right until the copies were saved and loaded again: a checkpoint lacks what keeps them in step"


def compare_copies(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    items_per_sample: int,
    steps: int,
    kept: dict[object, object] | None = None,
) -> CheckProof:
    """Return how some steps of the copies stand to those of one device. It is the same on every rank."""
    began = time.perf_counter()
    given = (plan, source, items_per_sample)
    limit = world.share(first_norm(task, *given) if world.is_first and task.optimizer.clip_norm else 0.0)
    task = clipped_at(task, limit)
    reference: list[CopiesStep] = world.share(copies_steps(task, *given, steps) if world.is_first else [])
    whole = reference_model(task, source, items_per_sample, MASTER_DTYPES[plan.precision])
    initial = {name: weight.detach().clone() for name, weight in whole.named_parameters()}

    def start() -> Assembled:
        return assemble(with_own_model(task), plan, world, source, items_per_sample)

    built = start()
    copy = plan.layout.coordinates(world.rank)["dp_replicate"]
    stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
    found: list[Difference] = []
    for step, expected in enumerate(reference, 1):
        lr = learning_rate(task.schedule, task.optimizer.lr, step, steps, 0, 1)
        stats = built.stepper.step(stream.at((step - 1) * plan.batch_samples, step), lr)
        ours = {name: float(getattr(stats, name)) for name in NUMBERS}
        found += number_differences(ours, {name: getattr(expected, name) for name in NUMBERS}, step, world)
        weights = dict(built.model.named_parameters())
        found += tensor_differences("weights", weights, expected.weights[copy], step, world, plan.layout, initial)
        if step == SAVED < steps and not isinstance(built.optimizer, JoinedOptimizer):
            built = _saved_and_loaded(built, start, world)
    found = [dataclasses.replace(one, copies_agree=True) for one in found]  # each is held against its own reference
    wrong = [one for one in found if not one.relative <= one.tolerance_in(plan.precision)]
    worst = dict.fromkeys((name for name in QUANTITIES if name != "whole batch"), 0.0)
    for difference in found:
        worst[difference.quantity] = larger(worst[difference.quantity], difference.relative)
    first = first_difference(wrong, found, plan, traits_of(whole))
    if first is not None and first.step == SAVED + 1:
        first = dataclasses.replace(first, family="checkpoint", likely=LOST)
    return CheckProof(not wrong, plan.precision, steps, time.perf_counter() - began, worst, first)


def _saved_and_loaded(built: Assembled, start: Callable[[], Assembled], world: World) -> Assembled:
    """Save what was built as a checkpoint and return another start with the checkpoint loaded. Every rank calls it."""
    with shared_folder(world, "copies") as folder:
        root = folder / "checkpoints"
        save_checkpoint(root, SAVED, _state(built), {}, keep_last=1, alone=world.size == 1)
        again = start()
        load_latest(root, _state(again), alone=world.size == 1)
    return again


def _state(built: Assembled) -> dict[str, torch.Tensor]:
    materialise_optimizer_state(built.optimizer)
    return built.stepper.sync.named(training_state(built.model, built.optimizer))
