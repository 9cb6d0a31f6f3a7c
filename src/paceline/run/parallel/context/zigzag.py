"""How a sequence is shared by the ranks of a cp group: rank r of n has chunks r and 2n - 1 - r of 2n equal ones.

A token sees all that come before it, so equal runs of tokens are unequal work. The first chunk of a rank has as many
before it as the second has after it, and so every pair costs the same (Llama 3, Dubey et al. 2024, arXiv:2407.21783,
section 3.3.2). Within a rank both chunks keep the order of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import ConfigError
from paceline.spec.data.labels import IGNORED
from paceline.task.data.rows.packed import STARTS
from paceline.task.models.layers.balance import before_last_label
from paceline.task.models.layers.documents import document_mask, document_positions
from paceline.task.models.layers.packed import PackedPart, takes_packed

PADDING_MASK = "attention_mask"  # [rows, seq], as transformers' tokenizers give it: 0 where a token is padding
PADDING = {"labels": IGNORED}  # what is filled in at the end of an entry's rows; 0 for all others


def chunk_tokens(seq: int, ranks: int) -> int:
    """Return the tokens of one chunk: sequences are filled up to a multiple of two chunks for each rank."""
    return -(-seq // (2 * ranks))


def places_of(rank: int, ranks: int, seq: int, device: torch.device | None = None) -> Tensor:
    """Return the places in the sequence that a rank has, int64 [2 * chunk]; from `seq` on they are filled in."""
    chunk = chunk_tokens(seq, ranks)
    first = torch.arange(rank * chunk, (rank + 1) * chunk, device=device)
    return torch.cat((first, first + (2 * ranks - 1 - 2 * rank) * chunk))


@dataclass(frozen=True)
class SequencePart:
    """Takes a rank's part of a batch along the sequence, and notes where it stands in the whole."""

    rank: int
    ranks: int
    masks_padding: bool = False  # whether "attention_mask" becomes what this rank's queries see
    takes_documents: bool = False  # whether the model's attention needs no mask where the device has a kernel

    def __call__(self, batch: object) -> dict[str, object]:
        """Return the batch with this rank's part of every entry [rows, seq, ...], "positions" and, if packed, "mask".

        "real" says which tokens are no padding, which a part of a row cannot tell: see `before_last_label`.
        Labels are cut after labelling, so the last of a chunk is the first token of the next chunk. What is filled in
        at the end of a sequence is seen by no token before it and has no label: it changes no number.
        """
        if not isinstance(batch, Mapping) or not isinstance(batch.get("tokens"), Tensor) or batch["tokens"].dim() != 2:
            raise ConfigError(
                "the batch cannot be shared along the sequence",
                f'cp = {self.ranks} needs a mapping with "tokens" [rows, seq], and got a {type(batch).__name__}',
                'plan.cp = 1, or data that give "tokens" and "labels"',
            )
        tokens = batch["tokens"]
        rows, seq = tokens.shape
        whole = dict(batch)
        documents, starts = whole.pop("documents", None), whole.pop(STARTS, None)
        places = places_of(self.rank, self.ranks, seq, tokens.device)
        if documents is not None:
            whole["positions"] = document_positions(documents)
        if isinstance(whole.get("labels"), Tensor) and whole["labels"].shape == tokens.shape:
            whole["real"] = before_last_label(whole["labels"])
        seen = whole.pop(PADDING_MASK) if self.masks_padding and PADDING_MASK in whole else None
        part: dict[str, object] = {name: self._cut(name, value, seq) for name, value in whole.items()}
        if "positions" not in part:
            part["positions"] = places.expand(rows, -1)
        if documents is not None:
            # What is filled in sees itself and the last document; a row without any key would have no attention.
            documents = _filled(documents, len(places) * self.ranks, None)
            by_kernel = starts is not None and self.takes_documents and takes_packed(tokens.device)
            part["mask"] = PackedPart(documents, starts, seq, places) if by_kernel else document_mask(documents, places)
        if seen is not None:
            part[PADDING_MASK] = _padding_mask(_filled(seen, len(places) * self.ranks, 0), places)
        return part

    def _cut(self, name: str, value: object, seq: int) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != seq:
            return value  # speaks of whole samples
        chunk = chunk_tokens(seq, self.ranks)
        value = _filled(value, 2 * self.ranks * chunk, PADDING.get(name, 0))
        first, second = (value.narrow(1, at * chunk, chunk) for at in (self.rank, 2 * self.ranks - 1 - self.rank))
        return torch.cat((first, second), dim=1)


def _padding_mask(real: Tensor, places: Tensor) -> Tensor:
    """Return which keys the queries at `places` see, bool [rows, 1, places, tokens]; `real` is [rows, tokens].

    As in transformers' masks, a query that is padding itself may see no key at all.
    """
    before = torch.arange(real.shape[1], device=real.device) <= places.unsqueeze(1)
    return (before & real.bool().unsqueeze(1)).unsqueeze(1)


def _filled(value: Tensor, length: int, fill: int | None) -> Tensor:
    """Return [rows, seq, ...] filled up to [rows, length, ...]; without a number, with each row's last entry."""
    missing = length - value.shape[1]
    if not missing:
        return value
    if fill is None:
        return torch.cat((value, value[:, -1:].expand(-1, missing)), dim=1)
    return F.pad(value, (0, 0) * (value.dim() - 2) + (0, missing), value=fill)
