"""Expert parallel by hand: each process holds some whole experts, and tokens travel by `all_to_all_single`.

All other weights are sharded over the same processes by FSDP2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from race.contenders import CLIP_NORM, LEARNING_RATE, Job, hand_batches, mean_of
from race.pacing import Pacer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from paceline.task.models.layers.products import expert_products


class Travel(torch.autograd.Function):
    """Rows to other ranks, `sent` of them to each, and as `arriving` says from each; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arriving: list[int], sent: list[int]) -> Tensor:
        ctx.back = (sent, arriving)
        received = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), arriving, sent)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        arriving, sent = ctx.back
        received = grad.new_empty(sum(arriving), grad.shape[1])
        dist.all_to_all_single(received, grad.contiguous(), arriving, sent)
        return received, None, None


class SpreadExperts(nn.Module):
    """This rank's experts of a layer, in the place of all of them."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().chunk(ranks)[rank].clone())
        self.down_proj = nn.Parameter(experts.down_proj.detach().chunk(ranks)[rank].clone())

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the experts' outputs [tokens, hidden] for `rows` sorted by expert, `counts` of them for each."""
        sent = counts.view(dist.get_world_size(), -1)  # [ranks, experts of each]
        arriving = torch.empty_like(sent)  # [ranks that send, experts of this one]
        dist.all_to_all_single(arriving, sent)
        out_sizes, in_sizes = arriving.sum(1).tolist(), sent.sum(1).tolist()
        received = Travel.apply(rows, out_sizes, in_sizes)
        expert = torch.arange(arriving.shape[1]).repeat(arriving.shape[0]).repeat_interleave(arriving.flatten())
        order = expert.argsort(stable=True)  # by expert, no longer by sender
        gate_up = self.gate_up_proj.flatten(1, 2)  # [experts, 2 x width, hidden]
        results = expert_products(received[order], arriving.sum(0), gate_up, self.down_proj)
        return Travel.apply(results[order.argsort()], in_sizes, out_sizes)


def expert_loop(pacer: Pacer, job: Job) -> None:
    """Train a decoder with experts, spread over all processes."""
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    model: Any = job.decoder()
    experts: list[nn.Parameter] = []
    for layer in model.layers:
        layer.mlp.experts = SpreadExperts(layer.mlp.experts)
        own = list(layer.mlp.experts.parameters())
        fully_shard(layer, ignored_params=set(own))
        experts += own
    fully_shard(model, ignored_params=set(experts))
    dense: Any = [p for p in model.parameters() if isinstance(p, DTensor)]
    optimizer = _adamw(dense, experts)
    pacer.ready()
    for batches in hand_batches(job):
        losses = []
        optimizer.zero_grad(set_to_none=True)
        for index, (tokens, labels) in enumerate(batches):
            model.set_is_last_backward(index == job.accumulation - 1)
            loss_sum, weight = model(tokens, labels=labels)
            loss = loss_sum / weight
            (loss / job.accumulation).backward()
            losses.append(loss.detach())
        _finish(dense, experts, job.processes)
        optimizer.step()
        if not pacer.step_done(mean_of(losses)):
            break


def _finish(dense: list[nn.Parameter], experts: list[nn.Parameter], ranks: int) -> None:
    """Average the experts' gradients as FSDP2 has the others', and clip all by their one norm."""
    by_experts = [p.grad for p in experts if p.grad is not None]
    torch._foreach_div_(by_experts, float(ranks))
    square = nn.utils.get_total_norm(by_experts).square()
    dist.all_reduce(square)
    norm: Any = nn.utils.get_total_norm([p.grad for p in dense if p.grad is not None])
    total = (norm.full_tensor().square() + square).sqrt()
    for parameters in (dense, experts):
        nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, total)


def _adamw(dense: list[nn.Parameter], experts: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of every contender; a group holds either DTensors or plain ones."""
    groups = [
        {"params": [p for p in dense if p.dim() >= 2], "weight_decay": 0.1},
        {"params": experts, "weight_decay": 0.1},
        {"params": [p for p in dense if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)
