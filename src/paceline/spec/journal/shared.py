"""What other runs of a folder have held that share a tag: a budget may be of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.spec.journal.held import HeldTime, held_in
from paceline.spec.journal.kinds import RunStarted
from paceline.spec.journal.reading import read_kind


def held_by_others(run_dir: Path, tags: Mapping[str, Any], tag: str) -> list[HeldTime]:
    """Return the held time of the runs beside a run's directory whose newest start has the same value of a tag.

    Runs that cannot be read, or have begun nothing yet, have held none.
    """
    found: list[HeldTime] = []
    own = run_dir.resolve()
    for journal in sorted(own.parent.glob("*/journal")):
        if journal.parent == own:
            continue
        try:
            starts = list(read_kind(journal.parent, RunStarted))
            if starts and _tag(starts[-1], tag) == str(tags.get(tag)):
                found += held_in(journal.parent)
        except OSError:  # it is removed meanwhile, or another user's
            continue
    return found


def _tag(start: RunStarted, tag: str) -> str | None:
    run = start.spec.get("run")
    tags = run.get("tags") if isinstance(run, Mapping) else None
    return str(tags[tag]) if isinstance(tags, Mapping) and tag in tags else None
