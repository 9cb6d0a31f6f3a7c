"""Which tensors a process holds: counted by shape, type and name, so that those that grew can be named."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

MOST_NAMED = 20
HeldBytes = dict[str, tuple[int, int]]  # what kind of tensor -> how many, and their bytes


def tensors_held(model: nn.Module) -> HeldBytes:
    """Return the tensors that this process holds, by name where they are the model's, else by shape and type.

    It looks at every object that Python's collector knows: some milliseconds, which only a request is worth.
    """
    names = {id(weight): f"weight {name}" for name, weight in model.named_parameters()}
    found: dict[str, list[int]] = {}
    for each in gc.get_objects():
        if not _is_tensor(each):
            continue
        kind = names.get(id(each)) or f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')} on {each.device}"
        found.setdefault(kind, []).append(each.numel() * each.element_size())
    return {kind: (len(sizes), sum(sizes)) for kind, sizes in found.items()}


def _is_tensor(each: Any) -> bool:
    # A class may lie about itself; what is asked for is the type that the object has.
    return issubclass(type(each), torch.Tensor) and each.layout == torch.strided


def grown(before: HeldBytes, after: HeldBytes) -> list[dict[str, object]]:
    """Return the kinds of tensor of which there is more than before, most bytes first."""
    more: Counter[str] = Counter()
    for kind, (_, size) in after.items():
        more[kind] = size - before.get(kind, (0, 0))[1]
    return [
        {"tensors": kind, "more": after[kind][0] - before.get(kind, (0, 0))[0], "bytes": size}
        for kind, size in more.most_common(MOST_NAMED)
        if size > 0
    ]


def grown_text(found: Sequence[Mapping[str, object]], most: int = 3) -> str:
    """Return what has grown in words, the most of it first."""
    return "; ".join(f"{each['more']} more of {each['tensors']}" for each in found[:most])
