"""The collector rests while a process imports and plans, and is as it was afterwards, whatever happened."""

from __future__ import annotations

import gc
import weakref

import pytest

from paceline.cluster.here.collector import collected_once


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_waits_for_the_end_of_the_block() -> None:
    with collected_once():
        seen = weakref.ref(Loop())
        assert not gc.isenabled() and seen() is not None
        with collected_once():  # within another one nothing is collected
            pass
        assert seen() is not None and not gc.isenabled()
    assert seen() is None and gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(KeyError), collected_once():
        raise KeyError
    assert gc.isenabled()
