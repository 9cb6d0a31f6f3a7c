"""The one order in which a plan is applied.

Tensor, context, precision, recompute, compile, offload, shard, replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.run.memory.offload import keep_on_host
from paceline.run.memory.recompute import checkpoint_block
from paceline.run.numerics.precision import (
    COMPUTE_DTYPES,
    MASTER_DTYPES,
    cast_outside,
    cast_reads,
    cast_unit,
    widen_outputs,
)
from paceline.run.numerics.randomness.again import draws_inside
from paceline.run.parallel.context.part import share_sequences
from paceline.run.parallel.data.frozen_models import kept_as_they_are, spread_teachers, taught_blocks
from paceline.run.parallel.data.packed_weights import spread_packed
from paceline.run.parallel.data.sharding import (
    GatheredGradients,
    ShardedGradients,
    data_mesh,
    shard,
    sharding_units,
)
from paceline.run.parallel.data.uncut_parameters import WholeGradients, stays_whole
from paceline.run.parallel.data.unshared_experts import ExpertGradients, UnsharedExperts
from paceline.run.parallel.expert.experts import balance_shared_sequences, spread_experts
from paceline.run.parallel.given_containers import keep_changes
from paceline.run.parallel.gradients import Gradients
from paceline.run.parallel.split_check import SplitCheck
from paceline.run.parallel.tensor import SummedGradients, split_layers
from paceline.run.process.groups import Mesh
from paceline.run.replicas.allreduce import LocalGradients, ReducedGradients
from paceline.run.replicas.bucket_sums import BucketSum, PlainSums
from paceline.spec.plan import Plan
from paceline.task.declared import declared_rules
from paceline.task.models.decoder import Decoder
from paceline.task.models.moe import leave_experts_out
from paceline.task.rules import Rules


def apply_plan(
    model: nn.Module,
    blocks: list[nn.Module],
    plan: Plan,
    mesh: Mesh | None,
    rules: Rules | None = None,
    first: int = 0,
    check: SplitCheck | None = None,
    sums: BucketSum | None = None,
) -> Gradients:
    """Change `model` in place into what `plan` asks for and return how its gradients are summed.

    `blocks` are the model's repeated blocks, or those of a pipeline stage from number `first` on: the units of
    recompute, compilation, offload and sharding. The mesh is None for a single device. For a stage of a pipeline
    `rules` are those of the whole model, which a part does not tell. `check` is asked once layers are split.
    `sums` add up gradients over copies where those are not summed exactly in every step.
    """
    parts = split_by_rules(model, plan, mesh, rules)
    if check is not None and mesh is not None:
        check.of(model, mesh.get_group("tp"))
    modes = _modes(plan, range(first, first + len(blocks)))
    compute = COMPUTE_DTYPES[plan.precision]
    cast_to = compute if compute != MASTER_DTYPES[plan.precision] else None
    given = keep_changes([*blocks, model], cast_to) if _copies_inputs(model, modes, plan, mesh) else []
    gradients = _apply_whole(model, blocks, modes, plan, mesh, sums)
    for each in given:
        each.listen()
    if mesh is None or plan.layout.tp == 1:
        return gradients
    return SummedGradients(gradients, model, parts, mesh.get_group("tp"))


def split_by_rules(model: nn.Module, plan: Plan, mesh: Mesh | None, rules: Rules | None) -> list[str]:
    """Apply the tensor axis and return the names of the parameters whose gradients are parts of a sum over it."""
    if mesh is None or plan.layout.tp == 1:
        return []
    rules = rules or declared_rules(model)
    if rules is None or not rules.tensor:
        raise ConfigError(
            f"tp = {plan.layout.tp} with a {type(model).__name__}",
            (rules.closed.get("tp") if rules else None) or "it declares no rules for the tensor axis",
            "an attribute `paceline_rules` that names its column, row and vocabulary layers",
        )
    return split_layers(model, rules, mesh["tp"], stage=plan.layout.pp > 1)


def _copies_inputs(model: nn.Module, modes: Sequence[str], plan: Plan, mesh: Mesh | None) -> bool:
    """Return whether a unit of somebody else's program would work on copies of the containers that it is given."""
    if plan.compile or isinstance(model, Decoder):  # which change none
        return False
    casts = COMPUTE_DTYPES[plan.precision] != MASTER_DTYPES[plan.precision]
    return casts or (mesh is not None and plan.layout.is_sharded) or any(mode != "none" for mode in modes)


def _modes(plan: Plan, numbers: range) -> list[str]:
    """Return how blocks of these numbers are recomputed."""
    if plan.recompute == "budget" and len(plan.recompute_blocks) < numbers.stop:
        raise ConfigError(
            f"recompute = budget says nothing of block {numbers.stop - 1}",
            f"the plan has the modes of {len(plan.recompute_blocks)} repeated blocks, and the model has more",
            "let the planner make the plan, or name a mode for every block in recompute_blocks",
        )
    return [plan.recompute_of(number) for number in numbers]


