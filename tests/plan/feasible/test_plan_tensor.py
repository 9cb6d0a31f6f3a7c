"""Which degrees of the tensor axis a model can have, and that the search and the twin respect them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from paceline.plan.feasible.tensor import refusal
from paceline.spec.layout import Layout
from paceline.task.models.sizes import NAMED_SIZES
from paceline.task.profile.decoder import profile_decoder
from paceline.task.profile.plain import pack_profile, unpack_profile

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


def test_a_vocabulary_that_is_not_the_smallest_and_leaves_a_rank_without_any() -> None:
    """Keys of 16 features over 8 ranks are two each; 17 words are three each, of which two ranks have none."""
    tiny = dataclasses.replace(CONFIG, heads=8, kv_heads=8, head_dim=2, hidden=16, vocab=17)
    assert "17 features over tp = 8" in (refusal(Layout(tp=8), profile_decoder(tiny, 256)) or "")
    assert refusal(Layout(tp=8), profile_decoder(dataclasses.replace(tiny, vocab=22), 256)) is None


def test_what_an_older_journal_holds_of_the_tensor_axis_is_read() -> None:
    profile = profile_decoder(CONFIG, 256)
    record = json.loads(json.dumps(pack_profile(profile)))
    assert unpack_profile(record) == profile
    record["tensor_limits"]["smallest_split"] = min(record["tensor_limits"].pop("splits"))
    limits = unpack_profile(record).tensor_limits
    assert limits is not None and limits.splits == (64,)
