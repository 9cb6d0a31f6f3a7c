"""What a source names, listed once while a run is planned and begins: whoever asks again has what was found first.

Labels, facts, the trace of the model and training each ask which files there are, in one process, within seconds.
Before, between and during runs files may come and go: outside of such a block every look is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Found = TypeVar("Found")

_FOUND: ContextVar[dict[Hashable, Any] | None] = ContextVar("paceline_found", default=None)


@contextmanager
def listed_once() -> Iterator[None]:
    """List each source once within the block, as far as this thread asks. A block within another is a part of it."""
    if _FOUND.get() is not None:
        yield
        return
    token = _FOUND.set({})
    try:
        yield
    finally:
        _FOUND.reset(token)


def list_anew() -> None:
    """Forget what was found, and list sources anew from here on, within the block too: what follows may take days."""
    _FOUND.set(None)


def listed(key: Hashable, look: Callable[[], Found]) -> Found:
    """Return what `look` finds, or what it found before under that key; it is shared, so nobody changes it."""
    known = _FOUND.get()
    if known is None:
        return look()
    if key not in known:
        known[key] = look()
    found: Found = known[key]
    return found
