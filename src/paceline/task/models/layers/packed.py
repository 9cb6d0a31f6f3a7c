"""Causal attention among the tokens of packed documents without a mask [seq, seq]: one kernel for all documents.

torch's variable-length attention takes the rows of a batch as one run of tokens and the places where documents begin in
it (Dao 2023, arXiv:2307.08691): no score between two documents is computed, and none is masked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.task.models.layers.documents import document_mask

LOWEST_CAPABILITY = (8, 0)  # of the devices that have the kernel
DTYPES = (torch.bfloat16, torch.float16)
DEVICES = ("cuda", "meta")
MOST_WIDTH = 256  # of a head

# (q, k, v [tokens, heads, head_dim], where each document's queries begin, where its keys do, the most queries and the
# most keys that one may have) -> [queries, heads, head_dim]. A document's last query sees all of its keys.
PackedKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


class PackedDocuments(NamedTuple):
    """Which keys a query sees, in the place of a mask: those of its own document, up to the query."""

    documents: Tensor  # integers [rows, seq]
    starts: Tensor  # int32 [documents + 1], their first tokens in the flattened rows, and the end of all
    longest: int  # tokens; no document has more


class PackedPart(NamedTuple):
    """`PackedDocuments` for a rank that has some places of each row, where ranks share the sequences."""

    documents: Tensor  # integers [rows, tokens], of the whole sequences, filled up to equal parts
    starts: Tensor  # `PackedDocuments.starts`, of the rows before they were filled up
    seq: int  # tokens of a row before
    places: Tensor  # int64 [queries], this rank's in a row

    def starts_from(self, first: int, tokens: int) -> Tensor:
        """Return where documents begin among `tokens` places of each row from `first` on, int32 [documents + 1].

        Of documents [0 0 0 1 1 2] the places 2 to 4 hold 1, 2 and 0 tokens: [0, 1, 3, 3].
        """
        row = self.starts.div(self.seq, rounding_mode="floor")
        return row * tokens + (self.starts - row * self.seq - first).clamp(0, tokens)

    def mask(self, queries: slice, keys: int) -> Tensor:
        """Return which of the first keys of a row some of this rank's queries see, bool [rows, 1, queries, keys]."""
        return document_mask(self.documents[:, :keys], self.places[queries])


def document_starts(documents: Tensor) -> Tensor | None:
    """Return `PackedDocuments.starts` of `documents` [rows, seq] on the host, None where a number comes back in a row.

    Every row begins one, and zeros may fill its end. On a device the host would wait for it, since it is data how many
    there are.
    """
    falls = (documents[:, 1:] < documents[:, :-1]).sum(1)
    to_filling = (documents[:, 0] != 0) & (documents[:, -1] == 0)
    if ((falls > 1) | ((falls == 1) & ~to_filling)).any():
        return None  # tokens apart may be of one document
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = begins.flatten().nonzero().flatten()
    return torch.cat((places, places.new_tensor([documents.numel()]))).to(torch.int32)


def takes_packed(device: torch.device) -> bool:
    """Return whether a device has attention over documents of any length, and torch the way to it."""
    return (
        device.type == "cuda" and kernel() is not None and torch.cuda.get_device_capability(device) >= LOWEST_CAPABILITY
    )


def packed_attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedDocuments) -> Tensor | None:
    """Return [rows, heads, seq, head_dim] for q of that shape and k, v with as many heads or fewer.

    None where the kernel does not take these tensors: a mask then says the same.
    """
    attend = _kernel_for(q)
    if attend is None:
        return None
    return over_documents(attend, q, k, v, packed.starts, packed.starts, packed.longest)


def packed_part_attention(q: Tensor, k: Tensor, v: Tensor, packed: PackedPart, first: int) -> Tensor | None:
    """Return what `packed_attention` does for queries at neighbouring places from `first` on, and all keys up to them.

    No score between documents is computed, and no mask is made. Documents that end before `first` have keys and no
    query. How many there are does not depend on the rank, so the host waits for no number of the device's.
    """
    attend = _kernel_for(q)
    if attend is None:
        return None
    queries, keys = packed.starts_from(first, q.shape[2]), packed.starts_from(0, k.shape[2])
    return over_documents(attend, q, k, v, queries, keys, k.shape[2])


def _kernel_for(q: Tensor) -> PackedKernel | None:
    """Return the kernel where it takes queries like these."""
    takes = q.device.type in DEVICES and q.dtype in DTYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= MOST_WIDTH
    return kernel() if takes else None


def over_documents(
    kernel: PackedKernel, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest: int
) -> Tensor:
    """Return what `packed_attention` does, by a kernel, of documents that begin there among queries and keys."""
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [rows x seq, heads, head_dim]
    out = kernel(flat_q, flat_k, flat_v, q_starts, k_starts, min(longest, q.shape[2]), longest)
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def as_mask(packed: PackedDocuments) -> Tensor:
    """Return the mask that says the same, bool [rows, 1, seq, seq]."""
    return document_mask(packed.documents)


def kept_operator() -> object:
    """Return the operator whose output selective recompute keeps, None where torch has none."""
    if kernel() is None:
        return None
    from torch.nn.attention import varlen  # noqa: F401 (it makes the operator known)

    return torch.ops.torch_attn._varlen_attn.default


def _by_torch(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, queries: int, keys: int
) -> Tensor:
    out: Tensor = attention(q, k, v, q_starts, k_starts, queries, keys, window_size=(-1, 0), enable_gqa=True)
    return out


def _by_torch_of_whole_heads(
    attention: Any, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, queries: int, keys: int
) -> Tensor:
    """Do what `_by_torch` does where torch (before 2.12) wants as many heads of keys as of queries."""
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out: Tensor = attention(q, k, v, q_starts, k_starts, queries, keys, window_size=(-1, 0))
    return out


@functools.cache
def kernel() -> PackedKernel | None:
    """Return torch's attention over documents of any length, None where this torch has none.

    It is imported when it is first wanted: torch's compiler comes with it.
    """
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    attention = getattr(varlen, "varlen_attn", None)
    takes = () if attention is None else inspect.signature(attention).parameters
    if "window_size" not in takes:
        return None
    return partial(_by_torch if "enable_gqa" in takes else _by_torch_of_whole_heads, attention)
