"""Context parallel by hand: every rank gathers all keys, and chunks in zigzag order make the work equal.

As in Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2): rank r has chunks r and 2C-1-r of each sequence;
each chunk's queries see the keys up to its end under a mask. Weights are sharded over the same ranks by FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from race.contenders import CLIP_NORM, Job, adamw, hand_batches, mean_of
from race.pacing import Pacer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

# torch 2.13 gave both a new name and warns of the old one, which takes time.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GatherKeys(torch.autograd.Function):
    """Keys and values of both chunks of all ranks, in the order of the sequence; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:  # [2 chunks, ...]
        ranks = dist.get_world_size()
        everything = part.new_empty(ranks, *part.shape)
        all_gather(everything.flatten(0, 1), part)
        return torch.cat((everything[:, 0], everything[:, 1].flip(0)))  # [2 x ranks, ...]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        first, second = grad.chunk(2)
        everything = torch.stack((first, second.flip(0)), dim=1).contiguous()  # [ranks, 2 chunks, ...]
        own = torch.empty_like(everything[0])
        reduce_scatter(own, everything.flatten(0, 1))
        return own


class SharedAttention(nn.Module):
    """Causal attention of this rank's two chunks over the whole sequence."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.places = (rank, 2 * ranks - 1 - rank)
        ends = [(place + 1) * chunk for place in self.places]
        # The chunk's own part is a triangle, all before it is seen.
        self.masks = [torch.ones(chunk, end, dtype=torch.bool).tril(end - chunk) for end in ends]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None = None) -> Tensor:
        """Return [rows, heads, 2 x chunk, head_dim] for q of that shape."""
        parts = torch.stack((k, v)).unflatten(3, (2, -1)).movedim(3, 0).contiguous()
        keys, values = GatherKeys.apply(parts).movedim(0, 3).flatten(3, 4).unbind(0)  # [rows, heads, seq, head_dim]
        grouped = k.shape[1] != q.shape[1]
        found = []
        for queries, seen in zip(q.chunk(2, dim=2), self.masks, strict=True):
            known = slice(seen.shape[1])
            found.append(
                F.scaled_dot_product_attention(
                    queries, keys[:, :, known], values[:, :, known], attn_mask=seen, enable_gqa=grouped
                )
            )
        return torch.cat(found, dim=2)


def context_loop(pacer: Pacer, job: Job) -> None:
    """Train with every sequence shared by all processes, and weights sharded over them."""
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    model: Any = job.decoder()
    chunk = job.seq_len // (2 * job.processes)
    for layer in model.layers:
        layer.self_attn.attend = SharedAttention(chunk)
        fully_shard(layer)
    fully_shard(model)
    at = [torch.arange(place * chunk, (place + 1) * chunk) for place in model.layers[0].self_attn.attend.places]
    positions = torch.cat(at)
    optimizer = adamw(model)
    pacer.ready()
    for batches in hand_batches(job):
        losses = []
        optimizer.zero_grad(set_to_none=True)
        for index, (tokens, labels) in enumerate(batches):
            model.set_is_last_backward(index == job.accumulation - 1)
            loss_sum, weight = model(tokens[:, positions], labels=labels[:, positions], positions=positions)
            loss = loss_sum / weight
            (loss / job.accumulation).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if not pacer.step_done(mean_of(losses)):
            break
