"""Attention over one block of keys, with the log-sum-exp that lets blocks be merged, and its backward pass.

Softmax over blocks of keys (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, section
3.1): with out_i and lse_i of block i, lse = log sum exp(lse_i) and out = sum out_i exp(lse_i - lse). In the backward
pass each block's gradients follow from the *merged* out and lse, by the block's own kernel (Liu et al. 2023,
arXiv:2310.01889).

torch's public attention returns no log-sum-exp; the operators below it do. Where torch has no such operator for a
device and dtype, the same is computed in plain torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of attention: out [rows, heads, queries, head_dim], lse [rows, heads, queries] in fp32 or fp64.

    `k` and `v` may have fewer heads than `q`. `causal` needs as many queries as keys: both stand in one order. Scores
    are multiplied by `scale`, by default head_dim to the power of -1/2.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    if _has_flash(q, k, v, causal):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    return plain_attend(q, k, v, causal, scale)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from this block, given `out` and `lse` merged over all blocks."""
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    if _has_flash(q, k, v, causal):
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of dropout, of which there is none
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused,
            scale=scale,
        )  # fmt: skip
    return plain_attend_backward(grad, q, k, v, out, lse, causal, scale)


def _has_flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    if q.device.type != "cuda" or q.shape[-1] % 8:  # torch's public attention would pad the heads
        return False
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, k.shape[1] != q.shape[1])
    return torch.backends.cuda.can_use_flash_attention(parameters)


def plain_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return what `attend` does, from whole scores in fp32 at least."""
    scores, values = _scores(q, k, causal, scale), _per_head(v, q)
    lse = scores.logsumexp(dim=-1)
    return (scores.sub_(lse.unsqueeze(-1)).exp_() @ values.to(scores.dtype)).to(q.dtype), lse


def plain_attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `attend_backward` does, from whole scores (Dao et al. 2022, algorithm 4)."""
    weights = _scores(q, k, causal, scale).sub_(lse.unsqueeze(-1)).exp_()  # [rows, heads, queries, keys]
    wide = weights.dtype
    grad, keys, values = grad.to(wide), _per_head(k, q).to(wide), _per_head(v, q).to(wide)
    by_v = weights.transpose(-1, -2) @ grad
    along = (grad * out).sum(dim=-1, keepdim=True)
    by_scores = weights.mul_((grad @ values.transpose(-1, -2)).sub_(along)).mul_(_scale(q, scale))
    by_q, by_k = by_scores @ keys, by_scores.transpose(-1, -2) @ q.to(wide)
    shared = (k.shape[1], q.shape[1] // k.shape[1])  # query heads of one key head are neighbours
    by_k, by_v = (by.unflatten(1, shared).sum(dim=2) for by in (by_k, by_v))
    return by_q.to(q.dtype), by_k.to(k.dtype), by_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ _per_head(k, q).to(wide).transpose(-1, -2)) * _scale(q, scale)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with one head for every query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


class Merged:
    """Attention over the blocks of keys seen so far, in fp32 at least; queries may see a block from one on."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        """Begin with a first block, which every query sees."""
        self._dtype = out.dtype
        self.out, self.lse = out.to(torch.promote_types(out.dtype, torch.float32)), lse

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge a further block, which the last of the queries see: as many as `out` has."""
        seeing = slice(self.lse.shape[2] - lse.shape[2], None)
        before = self.lse[:, :, seeing]
        both = torch.logaddexp(before, lse)
        kept = self.out[:, :, seeing]
        kept.mul_((before - both).exp_().unsqueeze(-1)).add_(out * (lse - both).exp_().unsqueeze(-1))
        before.copy_(both)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse) in the inputs' dtype, and in fp32 or fp64."""
        return self.out.to(self._dtype), self.lse
