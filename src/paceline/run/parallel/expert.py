"""The expert axis: a layer's experts spread over `ep` ranks of the `dp_shard` x `cp` part of the mesh.

Those ranks read different tokens, so tokens travel: an all-to-all brings every token to the ranks that hold its experts
and another one brings the results back (Lepikhin et al. 2021, GShard, arXiv:2006.16668). Nothing is padded or
dropped: ranks first tell each other how many rows come.

Dense weights are sharded over all of `fsdp` = dp_shard x cp. Expert weights are split whole by whole over `ep`, and
each rank's experts are sharded over the remaining fsdp / ep ranks (`expert_shard`), which hold the same experts. The
backward pass of the all-to-all brings an expert the gradients of all tokens of its `ep` group, FSDP2 adds those of the
other groups and copies: sums over exactly all ranks, never divided by a degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.errors import ConfigError
from paceline.plan.layout import Layout
from paceline.task.models.moe import Experts, MoE, MoEDecoder

EXPERT_DIM, OUT_DIM = 0, 1  # of stacked weights [experts, out, in]: split over `ep`, sharded over `expert_shard`


def spread_experts(model: nn.Module, mesh: DeviceMesh, layout: Layout) -> dict[nn.Parameter, Any]:
    """Split every layer's experts over `ep` and return where FSDP2 is to shard each of their weights.

    They stay in the sharding unit of their block, so that nothing is gathered inside a block, where selective recompute
    could not follow. Weights may be on the meta device. Raises ConfigError for a model whose experts cannot be spread.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if not found:
        raise ConfigError(f"layout ep = {layout.ep}", "the model has no experts to spread", "ep = 1")
    axes = expert_mesh(mesh, layout)
    exchange = AllToAll(axes["ep"].get_group())
    place = _placement(axes, layout)
    placed: dict[nn.Parameter, Any] = {}
    for name, experts in found.items():
        _check_even(name, experts, layout)
        for key, weight in list(experts.named_parameters(recurse=False)):
            part = weight.detach().tensor_split(layout.ep, dim=EXPERT_DIM)[axes["ep"].get_local_rank()].clone()
            spread = DTensor.from_local(part, axes["ep"], [Shard(EXPERT_DIM)], run_check=False)
            parameter = nn.Parameter(spread, requires_grad=weight.requires_grad)
            experts.register_parameter(key, parameter)
            placed[parameter] = place
        experts.exchange = exchange
    return placed


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


def expert_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """Return the mesh (dp_replicate, expert_shard, ep), in which `fsdp` is split in two. Every rank calls it.

    Neighbours of `fsdp` form an `ep` group: they exchange the most.
    """
    remaining = layout.dp_shard * layout.cp // layout.ep
    return mesh["dp_replicate", "fsdp"]._unflatten("fsdp", (remaining, layout.ep), ("expert_shard", "ep"))


def _placement(axes: DeviceMesh, layout: Layout) -> Any:
    """Return FSDP2's placement of the second dimension over `expert_shard`, with copies over `dp_replicate`.

    torch documents this result of `shard_placement_fn`, for experts, but exports its name from a private module only.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
    except ImportError as error:
        raise ConfigError(
            f"layout ep = {layout.ep} with torch {torch.__version__}",
            f"its FSDP2 cannot shard the weights of one unit over different ranks: {error}", "torch 2.13, or ep = 1",
        ) from error  # fmt: skip
    info = (
        HSDPMeshInfo(axes["dp_replicate", "expert_shard"], shard_mesh_dim=1, replicate_mesh_dim=0)
        if layout.dp_replicate > 1
        else FSDPMeshInfo(axes["expert_shard"], shard_mesh_dim=0)
    )
    return ShardPlacementResult(Shard(OUT_DIM), info)


@dataclass(frozen=True)
class AllToAll:
    """Exchanges rows over the ranks of `group`, of which each holds the same number of neighbouring experts."""

    group: dist.ProcessGroup

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return (rows for this rank's experts sorted by expert, counts of them, what `combine` needs).

        `rows` [tokens, hidden] are sorted by expert, `counts` [experts] int64 says how many each expert gets.
        """
        sent = counts.view(self.group.size(), -1)  # [ranks, experts of each]
        arriving = torch.empty_like(sent)  # [ranks that send, experts of this rank]
        dist.all_to_all_single(arriving, sent.contiguous(), group=self.group)
        out_sizes, in_sizes = torch.stack([arriving.sum(dim=1), sent.sum(dim=1)]).tolist()
        received = exchange_rows(rows, out_sizes, in_sizes, self.group)
        # They come sorted by sender first; products need them sorted by expert first.
        expert = torch.arange(arriving.shape[1], device=rows.device).repeat(arriving.shape[0])
        order = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        return received[order], arriving.sum(dim=0), (order.argsort(), in_sizes, out_sizes)

    def combine(self, results: Tensor, ticket: Any) -> Tensor:
        """Return the results of the rows that this rank sent, in the order in which it sent them."""
        order, out_sizes, in_sizes = ticket
        return exchange_rows(results[order], out_sizes, in_sizes, self.group)


def exchange_rows(rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return what the ranks of `group` send to this one, [sum(out_sizes), hidden], in rank order.

    `in_sizes` says how many of `rows` go to each rank, `out_sizes` how many come from each. Gradients go back.
    """
    return _ExchangeRows.apply(rows, out_sizes, in_sizes, group)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (out_sizes, in_sizes), group
        return _all_to_all(rows, out_sizes, in_sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        out_sizes, in_sizes = ctx.sizes
        return _all_to_all(grad, in_sizes, out_sizes, ctx.group), None, None, None


def _all_to_all(rows: Tensor, out_sizes: list[int], in_sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(out_sizes), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), out_sizes, in_sizes, group=group)
    return received


def _check_even(name: str, experts: Experts, layout: Layout) -> None:
    """Raise ConfigError where whole experts cannot be spread evenly, or their widths not sharded evenly."""
    remaining = layout.dp_shard * layout.cp // layout.ep
    for key, weight in experts.named_parameters(recurse=False):
        if weight.shape[EXPERT_DIM] % layout.ep:
            raise ConfigError(
                f"layout ep = {layout.ep} with {weight.shape[EXPERT_DIM]} experts in {name}",
                "every rank holds the same number of whole experts", "an ep that divides the number of experts",
            )  # fmt: skip
        if weight.shape[OUT_DIM] % remaining:
            raise ConfigError(
                f"{name}.{key} of width {weight.shape[OUT_DIM]} over dp_shard x cp / ep = {remaining} devices",
                "FSDP2 shards a dimension other than the first evenly or not at all",
                "a larger ep, or an expert width and a hidden width that are multiples",
            )
