"""A folder that all ranks of a proof write to, and that ends with the proof."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.run.process.world import World


@contextlib.contextmanager
def shared_folder(world: World, what: str) -> Iterator[Path]:
    """Give all ranks a folder for `what`, for as long as all of them go on. Every rank calls it."""
    folder = world.share(tempfile.mkdtemp(prefix=f"paceline-{what}-") if world.is_first else "")
    try:
        yield Path(folder)
        world.wait()
    finally:
        if world.is_first:
            shutil.rmtree(folder, ignore_errors=True)
