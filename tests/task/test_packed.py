"""Attention among packed documents without a mask equals attention under the mask, whatever kernel computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packed_kernel import let_a_cpu_have, one_by_one
from tests_shared import VOCAB
from torch import Tensor

from paceline.run.parallel.context.zigzag import chunk_tokens, places_of
from paceline.spec.task import ModelSpec
from paceline.task import objective
from paceline.task.data.rows.packed import STARTS, SaysStarts, for_device
from paceline.task.models.build import build_model
from paceline.task.models.layers import packed
from paceline.task.models.layers.attention import CausalAttention, scaled_attention
from paceline.task.models.layers.documents import document_mask
from paceline.task.models.layers.packed import (
    PackedDocuments,
    PackedPart,
    document_starts,
    kept_operator,
    over_documents,
    packed_attention,
    packed_part_attention,
)

ROWS = [[0, 0, 0, 1, 1, 2], [7, 7, 7, 7, 7, 7], [3, 4, 5, 5, 5, 6]]
STARTS_OF_ROWS = [0, 3, 5, 6, 12, 13, 14, 17, 18]


def documents_of(rows: list[list[int]]) -> PackedDocuments:
    documents = torch.tensor(rows)
    starts = document_starts(documents)
    assert starts is not None
    return PackedDocuments(documents, starts, documents.shape[1])


def test_where_documents_begin() -> None:
    found = documents_of(ROWS).starts
    assert found.dtype == torch.int32 and found.tolist() == STARTS_OF_ROWS
    assert document_starts(torch.tensor([[0, 1, 0]])) is None, "two tokens of one document with another between"
    assert document_starts(torch.tensor([[1, 0, 2, 0]])) is None and document_starts(torch.tensor([[3, 1, 2]])) is None
    filled = document_starts(torch.tensor([[1, 1, 2, 0, 0], [1, 2, 3, 4, 5]]))
    assert filled is not None and filled.tolist() == [0, 2, 3, 5, 6, 7, 8, 9, 10], "what fills a row is one of its own"
    assert documents_of([[5]]).starts.tolist() == [0, 1]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_documents_one_by_one_are_attention_under_the_mask(kv_heads: int) -> None:
    torch.manual_seed(0)
    packed_documents = documents_of(ROWS)
    q = torch.randn(3, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, kv_heads, 6, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    masked = scaled_attention(q, k, v, document_mask(packed_documents.documents))
    starts = packed_documents.starts
    ours = over_documents(one_by_one, q, k, v, starts, starts, packed_documents.longest)
    torch.testing.assert_close(ours, masked, rtol=0, atol=1e-14)
    weights = torch.randn_like(masked)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), (q, k, v)),
        torch.autograd.grad((masked * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_chunks_of_queries_one_by_one_are_rows_of_the_mask(
    ranks: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks begin and end inside of documents, between them, and where rows are filled up: 6 tokens to 12 or 20."""
    let_a_cpu_have(monkeypatch, one_by_one)
    torch.manual_seed(0)
    documents, starts, seq = documents_of(ROWS)
    tokens = 2 * ranks * chunk_tokens(seq, ranks)
    whole = torch.cat((documents, documents[:, -1:].expand(-1, tokens - seq)), dim=1)
    q = torch.randn(3, 4, tokens, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, kv_heads, tokens, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    masked = scaled_attention(q, k, v, document_mask(whole))
    ours = torch.empty_like(masked)
    for rank in range(ranks):
        places = places_of(rank, ranks, seq)
        part = PackedPart(whole, starts, seq, places)
        for mine in places.chunk(2):
            first, end = int(mine[0]), int(mine[-1]) + 1
            out = packed_part_attention(q[:, :, mine], k[:, :, :end], v[:, :, :end], part, first)
            assert out is not None
            ours[:, :, mine] = out
    torch.testing.assert_close(ours, masked, rtol=0, atol=1e-14)
    weights = torch.randn_like(masked)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), (q, k, v)),
        torch.autograd.grad((masked * weights).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_where_there_is_no_kernel_a_mask_says_the_same() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 6, 8) for _ in range(3))
    told = documents_of(ROWS)
    assert packed_attention(q, k, v, told) is None, "fp32"
    assert torch.equal(CausalAttention()(q, k, v, told), CausalAttention()(q, k, v, document_mask(told.documents)))


