"""Python's collector of garbage while a process imports and plans: what they make stays, and is not looked through."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Collect no garbage within the block; what was made in it is old afterwards.

    Importing torch and transformers makes hundreds of thousands of objects, of which next to none is garbage. The
    collector looks through them again and again meanwhile, which takes a fifth of the time of the imports, or a tenth
    if it does so once at the end. As old objects they wait for the next collection of all: training makes one after its
    first step (run/loop/between_steps.py).
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _make_old()
            gc.enable()


def keep_for_good() -> None:
    """Keep all that there is from the collector, as a process does before it forks: who is forked knows that it did."""
    gc.freeze()
    _KEPT.append(True)


def _make_old() -> None:
    """Have all objects count as old without looking at any of them."""
    if _keeps_some():  # these stay so
        gc.collect(1)
        return
    gc.freeze()
    gc.unfreeze()


def _keeps_some() -> bool:
    """Return whether objects are kept from the collector, in this process or since before it was forked.

    Python goes through all of them to count them, 30 to 90 ms where torch is imported: once is enough.
    """
    if not _KEPT and gc.get_freeze_count():
        _KEPT.append(True)
    return bool(_KEPT)


_KEPT: list[bool] = []  # filled where some are kept, which nobody lets go again
