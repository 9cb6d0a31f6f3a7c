"""Causal attention over sequences that ranks share, as operators of their own: `paceline::sequence_attention`.

Every rank holds queries, keys and values of the two chunks that zigzag.py gives it. With c tokens to a chunk:

- its own keys: causal attention among its 2c tokens, which stand in the order of the sequence;
- ranks before it: all its queries see the first chunk of each, and none sees the second;
- ranks after it: the queries of its second chunk see both chunks of each, those of its first none.

So no mask is ever made, and every rank computes 2c^2 (ranks - 1) scores beside its own. Two methods bring the keys
(exchange.py):

`gather`  all of them at once, while the rank attends to its own; they are gathered again, not kept, for the backward
          pass (Llama 3, Dubey et al. 2024, arXiv:2407.21783, section 3.3.2);
`ring`    one rank's after the other's, each while the one before is used (Liu et al. 2023, arXiv:2310.01889): less
          memory, more messages.

Gradients of keys and values are summed over ranks in fp32 at least. As operators, not autograd functions, they are one
unit to recompute, which keeps their output, and to compilation, which does not look inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.library import CustomOpDef

from paceline.errors import ConfigError
from paceline.run.parallel.context.exchange import METHODS, all_gather, reduce_scatter
from paceline.run.parallel.context.kernels import Merged, attend, attend_backward
from paceline.task.models.layers.attention import AttentionFunction, scaled_attention
from paceline.task.models.layers.packed import PackedPart, packed_part_attention


def shared_attention(group: dist.ProcessGroup, method: str) -> AttentionFunction:
    """Return attention over sequences shared by the ranks of `group`: (q, k, v, mask) of this rank -> its output.

    `mask` is bool [rows, 1, 2c, keys of the whole sequence], or says which documents are packed; None is plain causal
    attention. `scale` is what scores are multiplied by, where it is not head_dim to the power of -1/2.
    """
    name = group.group_name

    def attention(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | PackedPart | None, scale: float | None = None
    ) -> Tensor:
        if mask is not None:
            return _masked(q, k, v, mask, scale, group)
        return sequence_attention(q, k, v, name, method, scale)[0]

    return attention


INSIDE: dict[
    str, Callable[..., object]
] = {}  # what operators run, by name: who looks at collectives calls this instead


def _operator(name: str, schema: str) -> Callable[[Callable[..., object]], CustomOpDef]:
    """Return what makes a function an operator of ours that changes no argument."""

    def made(function: Callable[..., object]) -> CustomOpDef:
        INSIDE[name] = function
        return torch.library.custom_op(f"paceline::{name}", function, mutates_args=(), schema=schema)

    return made


@_operator(
    "sequence_attention",
    schema="(Tensor q, Tensor k, Tensor v, str group, str method, float? scale=None) -> (Tensor, Tensor)",
)
def sequence_attention(
    q: Tensor, k: Tensor, v: Tensor, group: str, method: str, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) for this rank's queries: [rows, heads, 2c, head_dim] and [rows, heads, 2c].

    `group` is the name of the process group of the ranks that share the sequences.
    """
    exchange = METHODS[method](k, v, _group(group))
    merged = Merged(*attend(q, k, v, causal=True, scale=scale))
    for block in exchange.blocks():
        merged.add(*attend(_seeing(q, block.late), block.k, block.v, causal=False, scale=scale))
    out, lse = merged.result()
    return _by_token(out), lse.contiguous()


@_operator(
    "sequence_attention_backward",
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str group, str method,"
    " float? scale=None) -> (Tensor, Tensor, Tensor)",
)
def sequence_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    method: str,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's q, k and v."""
    exchange = METHODS[method](k, v, _group(group))
    by_q, by_k, by_v = attend_backward(grad, q, k, v, out, lse, causal=True, scale=scale)
    by_q = by_q.to(lse.dtype)
    exchange.begin(by_k, by_v)
    for block in exchange.blocks():
        grad_seen, q_seen, out_seen, lse_seen = (_seeing(x, block.late) for x in (grad, q, out, lse))
        part, by_k, by_v = attend_backward(
            grad_seen, q_seen, block.k, block.v, out_seen, lse_seen.contiguous(), causal=False, scale=scale
        )
        _seeing(by_q, block.late).add_(part)
        exchange.add(by_k, by_v)
    by_k, by_v = exchange.result()
    return _by_token(by_q.to(q.dtype)), _by_token(by_k.to(k.dtype)), _by_token(by_v.to(v.dtype))


@sequence_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, group: str, method: str, scale: float | None = None) -> tuple[Tensor, Tensor]:
    return _by_token(torch.empty_like(q)), q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@sequence_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    method: str,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    by_q, by_k, by_v = (_by_token(torch.empty_like(x)) for x in (q, k, v))
    return by_q, by_k, by_v


def _keep_for_backward(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.group, ctx.method, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, unused: object) -> tuple[Tensor | None, ...]:
    found = sequence_attention_backward(grad, *ctx.saved_tensors, ctx.group, ctx.method, ctx.scale)
    return *found, None, None, None


