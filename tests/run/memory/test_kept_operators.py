"""What selective recompute keeps of a mixture of experts: the grouped products, as it keeps all others."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.run.memory.recompute import kept_operators


class _Counted(TorchDispatchMode):
    """Counts how often an operator runs."""

    def __init__(self, operator: object) -> None:
        super().__init__()
        self.operator, self.calls = operator, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func is self.operator
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped products")
@pytest.mark.parametrize(("kinds", "again"), [(("products",), 0), (("attention",), 1)])
def test_grouped_products_are_kept_with_the_others(kinds: tuple[str, ...], again: int) -> None:
    rows = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(2, 16, 16, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 32], dtype=torch.int32)

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return F.silu(F.grouped_mm(rows, experts, offs=ends)).square()

    counts = []
    for policy in (None, kept_operators(kinds)):
        with _Counted(torch.ops.aten._grouped_mm.default) as counted:
            if policy is None:
                out = forward(rows)
            else:
                contexts = functools.partial(create_selective_checkpoint_contexts, list(policy))
                out = checkpoint(forward, rows, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
        counts.append(counted.calls)
    assert counts[0] >= 1 and counts[1] == counts[0] + again
