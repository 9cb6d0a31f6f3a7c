"""RMSNorm that keeps only its input and one number per row for the backward pass, on every device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    Computed in fp32 at least, whatever the input's dtype, and rounded to it once. The weight is taken in the input's
    dtype, so that the result is the same whether the weight arrives in it already or is cast here.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        weight = self.weight.to(x.dtype)
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, self.eps)  # a fused kernel
        return _RMSNorm.apply(x, weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    """F.rms_norm elsewhere is a chain of operators of which autograd would keep two fp32 copies of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # one pass, no wide copy of x
        scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        # Neither changed in place nor through a `to` that changes nothing: of such a result torch 2.11's compiler
        # follows the operators here and not the backward pass below, and gradients are wrong.
        found = x * scale * weight.to(wide)
        return found if wide == x.dtype else found.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph: gradients that can be differentiated again
            return *_differentiable(x, weight, ctx.eps, grad, ctx.needs_input_grad[1]), None
        normal = x * scale  # in fp32 at least, as `scale` is
        grad_normal = grad * weight.to(scale.dtype)
        # d(x / rms(x)): the part of the gradient along x is taken out, since scaling x changes nothing.
        along = (grad_normal * normal).mean(dim=-1, keepdim=True)
        grad_weight = (grad * normal).flatten(0, -2).sum(dim=0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_x = grad_normal.sub_(normal.mul_(along)).mul_(scale).to(x.dtype)
        return grad_x, grad_weight, None


def _differentiable(
    x: Tensor, weight: Tensor, eps: float, grad: Tensor, by_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients by input and weight, made of operators that autograd knows."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = (x.to(wide).square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    normal, grad_normal = x * scale, grad * weight.to(wide)
    grad_x = (grad_normal - normal * (grad_normal * normal).mean(dim=-1, keepdim=True)) * scale
    grad_weight = (grad * normal).flatten(0, -2).sum(dim=0).to(weight.dtype) if by_weight else None
    return grad_x.to(x.dtype), grad_weight
