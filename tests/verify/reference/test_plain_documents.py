"""Packed documents: where tokens stand and what they see is told plainly to the reference, by none of our functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests_shared import VOCAB
from torch import Tensor

from paceline.spec.task import ModelSpec
from paceline.task import objective
from paceline.task.models.build import build_model
from paceline.task.models.layers.documents import document_mask, document_positions
from paceline.verify.reference.plain_documents import placed_plainly

DOCUMENTS = torch.tensor([[3, 3, 4, 4, 4, 7, 7], [1, 2, 2, 2, 2, 2, 3], [5, 5, 5, 5, 5, 5, 5], [1, 1, 2, 2, 1, 1, 1]])


def batch(dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens, labels = torch.randint(VOCAB, (2, *DOCUMENTS.shape))
    return {"tokens": tokens, "labels": labels, "documents": DOCUMENTS.to(dtype)}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_what_is_told_plainly_is_what_ours_says(dtype: torch.dtype) -> None:
    """A model gets positions of one type, whatever the numbers of documents are."""
    told = placed_plainly(objective.next_token, batch(dtype))
    assert "documents" not in told and told["positions"].dtype == torch.int64
    assert torch.equal(told["positions"], document_positions(DOCUMENTS))
    assert torch.equal(told["mask"], document_mask(DOCUMENTS))


def test_an_objective_of_somebody_elses_reads_documents_itself() -> None:
    data = batch()
    assert placed_plainly(lambda model, batch: (torch.zeros(()), 1), data) is data


@pytest.mark.parametrize("planted", ["positions go on", "documents see each other"])
def test_a_mistake_of_ours_is_not_in_the_reference(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn": 16, "vocab": VOCAB}
    model = build_model(ModelSpec("llama-1m", **sizes), VOCAB, 7, 0).double()

    def losses() -> tuple[float, float]:
        data = batch()
        both = [objective.next_token(model, each)[0] for each in (data, placed_plainly(objective.next_token, data))]
        return both[0].item(), both[1].item()

    ours, plain = losses()
    assert ours == pytest.approx(plain, rel=1e-12)
    if planted == "positions go on":
        monkeypatch.setattr(objective, "document_positions", lambda documents: torch.arange(7).expand(4, 7))
    else:
        monkeypatch.setattr(objective, "document_mask", lambda documents: torch.ones(4, 1, 7, 7).tril().bool())
    wrong, still = losses()
    assert still == pytest.approx(plain, rel=1e-12)
    assert wrong != pytest.approx(plain, rel=1e-9)
