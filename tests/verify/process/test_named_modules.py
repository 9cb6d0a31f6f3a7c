"""What a proof imports of the user's before its ranks begin, and what only looks like a module's object."""

from __future__ import annotations

import dataclasses

import pytest
from tests_shared import decoder_task

from paceline.errors import ConfigError
from paceline.spec.task import DataSpec
from paceline.verify.process.worker import _load_named, _named_sources


@pytest.mark.parametrize("kind", ["table", "text", "shards", "megatron", "images"])
def test_a_folder_with_its_kind_before_it_is_no_module(kind: str) -> None:
    """`source = "table"` of a folder of that name is settled as `table:table`, which reads as `module:object`."""
    folder = DataSpec(f"{kind}:people", seq_len=8)
    assert _named_sources(folder) == {}
    assert _named_sources(DataSpec("people:rows", seq_len=8)) == {"task.data.source": "people:rows"}
    _load_named(dataclasses.replace(decoder_task(), data=folder))  # it raised: no module is called so


def test_a_module_that_is_not_there_fails_before_any_rank_waits() -> None:
    with pytest.raises(ConfigError, match=r"task\.data\.source = 'people_of_nobody:rows'"):
        _load_named(dataclasses.replace(decoder_task(), data=DataSpec("people_of_nobody:rows", seq_len=8)))
