"""Assemble a training step: the task's model on this rank, laid out as the plan says, with initial weights in place."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.cluster.here.compiler import refuse_to_compile
from paceline.errors import ConfigError
from paceline.plan.feasible.torch_version import COMPILED_FP64, older_refusal
from paceline.run.initial import DrawnModel, WholeModel, start_model
from paceline.run.loop.first_look import FirstLook
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.passes import AnyObjective, Passes, SequentialPasses
from paceline.run.loop.routing import RouterWatch, watch_routing
from paceline.run.loop.step import Stepper
from paceline.run.loop.turns import StepTurn, gathering, own_parameters, passes_in_turn, refuse_axes, refuse_routing
from paceline.run.memory.offload_state import OffloadedUpdate
from paceline.run.numerics.precision import MASTER_DTYPES, cast_model, scaler_for
from paceline.run.numerics.randomness.again import draw_again, leave_outside, uncompiled_remark
from paceline.run.numerics.randomness.build import is_of_library, sample_randomness
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.parallel.apply import apply_plan, split_by_rules
from paceline.run.parallel.context.part import part_of
from paceline.run.parallel.data.rows_of_all_ranks import GatheredRows
from paceline.run.parallel.data.statistics import RankSums, share_statistics
from paceline.run.parallel.entry import entry_of, told_by
from paceline.run.parallel.expert.slots import ExpertSlots, slots_of
from paceline.run.parallel.gradients import Gradients
from paceline.run.parallel.pipeline.passes import PipelinePasses
from paceline.run.parallel.pipeline.split import Pipeline, split_model
from paceline.run.parallel.split_check import SplitCheck
from paceline.run.process.groups import Mesh
from paceline.run.process.world import World, build_mesh
from paceline.run.record.remarks import remarks_on
from paceline.run.replicas.bucket_sums import BucketSum, bucket_sums
from paceline.run.replicas.build import copy_sync, refuse_unproven
from paceline.run.updates.optimizer import Names, all_names, build_optimizer
from paceline.run.updates.own_parts import UpdateOfParts
from paceline.run.updates.several_rules import JoinedOptimizer
from paceline.run.updates.update_protocols import Updates
from paceline.spec.optimizers import NOT_OFFLOADED
from paceline.spec.plan import Plan
from paceline.spec.steps.turns import main_turn
from paceline.spec.task import Task
from paceline.task.adapt.noise import noises
from paceline.task.coupling import gathers_rows
from paceline.task.data.order.lengths import lengths_of, longest_of
from paceline.task.data.protocol import Source
from paceline.task.models.blocks import find_blocks
from paceline.task.models.decoder import Decoder
from paceline.task.models.huggingface.head import LIMIT, limit_logits
from paceline.task.objective import BUILT_IN, logits_of, sequence_to_sequence
from paceline.task.optimizer.layer_rates import layer_scales
from paceline.task.placed import objective_on
from paceline.task.turns import Turn, turns_of


@dataclass
class Assembled:
    """A model under a plan, ready to step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    randomness: SampleRandomness
    remarks: tuple[str, ...] = ()  # what of the model is rounded or left out


def assemble(
    task: Task, plan: Plan, world: World, source: Source, items_per_sample: int, read: bool = True
) -> Assembled:
    """Build the task's model under `plan` on this rank. Every rank calls it.

    A model is built without memory where that can be, laid out, and only then given its initial weights
    (run/initial.py), so one larger than a device's memory starts. Initial weights do not depend on the layout. Where
    `read` is False, files of weights are not read: a checkpoint is to be loaded.
    """
    if plan.compile:
        refuse_to_compile(world.device.type)
        _refuse_compiled_fp64(plan, world)
    mesh = build_mesh(plan.layout, world)
    started = start_model(task, plan, world, source, items_per_sample, read)
    names = all_names(started.model)  # before stages know a part of them
    decay = task.optimizer.layer_decay
    scales = layer_scales(started.model, decay) if decay != 1.0 else {}
    turns = _turns(task, plan, world, source)
    remarks = started.remarks + _set_precision(started, plan, turns[main_turn(task)].objective)
    hold_few_logits(started.model, started.to_look_at, plan, turns, source, items_per_sample)
    looked = _look(task, plan, world, source, started, turns, mesh)
    laid = _lay_out(started, looked, plan, mesh)
    own = own_parameters(laid.model, names, looked.turns)
    optimizer = _optimizer(task, plan, laid.model, names, own, scales)
    routing = watch_routing(laid.model, plan)
    refuse_routing(turns, routing)
    passes = _passes(laid, looked, plan, world, routing)
    stepper = Stepper(
        model=laid.model,
        turns=[StepTurn(*parts) for parts in zip(looked.turns, passes, own, strict=True)],
        main=main_turn(task),
        optimizer=optimizer,
        gradients=laid.gradients,
        scaler=scaler_for(plan.precision),
        plan=plan,
        world=world,
        sync=copy_sync(laid.model, plan, mesh, world, laid.sums),
        items_per_sample=items_per_sample,
        clip_norm=task.optimizer.clip_norm,
        updater=_updater(optimizer, plan),
        routing=routing,
        slots=_slots(laid.model, plan, world, turns),
        names=names,
        groups=task.optimizer.groups,
        stages_holding=dict.fromkeys(laid.pipeline.shared_parameters(), 2) if laid.pipeline else {},
    )
    return Assembled(laid.model, optimizer, stepper, looked.randomness, (*remarks, *looked.remarks))