def _apply_whole(
    model: nn.Module,
    blocks: list[nn.Module],
    modes: list[str],
    plan: Plan,
    mesh: Mesh | None,
    sums: BucketSum | None,
) -> Gradients:
    """Apply what treats every layer alike and return how gradients are summed over the data axes."""
    if mesh is not None and plan.layout.cp > 1:
        balance_shared_sequences(model, mesh.context)
    compute, master = COMPUTE_DTYPES[plan.precision], MASTER_DTYPES[plan.precision]
    alone = UnsharedExperts.of(plan.layout, casts=compute != master)
    placed = None
    if mesh is not None and plan.layout.ep > 1:
        placed = spread_experts(model, mesh, plan.layout, alone, slotted=plan.expert_slots > 0)
    sharded = mesh is not None and plan.layout.is_sharded
    share_sequences(model, plan, mesh)
    spreads = mesh is not None and plan.frozen == "spread"
    taught = (taught_blocks(model) or None) if spreads else None
    whole = [p for p in model.parameters() if sharded and stays_whole(p)]
    compiled = [part for part in blocks or [model] if plan.compile and not draws_inside(part)]
    if compute != master:
        if plan.layout.pp == 1:  # of a pipeline the last stage alone returns to the objective
            widen_outputs(model, compute, master)
        _cast(model, blocks, modes, plan, whole if sharded else kept_as_they_are(model, taught), compiled)
    for block, mode in zip(blocks, modes, strict=True):
        checkpoint_block(block, mode, plan.recompute_save, block in compiled)
    for part in compiled:
        leave_experts_out(part)
        part.forward = torch.compile(part.forward)  # inside the hooks that sharding adds
    if plan.offloads_activations:
        keep_on_host(blocks)
    if spreads:
        assert mesh is not None
        spread_packed(model, mesh.data_axis)
    if taught is not None:
        assert mesh is not None
        spread_teachers(model, blocks, mesh.data_axis, compute, master)
        blocks = [block for block in blocks if block not in taught]
    if sharded:
        assert mesh is not None
        return _shard(model, blocks, mesh, plan, placed, whole, alone, sums)
    if mesh is not None and plan.layout.dp_replicate > 1 and not plan.sync.has_outer_step:
        return ReducedGradients(model, mesh.get_group("dp_replicate"), plan.bucket_bytes, sums or PlainSums())
    return LocalGradients(model)


def _cast(
    model: nn.Module,
    blocks: list[nn.Module],
    modes: list[str],
    plan: Plan,
    only: Sequence[nn.Parameter] | None,
    compiled: Sequence[nn.Module],
) -> None:
    """Have every unit see its weights in the compute dtype, or `only` some of them: FSDP2 casts what it gathers."""
    compute, master = COMPUTE_DTYPES[plan.precision], MASTER_DTYPES[plan.precision]
    if not compiled and not isinstance(model, Decoder):  # whose loss is its own forward pass
        # Stages of a pipeline hand each other what blocks give, in the compute dtype.
        cast_outside(model, compute, master if plan.layout.pp == 1 else compute, set(blocks), only)
    if only is not None and not any(parameter.is_floating_point() for parameter in only):
        return
    for block, mode in zip(blocks, modes, strict=True):
        # The compiler cannot follow a swap of weights inside a recomputed part, and would leave it uncompiled.
        cast_block = cast_reads if block in compiled and mode != "none" else cast_unit
        cast_block(block, compute, set(blocks) - {block}, only)
    cast_unit(model, compute, set(blocks) - {model}, only)


def _shard(
    model: nn.Module,
    blocks: list[nn.Module],
    mesh: Mesh,
    plan: Plan,
    placed: Mapping[nn.Parameter, object] | None,
    whole: Sequence[nn.Parameter],
    alone: UnsharedExperts | None,
    sums: BucketSum | None,
) -> Gradients:
    """Shard the model and return how its gradients are summed."""
    axes, gathers_all = data_mesh(mesh, plan), bool(getattr(model, "needs_whole_weights", False))
    left = {*whole, *(p for p, place in (placed or {}).items() if place is None)}
    compute, master = COMPUTE_DTYPES[plan.precision], MASTER_DTYPES[plan.precision]
    zero = 1 if gathers_all else plan.zero
    shard(model, sharding_units(model, blocks), axes, zero, compute, master, placed, whole)
    how = GatheredGradients if gathers_all else ShardedGradients
    copies = mesh.get_group("dp_replicate")
    once = gathers_all or plan.reduces_once
    sharded = how(model, zero, once, axes, left, () if sums is None else (copies,))
    gradients: Gradients = sharded if alone is None else ExpertGradients(sharded, alone)
    if sums is not None:
        gradients = ReducedGradients(model, copies, plan.bucket_bytes, sums, sharded)
    trained = tuple(parameter for parameter in whole if parameter.requires_grad)
    return WholeGradients(gradients, trained, tuple(sharded.groups)) if trained else gradients
