"""Assemble a training step: the task's model on this rank, laid out as the plan says, with initial weights in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError
from paceline.run.loop.first_look import FirstLook
from paceline.run.loop.loader import BatchStream
from paceline.run.loop.passes import Passes, SequentialPasses
from paceline.run.loop.remarks import remarks_on
from paceline.run.loop.routing import watch_routing
from paceline.run.loop.step import Stepper
from paceline.run.loop.turns import StepTurn, gathering, own_parameters, passes_in_turn, refuse_axes, refuse_routing
from paceline.run.memory.offload_state import OffloadedUpdate
from paceline.run.numerics.precision import MASTER_DTYPES, cast_model, scaler_for
from paceline.run.numerics.randomness.again import draw_again, leave_outside, uncompiled_remark
from paceline.run.numerics.randomness.build import sample_randomness
from paceline.run.numerics.randomness.mode import SampleRandomness, Survey
from paceline.run.parallel.apply import Gradients, apply_plan
from paceline.run.parallel.context.part import part_of
from paceline.run.parallel.data.rows import GatheredRows
from paceline.run.parallel.data.statistics import share_statistics
from paceline.run.parallel.entry import entry_of
from paceline.run.parallel.pipeline.passes import PipelinePasses
from paceline.run.parallel.pipeline.split import Pipeline, split_model
from paceline.run.parallel.split_check import SplitCheck
from paceline.run.process.groups import Mesh
from paceline.run.process.world import World, build_mesh
from paceline.run.replicas.bucket_sums import BucketSum, bucket_sums
from paceline.run.replicas.build import copy_sync, refuse_unproven
from paceline.run.updates.joined import JoinedOptimizer
from paceline.run.updates.optimizer import all_names, build_optimizer
from paceline.spec.optimizers import NOT_OFFLOADED
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec, Task
from paceline.spec.turns import main_turn
from paceline.task.coupling import gathers_rows
from paceline.task.data.source import Source
from paceline.task.models.blocks import find_blocks
from paceline.task.models.build import build_model, fill_weights
from paceline.task.models.decoder import Decoder
from paceline.task.models.sizes import is_named
from paceline.task.objective import BUILT_IN
from paceline.task.turns import turns_of


@dataclass
class Assembled:
    """A model under a plan, ready to step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stepper: Stepper
    randomness: SampleRandomness
    remarks: tuple[str, ...] = ()  # what of the model is rounded or left out


