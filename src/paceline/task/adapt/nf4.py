"""Frozen weights in four bits: NF4 with doubly quantised scales (QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

A weight is cut into blocks of 64 values in the order of its rows. A value is one of sixteen levels times the largest
magnitude of its block; those magnitudes, less their mean, are again cut into blocks of 256 of eight bits each. The
levels, the eight-bit code and the order of nibbles are those of bitsandbytes 0.50, so that its numbers are these, but
for one scale in a thousand: its CPU kernel rounds otherwise in the middle between two codes. All is computed by
operations of torch, on any device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.task.models.held import whole_of

BLOCK, SCALES = 64, 256  # values with one scale, and scales with one scale of their own
# QLoRA, appendix E: quantiles of the normal distribution, with an exact zero.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
SMALLEST = 1e-38  # a block of zeros is divided by it


@dataclass(frozen=True)
class Packed:
    """A weight in four bits. None of its tensors is of a floating type: a model that is cast leaves them alone.

    Its values may be spread over ranks; they are gathered whenever the weight is asked for, by all these ranks.
    """

    shape: tuple[int, int]
    values: Tensor  # uint8 [half of the values, rounded up], the first of two in the upper half
    scales: Tensor  # uint8 [blocks]
    wide: Tensor  # int32 [blocks of scales + 1]: bits of their fp32 scales, and of the mean of all scales

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] that stands in the four bits; computed in fp32, and rounded last."""
        device = self.values.device
        wide = self.wide.view(torch.float32)
        inner = _eight_bits(device)[self.scales.int()]
        scales = inner * wide[:-1].repeat_interleave(SCALES)[: len(inner)] + wide[-1]
        rows, columns = self.shape
        count = rows * columns
        values = whole_of(self.values).int()
        # Both values of a byte are taken as the eight bytes that they are: fancy indexing takes them one by one.
        pairs = _pairs(device).view(torch.int64).view(-1).index_select(0, values).view(torch.float32)
        pairs = pairs[:count]
        if count % BLOCK:
            pairs = F.pad(pairs, (0, -count % BLOCK))
        whole = (pairs.view(-1, BLOCK) * scales.unsqueeze(1)).view(-1)
        return whole[:count].view(self.shape).to(dtype)


def sizes_of(shape: tuple[int, int]) -> tuple[int, int, int]:
    """Return how many elements the three tensors of a packed weight of a shape have."""
    count = shape[0] * shape[1]
    blocks = -(-count // BLOCK)
    return -(-count // 2), blocks, -(-blocks // SCALES) + 1


@torch.no_grad()
def pack(weight: Tensor) -> Packed:
    """Return a weight [out, in] in four bits."""
    flat = weight.detach().reshape(-1).float()
    largest, scaled = _scaled(flat, BLOCK)
    middles = _middles(torch.tensor(LEVELS, device=flat.device))
    codes = torch.bucketize(scaled[: len(flat) + len(flat) % 2], middles, out_int32=True)
    codes = codes.to(torch.uint8)
    mean = largest.mean()
    outer, inner = _scaled(largest - mean, SCALES)
    code = _eight_bits(flat.device)
    scales = torch.bucketize(inner[: len(largest)], _middles(code), out_int32=True).to(torch.uint8)
    wide = torch.cat([outer, mean.view(1)]).view(torch.int32)
    return Packed((weight.shape[0], weight.shape[1]), (codes[::2] << 4) | codes[1::2], scales, wide)


def _scaled(flat: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of every block of values, and the values over it, padded to whole blocks."""
    blocks = F.pad(flat, (0, -len(flat) % block)).view(-1, block)
    largest = blocks.abs().amax(dim=1)
    return largest, (blocks * (1.0 / largest.clamp(min=SMALLEST)).unsqueeze(1)).clamp(-1, 1).view(-1)


def _middles(levels: Tensor) -> Tensor:
    return (levels[:-1] + levels[1:]) / 2


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of every byte, fp32 [256, 2]."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


@functools.cache
def _eight_bits(device: torch.device) -> Tensor:
    """Return the values of the signed eight-bit code, fp32 [256] (Dettmers et al. 2021, arXiv:2110.02861).

    Of each of seven powers of ten, evenly spaced fractions: twice as many of each as of the smaller one before.
    """
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        middles = (10 ** (power - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)


class PackedProduct(torch.autograd.Function):
    """x W^T of a frozen weight in four bits: the backward pass unpacks it again, so that no whole one is kept.

    Values that are spread over ranks are gathered in both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, scales: Tensor, wide: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return [..., out] of x [..., in]."""
        ctx.save_for_backward(values, scales, wide)
        ctx.shape = shape
        return F.linear(x, Packed(shape, values, scales, wide).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> object:
        """Return the gradient of x alone."""
        (gradient,) = gradients
        weight = Packed(ctx.shape, *ctx.saved_tensors).to(gradient.dtype)
        return gradient @ weight, None, None, None, None


def packed_product(x: Tensor, weight: Packed) -> Tensor:
    """Return [..., out] of x [..., in] and a weight in four bits."""
    product: Tensor = PackedProduct.apply(x, weight.values, weight.scales, weight.wide, weight.shape)
    return product
