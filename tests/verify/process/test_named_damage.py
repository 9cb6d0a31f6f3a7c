"""A proof whose samples have nothing to learn from names damage, where it has met any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests_shared import VOCAB

from paceline.errors import DataError, NothingToLearn
from paceline.verify.process.worker import _naming_damage
from paceline.verify.twin.fold import FoldedSource

NOTHING = NothingToLearn("the samples that the proof reads for step 1 have no item to learn from", "", "")


def source_of(**more: Any) -> Any:
    return SimpleNamespace(samples=9, items_per_sample=1, unit="tokens", vocab=VOCAB, fingerprint="a source", **more)


BAD = {3: "a.shard is damaged", 5: "a.shard is damaged too"}


@pytest.mark.parametrize(
    "source",
    [source_of(damaged=BAD), source_of(sources=[source_of(), source_of(damaged=BAD)])],
    ids=["one source", "of a mixture"],
)
@pytest.mark.parametrize("folded", [False, True])
def test_damage_is_named_whatever_the_samples_come_from(source: Any, folded: bool) -> None:
    """Of a mixture it was told as labels that are masked, with exit code 6."""
    with pytest.raises(DataError) as raised, _naming_damage(FoldedSource(source, 7) if folded else source):
        raise NOTHING
    assert raised.value.what == f"{NOTHING.what}: of all that it has read, 2 are damaged and left out"
    assert raised.value.because == "the first: a.shard is damaged"


def test_samples_without_damage_that_teach_nothing_are_told_as_that() -> None:
    with pytest.raises(NothingToLearn) as raised, _naming_damage(FoldedSource(source_of(), 7)):
        raise NOTHING
    assert raised.value is NOTHING
