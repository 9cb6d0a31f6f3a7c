"""Packed documents on a GPU: by the kernel of any length in low precision, by a mask in fp32 and fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from devices import on_every_device
from rounding import MEAN_LOSS_BF16
from torch import Tensor

from paceline.spec.task import ModelSpec
from paceline.task.data.rows.packed import STARTS, SaysStarts
from paceline.task.models.build import build_model
from paceline.task.models.layers.attention import CausalAttention, scaled_attention
from paceline.task.models.layers.documents import document_mask
from paceline.task.models.layers.packed import PackedDocuments, document_starts, takes_packed
from paceline.task.objective import next_token

SEQ, VOCAB = 256, 64


def documents_of(rows: int) -> Tensor:
    """Return documents of 1 to 90 tokens, and a row of one alone."""
    generator = np.random.default_rng(0)
    found = [np.repeat(np.arange(200), generator.integers(1, 90, 200))[:SEQ] for _ in range(rows - 1)]
    return torch.from_numpy(np.stack([*found, np.zeros(SEQ, dtype=np.int64)]))


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_of_documents_is_attention_under_the_mask(device: str, dtype: torch.dtype, kv_heads: int) -> None:
    torch.manual_seed(0)
    documents = documents_of(3)
    q = torch.randn(3, 4, SEQ, 64, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(3, kv_heads, SEQ, 64, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(3, 4, SEQ, 64, dtype=torch.float64)
    exact = scaled_attention(q, k, v, document_mask(documents))
    by_exact = torch.autograd.grad((exact * weights).sum(), (q, k, v))
    near = [x.detach().to(device, dtype).requires_grad_() for x in (q, k, v)]
    starts = document_starts(documents)
    assert starts is not None
    out = CausalAttention()(*near, PackedDocuments(documents.to(device), starts.to(device), SEQ))
    by_near = torch.autograd.grad((out.double() * weights.to(device)).sum(), near)
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip((out, *by_near), (exact, *by_exact), strict=True):
        # Inputs, scores, weights and outputs are rounded once each: a few units of the largest value.
        assert float((ours.detach().cpu().double() - theirs.detach()).abs().max()) < 8 * eps * float(
            theirs.detach().abs().max()
        )


class Packed:
    samples, items_per_sample, unit, vocab, fingerprint = 3, SEQ, "tokens", VOCAB, "packed"

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, Tensor]:
        tokens = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, (3, SEQ + 1)))[ids]
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "documents": documents_of(3)[ids]}


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_decoder_learns_the_same_from_packed_documents(device: str, dtype: torch.dtype) -> None:
    spec, batch = ModelSpec("llama-1m", hidden=128, layers=2, heads=4, kv_heads=2, ffn=96), Packed().read(np.arange(3))
    exact, weight = next_token(build_model(spec, VOCAB, SEQ, 0).double(), batch)
    told: dict[str, Any] = {name: value.to(device) for name, value in SaysStarts(Packed()).read(np.arange(3)).items()}
    assert STARTS in told and takes_packed(told["documents"].device) == (device == "cuda")
    ours, ours_weight = next_token(build_model(spec, VOCAB, SEQ, 0).to(device, dtype), told)
    assert float(ours_weight) == float(weight)
    assert float(ours.detach()) == pytest.approx(
        float(exact.detach()), rel=1e-11 if dtype == torch.float64 else MEAN_LOSS_BF16
    )
