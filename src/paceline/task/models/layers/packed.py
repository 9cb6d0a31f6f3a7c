"""Causal attention among the tokens of packed documents without a mask [seq, seq]: one kernel for all documents.

torch's variable-length attention takes the rows of a batch as one run of tokens and the places where documents begin in
it (Dao 2023, arXiv:2307.08691): no score between two documents is computed, and none is masked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.task.models.layers.documents import document_mask

try:
    from torch.nn.attention import varlen
except ImportError:  # torch that has none
    varlen = None  # type: ignore[assignment]

LOWEST_CAPABILITY = (8, 0)  # of the devices that have the kernel
DTYPES = (torch.bfloat16, torch.float16)
DEVICES = ("cuda", "meta")
MOST_WIDTH = 256  # of a head

# (q, k, v [tokens, heads, head_dim], starts, longest) -> [tokens, heads, head_dim]
PackedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


class PackedDocuments(NamedTuple):
    """Which keys a query sees, in the place of a mask: those of its own document, up to the query."""

    documents: Tensor  # int64 [rows, seq]
    starts: Tensor  # int32 [documents + 1], their first tokens in the flattened rows, and the end of all
    longest: int  # tokens; no document has more


def document_starts(documents: Tensor) -> Tensor | None:
    """Return `PackedDocuments.starts` of `documents` [rows, seq] on the host, None where a number comes back in a row.

    Every row begins one. On a device the host would wait for it, since it is data how many there are.
    """
    if (documents[:, 1:] < documents[:, :-1]).any():
        return None  # tokens apart may be of one document
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = begins.flatten().nonzero().flatten()
    return torch.cat((places, places.new_tensor([documents.numel()]))).to(torch.int32)


def takes_packed(device: torch.device) -> bool:
    """Return whether a device has attention over documents of any length, and torch the way to it."""
    return (
        device.type == "cuda" and KERNEL is not None and torch.cuda.get_device_capability(device) >= LOWEST_CAPABILITY
    )


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments) -> Tensor | None:
    """Return [rows, heads, seq, head_dim] for q of that shape and k, v with as many heads or fewer.

    None where the kernel does not take these tensors: a mask then says the same.
    """
    if KERNEL is None or q.device.type not in DEVICES or q.dtype not in DTYPES:
        return None
    if q.shape[-1] % 8 or q.shape[-1] > MOST_WIDTH:
        return None
    return over_documents(KERNEL, q, k, v, packed)


def over_documents(kernel: PackedKernel, q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments) -> Tensor:
    """Return what `packed_attention` does, by a kernel."""
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [rows x seq, heads, head_dim]
    out = kernel(flat_q, flat_k, flat_v, packed.starts, packed.longest)
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def as_mask(packed: PackedDocuments) -> Tensor:
    """Return the mask that says the same, bool [rows, 1, seq, seq]."""
    return document_mask(packed.documents)


def kept_operator() -> Any:
    """Return the operator whose output selective recompute keeps, None where torch has none."""
    return None if KERNEL is None else torch.ops.torch_attn._varlen_attn.default


def _by_torch(attention: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    out: Tensor = attention(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), enable_gqa=True)
    return out


def _kernel() -> PackedKernel | None:
    attention = getattr(varlen, "varlen_attn", None)
    if attention is None or not {"window_size", "enable_gqa"} <= set(inspect.signature(attention).parameters):
        return None
    return partial(_by_torch, attention)


KERNEL = _kernel()