def assemble(task: Task, plan: Plan, world: World, source: Source, items_per_sample: int) -> Assembled:
    """Build the task's model under `plan` on this rank. Every rank calls it.

    Built-in families are built without storage, sharded, and only then given their initial weights, so a model larger
    than one device's memory starts. Initial weights do not depend on the layout.
    """
    mesh = build_mesh(plan.layout, world)
    family = isinstance(task.model, ModelSpec) and is_named(task.model.name)
    model = build_model(task.model, source.vocab or 0, items_per_sample, task.seed, device="meta" if family else "cpu")
    if not family:
        _share_out(model, world)  # whole on every rank until it is split
    turns = turns_of(task, source.unit)
    refuse_axes(turns, plan)
    objective = turns[main_turn(task)].objective
    remarks = remarks_on(model, objective, MASTER_DTYPES[plan.precision])
    cast_model(model, MASTER_DTYPES[plan.precision])
    if isinstance(model, Decoder):
        model.logits_elements = plan.logits_elements
    plain, names = [turn.objective for turn in turns], all_names(model)  # before stages know a part of the names
    coupled = any(map(gathers_rows, plain))
    if coupled and mesh is not None and plan.layout.data_degree > 1:
        turns = gathering(turns, GatheredRows(mesh.data))
        objective = turns[main_turn(task)].objective
    look = None
    if not family:
        stream = BatchStream(source, task.seed, plan, plan.layout.data_rank(world.rank), world.device)
        look = FirstLook(model, plain, main_turn(task), stream.at(0).micro_batches[0], plan, world.device)
        remarks += look.remarks
    silent = family and all(objective in BUILT_IN.values() for objective in plain)  # what is ours draws nothing
    randomness = sample_randomness(task.seed, plan, world, look.survey if look else Survey(silent=silent))
    draw_again(model, randomness)
    remarks += uncompiled_remark(find_blocks(model) or [("", model)]) if plan.compile else []
    take_part = part_of(plan, world.rank, model, objective)
    check = look.checked(objective, take_part, mesh, randomness) if look else None
    pipeline = split_model(model, plan, mesh) if plan.layout.pp > 1 and mesh is not None else None
    if pipeline is not None:
        model = pipeline.model
    for part in [model, *(stage.module for stage in (pipeline.stages if pipeline else ()))]:
        draw_again(part, randomness)
    statistics = share_statistics(model, mesh, plan)
    refuse_unproven(plan, {"nn.SyncBatchNorm": statistics is not None, "several objectives": len(turns) > 1,
                           "a loss over the rows of all ranks": coupled})  # fmt: skip
    sums = bucket_sums(plan.sync)
    gradients = _lay_out(model, pipeline, plan, mesh, check, randomness, sums)
    if family:
        for part in [stage.module for stage in pipeline.stages] if pipeline else [model]:
            part.to_empty(device=world.device)
        fill_weights(model, task.model, task.seed)
    if sums is not None:
        gradients.zero()  # makes the buckets: a checkpoint may be loaded into what is kept of them
    own = own_parameters(model, names, turns)
    optimizer = build_optimizer(task.optimizer, model, names, apart=own)
    if plan.offloads_optimizer and isinstance(optimizer, JoinedOptimizer):
        raise ConfigError(f"offload = {plan.offload}", NOT_OFFLOADED, 'plan.offload = "none"')
    routing = watch_routing(model, plan)
    refuse_routing(turns, routing)
    after_forward = routing.collect if routing else None
    passes: list[Passes]
    if pipeline is not None:
        passes = [PipelinePasses(pipeline, objective, plan, world.device, randomness, take_part, after_forward)]
    else:
        plainly = SequentialPasses(
            model=model,
            objective=objective,
            gradients=gradients,
            plan=plan,
            randomness=randomness,
            take_part=take_part,
            after_forward=after_forward,
            statistics=statistics,
        )
        passes = passes_in_turn(plainly, turns, entry_of(model, gradients, world.device))
    stepper = Stepper(
        model=model,
        turns=[StepTurn(*parts) for parts in zip(turns, passes, own, strict=True)],
        main=main_turn(task),
        optimizer=optimizer,
        gradients=gradients,
        scaler=scaler_for(plan.precision),
        plan=plan,
        world=world,
        sync=copy_sync(model, plan, mesh, world, sums),
        items_per_sample=items_per_sample,
        clip_norm=task.optimizer.clip_norm,
        updater=OffloadedUpdate(optimizer, plan.state_bucket_bytes) if plan.offloads_optimizer else optimizer,
        routing=routing,
        stages_holding=dict.fromkeys(pipeline.shared_parameters(), 2) if pipeline else {},
    )
    return Assembled(model, optimizer, stepper, randomness, tuple(remarks))


def _lay_out(
    model: nn.Module,
    pipeline: Pipeline | None,
    plan: Plan,
    mesh: Mesh | None,
    check: SplitCheck | None,
    randomness: SampleRandomness,
    sums: BucketSum | None,
) -> Gradients:
    """Apply the plan to a model, or to the stages that it was cut into, and return what reduces their gradients."""
    blocks = [block for _, block in find_blocks(model)] if pipeline is None else []
    gradients: Gradients
    if pipeline is not None and mesh is not None:
        gradients = pipeline.apply(plan, mesh)
    else:
        gradients = apply_plan(model, blocks, plan, mesh, check=check, sums=sums)
    if plan.compile:
        units = [stage.blocks or [stage.module] for stage in pipeline.stages] if pipeline else [blocks or [model]]
        leave_outside([block for unit in units for block in unit], randomness)
    return gradients


def _share_out(model: nn.Module, world: World) -> None:
    """Put a user's model on this rank's device with rank 0's initial weights."""
    model.to(world.device)
    if world.size > 1:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor, src=0)