def _slots(model: nn.Module, plan: Plan, world: World, turns: Sequence[Turn]) -> ExpertSlots | None:
    """Return the slots of experts. Raises ConfigError where a step that is made again would be more than its passes."""
    slots = slots_of(model, plan, world)
    if slots is not None and len(turns) > 1:
        raise ConfigError(
            "plan.expert_slots with task.turns",
            "a step that is made again would make the updates of its first objectives again",
            "plan.expert_slots = 0",
        )
    return slots


def _turns(task: Task, plan: Plan, world: World, source: Source) -> tuple[Turn, ...]:
    """Return what a step makes of the task's objectives, on this rank's device."""
    turns = tuple(
        dataclasses.replace(turn, objective=objective_on(turn.objective, world.device))
        for turn in turns_of(task, source.unit)
    )
    refuse_axes(turns, plan)
    return turns


def _refuse_compiled_fp64(plan: Plan, world: World) -> None:
    because = older_refusal(COMPILED_FP64, "fp64 on a CPU", "whose compiler knows that attention computes in it there")
    if because and plan.precision == "fp64" and world.device.type == "cpu":
        raise ConfigError("plan.compile = true in fp64", because, "plan.compile = false")


def _set_precision(started: WholeModel, plan: Plan, objective: AnyObjective) -> list[str]:
    """Keep weights in the plan's dtype; return what is said of those that are rounded."""
    dtype = MASTER_DTYPES[plan.precision]
    remarks = remarks_on(started.model, objective, dtype)
    cast_model(started.model, dtype)
    return remarks


def hold_few_logits(
    model: nn.Module,
    to_look_at: Callable[[], nn.Module],
    plan: Plan,
    turns: Sequence[Turn],
    source: Source,
    items_per_sample: int,
) -> None:
    """Have the model hold no more logits at a time than the plan says, where its kind can.

    `to_look_at` returns a model that computes as this one does.
    """
    objectives = [turn.objective for turn in turns]
    if isinstance(model, Decoder):
        model.logits_elements = plan.logits_elements
        return
    if plan.layout.tp > 1 or not any(map(logits_of, objectives)):
        return
    tokens: float = items_per_sample
    if any(each is sequence_to_sequence for each in objectives):  # its samples are counted, and not their tokens
        tokens = longest_of(source) if lengths_of(source) is not None else math.inf
    seen = to_look_at()
    if limit_logits(seen, plan.logits_elements, plan.micro_batch * tokens) and seen is not model:
        setattr(model, LIMIT, plan.logits_elements)


@dataclass
class _Looked:
    """What is known of the program before the plan is applied: its turns, its random numbers, its part of a batch."""

    turns: tuple[Turn, ...]
    objective: AnyObjective  # the main turn's
    coupled: bool  # whether a loss is over the rows of all ranks
    randomness: SampleRandomness
    take_part: Any
    check: SplitCheck | None
    remarks: tuple[str, ...]


def _look(
    task: Task,
    plan: Plan,
    world: World,
    source: Source,
    started: WholeModel,
    turns: tuple[Turn, ...],
    mesh: Mesh | None,
) -> _Looked:
    """Look at a program that is not ours on one micro-batch: what it draws and reads, and whether axes are right."""
    model, plain, main = started.model, [turn.objective for turn in turns], main_turn(task)
    coupled = any(map(gathers_rows, plain))
    if coupled and mesh is not None and plan.layout.data_degree > 1:
        turns = gathering(turns, GatheredRows(mesh.data))
    objective = turns[main].objective
    look = None
    if not isinstance(started, DrawnModel) or started.draws:
        stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
        example = stream.at(0).micro_batches[0]
        look = FirstLook(started.to_look_at(), plain, main, example, plan, world.device)
    surveyed = look.survey if look else Survey()
    # What is ours draws nothing, and so does a model of transformers that drew nothing in the look at it.
    if all(objective in BUILT_IN.values() for objective in plain) and surveyed.drew_nothing:
        surveyed = dataclasses.replace(surveyed, silent=look is None or is_of_library(started.to_look_at()))
    randomness = sample_randomness(task.seed, plan, world, surveyed)
    draw_again(model, randomness)
    for noise in noises(model):
        noise.whole_length = functools.partial(_sample_length, randomness) if plan.layout.cp > 1 else None
    if look and started.to_look_at() is not model:
        draw_again(started.to_look_at(), randomness)
    remarks = [*(look.remarks if look else []),
               *(uncompiled_remark(find_blocks(model) or [("", model)]) if plan.compile else [])]  # fmt: skip
    take_part = part_of(plan, world.rank, model, objective)
    check = look.checked(objective, take_part, mesh, randomness) if look else None
    if check is not None and mesh is not None and started.to_look_at() is not model:
        split_by_rules(started.to_look_at(), plan, mesh, None)
        check.of(started.to_look_at(), mesh.get_group("tp"))
        check = None
    return _Looked(turns, objective, coupled, randomness, take_part, check, tuple(remarks))


