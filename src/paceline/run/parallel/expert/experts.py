"""The expert axis: a layer's experts spread over `ep` ranks of the `dp_shard` x `cp` part of the mesh.

The ranks of an `ep` group read different tokens, so tokens travel: an all-to-all brings every token to the ranks that
hold the token's experts, and a second all-to-all brings the results back (Lepikhin et al. 2021, GShard,
arXiv:2006.16668). No token is dropped: before the first all-to-all, ranks tell each other how many rows will come
(all_to_all.py), or a step whose rows found no slot is made again (slots.py).

Dense weights are sharded over `fsdp` = dp_shard x cp ranks. Experts are given out whole over `ep`, and a rank's
experts are sharded over the fsdp / ep ranks that hold the same experts (`expert_shard`). With dp_shard = 8, ep = 4
and 16 experts, a rank has 4 experts and shares their weights with 1 other rank. In the backward pass the all-to-all
brings an expert the gradients of the tokens of its own `ep` group, and FSDP2 adds the gradients of the other `ep`
groups and of the copies (`dp_replicate`). So a gradient is a sum over all ranks, each once, and is never divided by a
degree.

Under tensor parallelism a rank holds a part of the width of its experts. Ranks with the same part form `ep` groups of
their own and exchange whole rows (tokens at full width): the `ep` groups of the parts lie side by side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.plan.feasible.experts import OVER_DIFFERENT_RANKS
from paceline.plan.feasible.torch_version import EXPERTS, older_refusal
from paceline.run.parallel.data.unshared_experts import UnsharedExperts
from paceline.run.parallel.expert.all_to_all import AllToAll
from paceline.run.parallel.expert.routed import RoutedForward
from paceline.run.parallel.expert.slots import SLOTS, Exchange, LayerSlots, SlottedExchange
from paceline.run.process.groups import Mesh
from paceline.spec.layout import Layout
from paceline.task.declared import expert_axis, is_routed
from paceline.task.models.held import is_spread
from paceline.task.models.moe import Experts, MoE, MoEDecoder

EXPERT_DIM = 0  # of stacked weights, split over `ep`


def spread_experts(
    model: nn.Module, mesh: Mesh, layout: Layout, alone: UnsharedExperts | None = None, slotted: bool = False
) -> dict[nn.Parameter, object]:
    """Split every layer's experts over `ep` and return where FSDP2 is to shard each of their weights: None for nowhere.

    Those of ranks that are `alone` with their experts need no FSDP2. Others stay in the sharding unit of their block,
    so that nothing is gathered inside a block, where selective recompute could not follow. Weights may be on the meta
    device. A pipeline stage may be without experts; every rank of the mesh asks for its groups all the same. Rows may
    be `slotted`, where the plan says so (slots.py). Raises ConfigError for a model whose experts cannot be spread.
    """
    axes = mesh.experts
    group = axes["ep"].get_group()
    placed: dict[nn.Parameter, object] = {}
    place = _placements(axes, layout)
    for name, experts in _experts_of(model, layout).items():
        for key, weight in list(experts.named_parameters(recurse=False)):
            parameter = _own_experts(f"{name}.{key}", weight, axes, layout)
            experts.register_parameter(key, parameter)
            placed[parameter] = (
                None if alone is not None else place(_sharded_dimension(f"{name}.{key}", parameter, layout))
            )
        exchange = _slotted(experts, group) if slotted else AllToAll(group)
        on_their_ranks = functools.partial(_on_their_ranks, experts, exchange, alone)
        if is_routed(experts):
            experts.forward = RoutedForward(experts, on_their_ranks)
        else:
            experts.forward = functools.partial(on_their_ranks, experts.forward)
    return placed


def _slotted(experts: nn.Module, group: dist.ProcessGroup) -> SlottedExchange:
    """Return the exchange of a layer by slots, which stay with the module until `slots_of` asks for them."""
    slots = LayerSlots()
    setattr(experts, SLOTS, slots)
    return SlottedExchange(group, slots, takes_padding=isinstance(experts, Experts))


def _experts_of(model: nn.Module, layout: Layout) -> dict[str, nn.Module]:
    """Return the modules with a layer's stacked experts, by name, as the model's rules say."""
    found, because = expert_axis(model)
    if because or (not found and layout.pp == 1):
        because = because or "the model has no experts to spread"
        raise ConfigError(f"layout ep = {layout.ep}", because, "ep = 1")
    return found


def _own_experts(name: str, weight: nn.Parameter, axes: DeviceMesh, layout: Layout) -> nn.Parameter:
    """Return the experts that this rank has of a stacked weight, which may be split over tensor ranks already."""
    if weight.shape[EXPERT_DIM] % layout.ep:
        raise ConfigError(
            f"layout ep = {layout.ep} with {weight.shape[EXPERT_DIM]} experts in {name}",
            "every rank holds the same number of whole experts", "an ep that divides the number of experts",
        )  # fmt: skip
    from torch.distributed.tensor import DTensor, Placement, Shard  # never on one device

    held, mesh = weight.detach(), axes["ep"]
    placements: list[Placement] = [Shard(EXPERT_DIM)]
    if is_spread(held):
        mesh, placements = axes["ep", "tp"], [Shard(EXPERT_DIM), *held.placements]
        held = held.to_local()
    part = held.tensor_split(layout.ep, dim=EXPERT_DIM)[axes["ep"].get_local_rank()].clone()
    stride = torch.empty(weight.shape, device="meta").stride()
    spread = DTensor.from_local(part, mesh, placements, run_check=False, shape=weight.shape, stride=stride)
    return nn.Parameter(spread, requires_grad=weight.requires_grad)


def _sharded_dimension(name: str, weight: nn.Parameter, layout: Layout) -> int:
    """Return the last dimension of a spread weight that no axis splits and that can be sharded evenly."""
    from torch.distributed.tensor import Shard

    assert is_spread(weight)
    remaining = layout.dp_shard * layout.cp // layout.ep
    split = {place.dim for place in weight.placements if isinstance(place, Shard)}
    whole = [dim for dim in range(weight.dim()) if dim not in split]
    even = [dim for dim in whole if weight.shape[dim] % remaining == 0]
    if not even:
        raise ConfigError(
            f"{name} of widths {', '.join(str(weight.shape[dim]) for dim in whole)} over "
            f"dp_shard x cp / ep = {remaining} devices",
            "FSDP2 shards a dimension other than the first evenly or not at all",
            "a larger ep, or an expert width and a hidden width that are multiples",
        )
    return even[-1]


def _on_their_ranks(
    experts: nn.Module,
    exchange: Exchange,
    alone: UnsharedExperts | None,
    forward: Any,
    rows: Tensor,
    counts: Tensor,
) -> Tensor:
    """Send rows to the ranks of their experts, run those there on plain weights, and bring the results back."""
    rows, counts, ticket = exchange.dispatch(rows, counts)
    spread = dict(experts._parameters)
    try:
        for key, weight in spread.items():
            if is_spread(weight):
                plain = alone.leaf(weight) if alone else weight.to_local()
                experts._parameters[key] = plain
        results = forward(rows, counts)
    finally:
        experts._parameters.update(spread)
    return exchange.combine(results, ticket)


def balance_shared_sequences(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make balance losses those of whole sequences where the ranks of `group` hold parts of the same sequences.

    Counts are summed without gradient: the part of the loss that has one is a sum over each rank's own tokens.
    """

    def over_sequence(counts: Tensor) -> Tensor:
        total = counts.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    for module in model.modules():
        if isinstance(module, MoE | MoEDecoder):
            module.over_sequence = over_sequence


def _placements(axes: DeviceMesh, layout: Layout) -> Callable[[int], object]:
    """Return what gives FSDP2's placement of a dimension over `expert_shard`, with copies over `dp_replicate`.

    torch documents this result of `shard_placement_fn`, for experts, but exports its name from a private module only.
    """
    if because := older_refusal(EXPERTS, "ep", OVER_DIFFERENT_RANKS):
        raise ConfigError(f"layout ep = {layout.ep} with torch {torch.__version__}", because, "torch 2.13, or ep = 1")
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    info = (
        HSDPMeshInfo(axes["dp_replicate", "expert_shard"], shard_mesh_dim=1, replicate_mesh_dim=0)
        if layout.dp_replicate > 1
        else FSDPMeshInfo(axes["expert_shard"], shard_mesh_dim=0)
    )
    return lambda dim: ShardPlacementResult(Shard(dim), info)
