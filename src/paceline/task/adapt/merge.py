"""The weights of a model with its adapters added to them: the same outputs without any adapter."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from paceline.spec.adapt.adapter import AdapterSpec
from paceline.task.adapt.linear import MAGNITUDE, PACKED, VALUES, A, B, is_adapter, is_packed
from paceline.task.adapt.nf4 import Packed


class MergedTensors(Mapping[str, Tensor]):
    """A model's tensors by name without adapters: each weight beside one is merged with it when it is asked for.

    `turned` are the last parts of the names of layers whose weights lie as [in, out].
    """

    def __init__(self, tensors: Mapping[str, Tensor], spec: AdapterSpec, turned: Collection[str] = ()) -> None:
        self._tensors, self._spec, self._turned = tensors, spec, frozenset(turned)

    def __getitem__(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        if is_adapter(name) or is_packed(name):
            raise KeyError(name)
        if f"{layer}.{A}" not in self._tensors:
            return self._tensors[name]
        magnitude = self._tensors[f"{layer}.{MAGNITUDE}"] if self._spec.kind == "dora" else None
        thin = (self._tensors[f"{layer}.{A}"], self._tensors[f"{layer}.{B}"])
        is_turned = layer.rpartition(".")[2] in self._turned
        base = self._base(layer, *thin)
        whole = merged(base.T if is_turned else base, *thin, self._spec.scale, magnitude)
        return whole.T.contiguous() if is_turned else whole

    def _base(self, layer: str, thin_in: Tensor, thin_out: Tensor) -> Tensor:
        """Return a layer's frozen weight; one in four bits as it computes."""
        if f"{layer}.{VALUES}" not in self._tensors:
            return self._tensors[f"{layer}.weight"]
        values, scales, wide = (self._tensors[f"{layer}.{part}"] for part in PACKED)
        return Packed((thin_out.shape[1], thin_in.shape[1]), values, scales, wide).to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        packed = (name.replace(VALUES, "weight") for name in self._tensors if name.endswith(VALUES))
        plain = (name for name in self._tensors if not is_adapter(name) and not is_packed(name))
        return itertools.chain(plain, packed)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@torch.no_grad()
def merged(weight: Tensor, thin_in: Tensor, thin_out: Tensor, scale: float, magnitude: Tensor | None) -> Tensor:
    """Return the weight that computes what `weight` [out, in] and its adapter do, in the adapter's dtype.

    A weight that rests in bf16 comes out in the adapter's fp32: rounded to bf16, most of a small product would be lost.
    """
    wide = torch.promote_types(thin_in.dtype, torch.float32)
    sum_of = weight.to(wide) + scale * thin_out.to(wide).T @ thin_in.to(wide)
    if magnitude is not None:
        sum_of *= (magnitude.to(wide) / sum_of.square().sum(1).sqrt()).unsqueeze(1)
    return sum_of.to(thin_in.dtype)
