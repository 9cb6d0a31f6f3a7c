"""Packed documents: where they lie in a row, from a number per token that differs between neighbours in the row."""

from __future__ import annotations

import torch
from torch import Tensor


def document_positions(documents: Tensor) -> Tensor:
    """Return each token's place in its own document, int64 [rows, seq], counted from where the row first has it."""
    rows, seq = documents.shape
    places = torch.arange(seq, device=documents.device).expand(rows, seq)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(dim=1).values


def document_mask(documents: Tensor, places: Tensor | None = None) -> Tensor:
    """Return which keys a query sees, bool [rows, 1, queries, seq]: keys of the query's document, up to the query.

    `documents` are integers [rows, seq]; `places` [queries] are the queries' places in the row, by default all of them.
    """
    every = torch.arange(documents.shape[1], device=documents.device)
    places = every if places is None else places
    same = documents[:, places].unsqueeze(2) == documents.unsqueeze(1)  # [rows, queries, seq]
    return (same & (places.unsqueeze(1) >= every)).unsqueeze(1)