class Packed:
    """Rows of several documents."""

    samples, items_per_sample, unit, vocab, fingerprint = 3, 6, "tokens", VOCAB, "packed"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(int(ids.sum()))
        tokens = torch.randint(0, VOCAB, (len(ids), 7), generator=generator)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "documents": torch.tensor(ROWS)[ids]}


@pytest.mark.parametrize("name", ["llama-1m", "moe-2m"])
def test_a_model_learns_the_same_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on a CPU: the source, the objective and the decoder, with documents one by one for a kernel."""
    model: Any = build_model(ModelSpec(name, hidden=32, layers=2, heads=4, kv_heads=2, ffn=24), VOCAB, 6, 0).double()
    batch = SaysStarts(Packed()).read(np.array([0, 1, 2]))
    assert batch[STARTS].tolist() == STARTS_OF_ROWS
    found = []
    for by_kernel in (False, True):
        calls: list[int] = []

        def kernel(q: Tensor, *rest: Any, calls: list[int] = calls) -> Tensor:
            calls.append(q.shape[0])
            return one_by_one(q, *rest)

        monkeypatch.setattr(objective, "takes_packed", lambda device, by_kernel=by_kernel: by_kernel)
        let_a_cpu_have(monkeypatch, kernel)
        model.zero_grad()
        loss, weight = objective.next_token(model, batch)
        loss.backward()
        found.append((loss.detach(), weight, [parameter.grad.clone() for parameter in model.parameters()]))
        assert calls == [18] * (2 * by_kernel), "once in each layer, for all rows together"
    (loss, weight, grads), (other_loss, other_weight, other_grads) = found
    assert weight == other_weight
    torch.testing.assert_close(loss, other_loss, rtol=1e-13, atol=0)
    for one, other in zip(grads, other_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_only_the_built_in_decoder_on_cuda_is_told_starts() -> None:
    source, named = Packed(), ModelSpec("llama-1m")
    assert for_device(source, "cpu", named) is source
    assert for_device(source, "cuda", torch.nn.Linear(1, 1)) is source
    told = for_device(source, "cuda", named)
    assert (told.samples, told.vocab, told.unit) == (3, VOCAB, "tokens")
    assert set(told.read(np.array([1]))) == {"tokens", "labels", "documents", STARTS}


@pytest.mark.skipif(packed.kernel() is None, reason="this torch has no variable-length attention")
def test_shapes_by_torchs_kernel() -> None:
    """Tensors without values go the whole way, backward too."""
    q = torch.empty(3, 4, 6, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    k, v = (torch.empty(3, 2, 6, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    documents, starts, longest = documents_of(ROWS)
    out = CausalAttention()(q, k, v, PackedDocuments(documents.to("meta"), starts.to("meta"), longest))
    out.sum().backward()
    assert out.shape == q.shape and out.dtype == torch.bfloat16
    assert [x.grad.shape for x in (q, k, v) if x.grad is not None] == [x.shape for x in (q, k, v)]
    part = PackedPart(documents.to("meta"), starts.to("meta"), longest, torch.arange(4, 6, device="meta"))
    found = packed_part_attention(q[:, :, 4:], k, v, part, 4)
    assert found is not None and found.shape == (3, 4, 2, 8)


@pytest.mark.skipif(packed.kernel() is None, reason="this torch has no variable-length attention")
def test_selective_recompute_knows_the_operator() -> None:
    from paceline.run.memory.recompute import kept_operators

    assert kept_operator() in kept_operators(["attention"]) and kept_operator() not in kept_operators(["products"])
