"""The one order in which a plan is applied.

Tensor, context, precision, recompute, compile, offload, shard, replicas.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.plan.plan import Plan
from paceline.run.offload import keep_on_host
from paceline.run.parallel.alone import AloneExperts, ExpertGradients
from paceline.run.parallel.context import share_sequences
from paceline.run.parallel.data import ShardedGradients, shard
from paceline.run.parallel.expert import balance_shared_sequences, spread_experts
from paceline.run.parallel.split_check import SplitCheck
from paceline.run.parallel.tensor import SummedGradients, split_layers
from paceline.run.precision import COMPUTE_DTYPES, MASTER_DTYPES, cast_reads, cast_unit
from paceline.run.recompute import checkpoint_block
from paceline.run.replicas.allreduce import LocalGradients, ReducedGradients
from paceline.run.world import context_group
from paceline.task.declared import declared_rules
from paceline.task.rules import Rules


class Gradients(Protocol):
    """How one step's gradients come together over ranks and micro-batches. After `finish` they are global sums."""

    def zero(self) -> None:
        """Forget the last step's gradients."""

    def before_micro_batch(self, last: bool) -> None:
        """Prepare the coming backward pass."""

    def finish(self) -> None:
        """Return once the sums are complete."""


def is_sharded(plan: Plan) -> bool:
    """Return whether FSDP2 holds the weights: where ranks share a copy's state, or an axis splits the model itself.

    In the second case it also sums gradients over `dp_replicate`, since it knows how to do that for split weights.
    """
    layout = plan.layout
    splits_model = layout.tp > 1 or layout.pp > 1 or layout.ep > 1
    return layout.dp_shard * layout.cp > 1 or (splits_model and layout.dp_replicate > 1)


def apply_plan(
    model: nn.Module,
    blocks: list[nn.Module],
    plan: Plan,
    mesh: DeviceMesh | None,
    rules: Rules | None = None,
    first: int = 0,
    check: SplitCheck | None = None,
) -> Gradients:
    """Change `model` in place into what `plan` asks for and return how its gradients are summed.

    `blocks` are the model's repeated blocks, or those of a pipeline stage from number `first` on: the units of
    recompute, compilation, offload and sharding. The mesh is None for a single device. For a stage of a pipeline
    `rules` are those of the whole model, which a part does not tell. `check` is asked once layers are split.
    """
    parts = _split_layers(model, plan, mesh, rules)
    if check is not None and mesh is not None:
        check.of(model, mesh.get_group("tp"))
    modes = _modes(plan, range(first, first + len(blocks)))
    gradients = _apply_whole(model, blocks, modes, plan, mesh)
    return SummedGradients(gradients, model, parts, mesh.get_group("tp")) if mesh is not None and parts else gradients


def _split_layers(model: nn.Module, plan: Plan, mesh: DeviceMesh | None, rules: Rules | None) -> list[str]:
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
    model: nn.Module, blocks: list[nn.Module], modes: list[str], plan: Plan, mesh: DeviceMesh | None
) -> Gradients:
    """Apply what treats every layer alike and return how gradients are summed over the data axes."""
    if mesh is not None and plan.layout.cp > 1:
        balance_shared_sequences(model, context_group(mesh, plan.layout))
    compute, master = COMPUTE_DTYPES[plan.precision], MASTER_DTYPES[plan.precision]
    alone = AloneExperts.of(plan.layout, casts=compute != master)
    placed = spread_experts(model, mesh, plan.layout, alone) if mesh is not None and plan.layout.ep > 1 else None
    sharded = mesh is not None and is_sharded(plan)
    share_sequences(model, plan, mesh)
    if compute != master and not sharded:
        for block, mode in zip(blocks, modes, strict=True):
            # The compiler cannot follow a swap of weights inside a recomputed part, and would leave it uncompiled.
            cast_block = cast_reads if plan.compile and mode != "none" else cast_unit
            cast_block(block, compute, set(blocks) - {block})
        cast_unit(model, compute, set(blocks) - {model})
    for block, mode in zip(blocks, modes, strict=True):
        checkpoint_block(block, mode, plan.recompute_save)
    if plan.compile:
        for block in blocks or [model]:
            block.forward = torch.compile(block.forward)  # inside the hooks that sharding adds
    if plan.offloads_activations:
        keep_on_host(blocks)
    if sharded:
        assert mesh is not None
        shard(model, blocks, mesh, plan.layout, plan.zero, compute, master, placed)
        gradients = ShardedGradients(model, plan.zero, replicated=plan.layout.dp_replicate > 1)
        return gradients if alone is None else ExpertGradients(gradients, alone)
    if mesh is not None and plan.layout.dp_replicate > 1:
        return ReducedGradients(model, mesh.get_group("dp_replicate"))
    return LocalGradients(model)
