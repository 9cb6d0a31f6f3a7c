"""The collector rests while a process imports and plans, and is as it was afterwards, whatever happened."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from paceline.cluster.here import collector
from paceline.cluster.here.collector import collector_at_rest


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Note the generation of each collection."""
    seen: list[int] = []

    def note(phase: str, told: dict[str, int]) -> None:
        if phase == "start":
            seen.append(told["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Let go of what the tests' own process keeps from the collector."""
    frozen, known = gc.get_freeze_count(), collector._KEPT.copy()
    gc.unfreeze()
    collector._KEPT.clear()
    try:
        yield
    finally:
        collector._KEPT[:] = known
        if frozen:
            gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_a_block_makes_is_looked_through_neither_in_it_nor_at_its_end(collections: list[int]) -> None:
    gc.collect()
    collections.clear()
    with collector_at_rest():
        seen, kept = weakref.ref(Loop()), [[number] for number in range(50_000)]
        assert not gc.isenabled() and seen() is not None
        with collector_at_rest():  # within another one nothing changes
            pass
        assert not gc.isenabled()
        assert collections == []
    assert gc.isenabled()
    old, is_old = {id(each) for each in gc.get_objects(generation=2)}, [id(each) for each in kept]
    assert old.issuperset(is_old), "all that was made is old"
    assert max(collections, default=0) == 0, "at most what came since the block was looked through"
    gc.collect()
    assert seen() is None, "and garbage goes with the next collection of all"


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_keeps_from_the_collector_stays_kept(collections: list[int]) -> None:
    """A process that is to fork does: its children would copy what they look through."""
    kept = [Loop() for _ in range(1_000)]
    gc.freeze()
    with collector_at_rest():
        seen = weakref.ref(Loop())
    # not by their number: what is frozen and no longer used goes at any time
    assert {id(each) for each in kept}.isdisjoint(id(each) for each in gc.get_objects()), "nothing frozen was let go"
    assert seen() is None and 2 not in collections
    gc.unfreeze()
    assert {id(each) for each in kept}.issubset(id(each) for each in gc.get_objects()), "which is how one sees it"


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_kept_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count it takes 30 to 90 ms of a rank that was forked, which did so for each checkpoint that it loaded."""
    counted, count = list[int](), gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(count()) or counted[-1])
    for _ in range(2):
        with collector_at_rest():
            pass
    assert counted == [0, 0], "while nothing is kept that takes no time"
    gc.freeze()
    for _ in range(3):
        with collector_at_rest():
            pass
    assert len(counted) == 3 and counted[-1] > 0
    gc.unfreeze()
    collector._KEPT.clear()
    collector.keep_for_good()
    with collector_at_rest():
        pass
    assert len(counted) == 3, "who keeps it says so, to those that it forks too"
    gc.unfreeze()


def test_it_is_on_again_after_an_error() -> None:
    with pytest.raises(KeyError), collector_at_rest():
        raise KeyError
    assert gc.isenabled()


def test_what_the_user_has_chosen_stays() -> None:
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