def _once_alone(ctx: Any, *gradients: Tensor) -> NoReturn:
    raise ConfigError(
        "a gradient of attention over shared sequences is differentiated again, as for a gradient penalty",
        "ranks share the sequences (cp), and their attention has first derivatives alone",
        "plan.cp = 1",
    )


sequence_attention.register_autograd(_backward, setup_context=_keep_for_backward)
sequence_attention_backward.register_autograd(_once_alone)
OPERATOR = torch.ops.paceline.sequence_attention.default  # as selective recompute sees it


# ---- attention with a mask: over the whole sequence's keys ---------------------------------------------------------


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | PackedPart, scale: float | None, group: dist.ProcessGroup
) -> Tensor:
    """Return attention under a mask: each chunk's queries against the keys up to that chunk's end, in their order.

    A query may see nothing in a block of keys, so blocks are not merged here. Of packed documents no mask is made where
    the kernel for them takes these tensors.
    """
    chunk, rank, ranks = q.shape[2] // 2, group.rank(), group.size()
    keys, values = whole_sequence(torch.stack((k, v)), group.group_name).unbind(0)
    parts = []
    for index, place in enumerate((rank, 2 * ranks - 1 - rank)):
        mine, end = slice(index * chunk, (index + 1) * chunk), (place + 1) * chunk
        chunk_q, chunk_k, chunk_v = q[:, :, mine], keys[:, :, :end], values[:, :, :end]
        part = None
        if isinstance(mask, PackedPart) and scale is None:
            part = packed_part_attention(chunk_q, chunk_k, chunk_v, mask, place * chunk)
        if part is None:
            sees = mask.mask(mine, end) if isinstance(mask, PackedPart) else mask[:, :, mine, :end]
            part = scaled_attention(chunk_q, chunk_k, chunk_v, sees, scale)
        parts.append(part)
    return torch.cat(parts, dim=2)


@_operator("whole_sequence", schema="(Tensor part, str group) -> Tensor")
def whole_sequence(part: Tensor, group: str) -> Tensor:
    """Return [2, rows, heads, 2c * ranks, head_dim], in the order of the sequence, of every rank's [..., 2c, ...]."""
    ranks = _group(group)
    chunks = part.unflatten(3, (2, -1)).movedim(3, 0).contiguous()  # [2 chunks, 2, rows, heads, c, head_dim]
    everything = chunks.new_empty(ranks.size(), *chunks.shape)
    all_gather(everything.flatten(0, 1), chunks, ranks)
    ordered = torch.cat((everything[:, 0], everything[:, 1].flip(0)))  # [2 ranks, 2, rows, heads, c, head_dim]
    return ordered.movedim(0, 3).flatten(3, 4).contiguous()


@_operator("whole_sequence_backward", schema="(Tensor grad, str group) -> Tensor")
def whole_sequence_backward(grad: Tensor, group: str) -> Tensor:
    """Return this rank's part of the sum over ranks of the gradients of whole sequences; summed in fp32 at least."""
    ranks = _group(group)
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    ordered = wide.unflatten(3, (2 * ranks.size(), -1)).movedim(3, 0)
    first, second = ordered.chunk(2)
    everything = torch.stack((first, second.flip(0)), dim=1).contiguous()  # [ranks, 2 chunks, 2, rows, heads, c, ...]
    own = torch.empty_like(everything[0])
    reduce_scatter(own, everything.flatten(0, 1), group=ranks)
    return own.movedim(0, 3).flatten(3, 4).to(grad.dtype).contiguous()


@whole_sequence.register_fake
def _(part: Tensor, group: str) -> Tensor:
    *outer, tokens, width = part.shape
    return part.new_empty(*outer, tokens * _group(group).size(), width)


@whole_sequence_backward.register_fake
def _(grad: Tensor, group: str) -> Tensor:
    *outer, tokens, width = grad.shape
    return grad.new_empty(*outer, tokens // _group(group).size(), width)


def _keep_group(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


def _whole_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return whole_sequence_backward(grad, ctx.group), None


def _whole_again(ctx: Any, by_part: Tensor) -> tuple[Tensor, None]:
    return whole_sequence(by_part, ctx.group), None


whole_sequence.register_autograd(_whole_backward, setup_context=_keep_group)
whole_sequence_backward.register_autograd(_whole_again, setup_context=_keep_group)


def _group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name: operators take numbers, strings and tensors, but no groups."""
    return _resolve_process_group(cast(Any, name))


def _seeing(x: Tensor, late: bool) -> Tensor:
    """Return the part of [rows, heads, 2c, ...] that a block concerns: the second chunk, or all."""
    return x[:, :, x.shape[2] // 2 :] if late else x


def _by_token(x: Tensor) -> Tensor:
    """Return a copy of [rows, heads, tokens, width] laid out token by token, as the projections make and take it.

    Always a copy: an operator's outputs may share no memory, and those of a single head would.
    """
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