def _sample_length(randomness: SampleRandomness) -> int | None:
    """Return how many tokens a sample of the micro-batch at hand has, over all ranks that share it."""
    return randomness.rows.length if randomness.rows is not None else None


@dataclass
class _LaidOut:
    """A model under a plan, with its weights in place, and what sums its gradients."""

    model: nn.Module
    pipeline: Pipeline | None
    gradients: Gradients
    statistics: RankSums | None
    sums: BucketSum | None


def _lay_out(started: WholeModel, looked: _Looked, plan: Plan, mesh: Mesh | None) -> _LaidOut:
    """Cut the model into stages where the plan has any, apply the plan, and put its weights in place."""
    model, randomness = started.model, looked.randomness
    pipeline = split_model(model, plan, mesh) if plan.layout.pp > 1 and mesh is not None else None
    model = pipeline.model if pipeline else model
    stages = [stage.module for stage in pipeline.stages] if pipeline else []
    for part in [model, *stages]:
        draw_again(part, randomness)
    statistics, sums = share_statistics(model, mesh, plan), bucket_sums(plan.sync)
    refuse_unproven(plan, {"nn.SyncBatchNorm": statistics is not None, "several objectives": len(looked.turns) > 1,
                           "a loss over the rows of all ranks": looked.coupled})  # fmt: skip
    gradients = _apply(model, pipeline, plan, mesh, looked, sums)
    started.fill(model, stages or [model])
    if sums is not None:
        gradients.zero()  # makes the buckets: a checkpoint may be loaded into what is kept of them
    return _LaidOut(model, pipeline, gradients, statistics, sums)


def _apply(
    model: nn.Module,
    pipeline: Pipeline | None,
    plan: Plan,
    mesh: Mesh | None,
    looked: _Looked,
    sums: BucketSum | None,
) -> Gradients:
    """Apply the plan to a model, or to the stages that it was cut into, and return what reduces their gradients."""
    blocks = [block for _, block in find_blocks(model)] if pipeline is None else []
    gradients: Gradients
    if pipeline is not None and mesh is not None:
        gradients = pipeline.apply(plan, mesh)
    else:
        gradients = apply_plan(model, blocks, plan, mesh, check=looked.check, sums=sums)
    if plan.compile:
        units = [stage.blocks or [stage.module] for stage in pipeline.stages] if pipeline else [blocks or [model]]
        leave_outside([block for unit in units for block in unit], looked.randomness)
    return gradients


def _optimizer(
    task: Task,
    plan: Plan,
    model: nn.Module,
    names: Names,
    own: list[list[nn.Parameter]],
    scales: Mapping[str, float],
) -> torch.optim.Optimizer:
    """Return what updates the model. Raises ConfigError where its state cannot rest where the plan says."""
    optimizer = build_optimizer(task.optimizer, model, names, apart=own, scales=scales)
    if plan.offloads_optimizer and isinstance(optimizer, JoinedOptimizer):
        raise ConfigError(f"offload = {plan.offload}", NOT_OFFLOADED, 'plan.offload = "none"')
    return optimizer


def _updater(optimizer: torch.optim.Optimizer, plan: Plan) -> Updates:
    """Return what changes the weights by the optimizer's rule, where its state rests and as its weights lie."""
    if plan.offloads_optimizer:
        return OffloadedUpdate(optimizer, plan.state_bucket_bytes)
    return UpdateOfParts(optimizer) if UpdateOfParts.serves(optimizer) else optimizer


def _passes(laid: _LaidOut, looked: _Looked, plan: Plan, world: World, routing: RouterWatch | None) -> list[Passes]:
    """Return the forward and backward passes of each turn."""
    after_forward = routing.collect if routing else None
    if laid.pipeline is not None:
        return [
            PipelinePasses(
                laid.pipeline, looked.objective, plan, world.device, looked.randomness, looked.take_part, after_forward
            )
        ]
    entry = entry_of(laid.model, laid.gradients, world.device)
    plainly = SequentialPasses(
        model=laid.model,
        objective=looked.objective,
        gradients=laid.gradients,
        plan=plan,
        randomness=looked.randomness,
        take_part=looked.take_part,
        after_forward=after_forward,
        statistics=laid.statistics,
        told=functools.partial(told_by, entry),
    )
    return passes_in_turn(plainly, looked.turns, entry)
