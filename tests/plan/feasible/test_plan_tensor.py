"""Which degrees of the tensor axis a model can have, and that the search and the twin respect them."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.plan.feasible.tensor import refusal
from paceline.spec.layout import Layout
from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder

CONFIG = dataclasses.replace(NAMED_SIZES["llama-1m"], vocab=257)


@pytest.mark.parametrize(
    ("layout", "seq_len", "because"),
    [(Layout(tp=2), 256, None),
     (Layout(tp=1), 255, None),
     (Layout(tp=2, dp_shard=4, cp=2), 256, None),
     (Layout(tp=3), 256, "heads = 4 cannot be shared evenly by tp = 3"),
     (Layout(tp=4), 256, "kv_heads = 2 cannot be shared evenly by tp = 4"),
     (Layout(tp=2), 255, "samples of 255 positions"),
     (Layout(tp=2, cp=2), 254, "tp * cp = 4"),
     (Layout(tp=2, dp_shard=3), 256, "a width of 128 cannot be shared evenly by dp_shard * cp = 3")],
    ids=str,
)  # fmt: skip
def test_a_degree_that_cannot_be_had_is_named(layout: Layout, seq_len: int, because: str | None) -> None:
    found = refusal(layout, profile_decoder(CONFIG, seq_len))
    assert found is None if because is None else because in (found or "")


def test_a_vocabulary_too_small_for_the_degree() -> None:
    tiny = dataclasses.replace(CONFIG, heads=8, kv_heads=8, head_dim=16, vocab=9)
    assert "leave a rank without any" in (refusal(Layout(tp=8), profile_decoder(tiny, 256)) or "")
