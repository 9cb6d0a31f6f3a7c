"""The decoder's head as it was when an H200 was measured (2026-11-27): its loss held more than it does since then."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.spec.profile import BlockProfile
from paceline.task.models.layers.chunks import loss_chunk_tokens
from paceline.task.models.shape import DecoderConfig
from paceline.task.profile import decoder

_head = decoder._head


def hold_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have profiles tell the short-lived bytes of that program: 14 B a logit of a chunk, the head's gradient thrice."""
    monkeypatch.setattr(decoder, "_head", _head_of_that_day)


def _head_of_that_day(config: DecoderConfig, seq: int) -> BlockProfile:
    logits, scaled = loss_chunk_tokens(config.vocab) * config.vocab, 1.5 * config.vocab * config.hidden
    short = max(min(2.0 * seq * config.vocab, 3.5 * logits), scaled)
    return dataclasses.replace(
        _head(config, seq), transient_elements=short, transient_cap_elements=max(3.5 * logits, scaled)
    )
