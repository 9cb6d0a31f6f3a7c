"""Python's collector of garbage while a process imports and plans: what they make stays, and is looked through once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected_once() -> Iterator[None]:
    """Collect no garbage within the block, and once at its end.

    Importing torch and transformers makes hundreds of thousands of objects, of which next to none is garbage. The
    collector looks through them again and again meanwhile, which takes a fifth of the time of the imports.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            gc.collect(1)  # what is new: the oldest generation was looked through before
