"""Attention over blocks of keys: kernels against plain torch, and blocks merged against one attention."""

from __future__ import annotations

import pytest
import torch
from rounding import assert_close
from torch import Tensor
from torch.library import opcheck

from paceline.run.parallel.context.kernels import Merged, attend, attend_backward, plain_attend, plain_attend_backward
from paceline.run.parallel.context.zigzag import SequencePart, places_of
from paceline.task.models.layers.attention import scaled_attention
from paceline.task.models.layers.documents import document_mask, document_positions

OPERATIONS = 1000  # two products over 8 features, a softmax and sums over 10 keys, forward and back


def drawn(keys: int, queries: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(keys * 100 + queries)

    def normal(heads: int, tokens: int) -> Tensor:
        return torch.randn(2, tokens, heads, 8, dtype=dtype, generator=generator).transpose(1, 2)

    return normal(4, queries), normal(2, keys), normal(2, keys)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernels_equal_plain_torch(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = drawn(10, 10 if causal else 6, dtype)
    (out, lse), plain = attend(q, k, v, causal), plain_attend(q, k, v, causal)
    assert_close(out, plain[0], OPERATIONS)
    assert_close(lse, plain[1], OPERATIONS)
    grad = torch.randn_like(out)
    gradients = attend_backward(grad, q, k, v, out, lse, causal)
    for ours, theirs in zip(gradients, plain_attend_backward(grad, q, k, v, out, lse, causal), strict=True):
        assert_close(ours, theirs, OPERATIONS)


def test_plain_attention_is_torchs() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(9, 9))
    out = scaled_attention(q, k, v, None)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        plain, lse = plain_attend(q, k, v, True)
        torch.testing.assert_close(plain, out)
        for ours, theirs in zip(plain_attend_backward(grad, q, k, v, plain, lse, True), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_merged_blocks_are_one_attention() -> None:
    q, k, v = drawn(12, 6)
    merged = Merged(*attend(q, k[:, :, :5], v[:, :, :5], False))
    merged.add(*attend(q, k[:, :, 5:6], v[:, :, 5:6], False))
    merged.add(*attend(q[:, :, 4:], k[:, :, 6:], v[:, :, 6:], False))  # seen by the last two queries alone
    out, lse = merged.result()
    some, all_keys = plain_attend(q, k[:, :, :6], v[:, :, :6], False), plain_attend(q, k, v, False)
    torch.testing.assert_close(out, torch.cat((some[0][:, :, :4], all_keys[0][:, :, 4:]), dim=2))
    torch.testing.assert_close(lse, torch.cat((some[1][:, :, :4], all_keys[1][:, :, 4:]), dim=2))


@pytest.mark.parametrize(("seq", "ranks"), [(16, 2), (13, 2), (24, 3), (5, 4), (1, 2)])
def test_parts_hold_every_token_once_and_cost_the_same(seq: int, ranks: int) -> None:
    tokens = torch.arange(2 * seq).view(2, seq)
    batch = {"tokens": tokens, "labels": tokens + 1, "weight of a row": torch.ones(2)}
    parts = [SequencePart(rank, ranks)(batch) for rank in range(ranks)]
    places = torch.cat([part["positions"][0] for part in parts])
    assert sorted(places.tolist()) == list(range(len(places)))
    assert len({int(part["positions"][0].sum()) for part in parts}) == 1, "as many keys to see for every rank"
    for rank, part in enumerate(parts):
        assert part["positions"].equal(places_of(rank, ranks, seq).expand(2, -1))
        real = part["positions"] < seq
        assert part["labels"][real].equal(part["tokens"][real] + 1)
        assert (part["labels"][~real] == -100).all()
        assert part["weight of a row"] is batch["weight of a row"]


def test_documents_restart_positions_and_hide_each_other() -> None:
    documents = torch.tensor([[3, 3, 3, 7, 7, 8], [0, 1, 2, 2, 2, 2]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    mask = document_mask(documents)
    for row, numbers in enumerate(documents.tolist()):
        for query in range(6):
            for key in range(6):
                assert mask[row, 0, query, key] == (key <= query and numbers[key] == numbers[query])
    part = SequencePart(0, 2)({"tokens": documents, "labels": documents, "documents": documents})
    assert part["mask"].shape == (2, 1, 4, 8)
    assert part["mask"].any(dim=-1).all(), "every query sees a key, filled in or not"
    assert "documents" not in part


def test_operators_are_well_formed(tmp_path: object) -> None:
    import torch.distributed as dist

    from paceline.run.parallel.context.sequence_attention import sequence_attention, whole_sequence

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        q, k, v = (x.contiguous().requires_grad_() for x in drawn(8, 8))
        checks = opcheck(sequence_attention, (q, k, v, group, "gather"))
        assert len(checks) >= 4 and set(checks.values()) == {"SUCCESS"}
        checks = opcheck(whole_sequence, (torch.stack((k, v)).detach().requires_grad_(), group))
        assert len(checks) >= 4 and set(checks.values()) == {"SUCCESS"}
    finally:
        dist.destroy_process_group()
