"""A kernel for packed documents that any device has: what torch's has in one call, a document at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from paceline.task.models.layers import packed
from paceline.task.models.layers.attention import scaled_attention


def one_by_one(q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, queries: int, keys: int) -> Tensor:
    """Compute what the kernel computes, a document at a time: (q, k, v) are [tokens, heads, head_dim].

    Queries are the last of a document's tokens, as in the kernel: the last one sees all keys.
    """
    outs = []
    assert len(q_starts) == len(k_starts) and q_starts.dtype == k_starts.dtype == torch.int32
    for (begin, end), (first, last) in zip(pairwise(q_starts.tolist()), pairwise(k_starts.tolist()), strict=True):
        assert 0 <= end - begin <= queries and end - begin <= last - first <= keys
        parts = [x.transpose(0, 1).unsqueeze(0) for x in (q[begin:end], k[first:last], v[first:last])]
        sees = torch.ones(end - begin, last - first, dtype=torch.bool).tril(last - first - (end - begin))
        outs.append(scaled_attention(*parts, sees)[0].transpose(0, 1))
    assert (begin, end, first, last)[1::2] == (len(q), len(k)), "no token is left over"
    return torch.cat(outs)


def let_a_cpu_have(patch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    """Have attention among packed documents computed by a kernel on a CPU in fp64."""
    patch.setattr(packed, "kernel", lambda: kernel)
    patch.setattr(packed, "DTYPES", (torch.float64,))
    patch.setattr(packed, "DEVICES", ("cpu",))
