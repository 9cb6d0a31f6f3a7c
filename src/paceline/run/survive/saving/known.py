"""The newest checkpoint on disk as all ranks of a world know it, and how long a save there took last."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paceline.run.process.world import World
from paceline.spec.journal.kinds import CheckpointRecord
from paceline.spec.journal.reading import read_kind, reading_of


@dataclass(frozen=True)
class KnownSave:
    """A checkpoint on disk that is known to be whole, if there is one, and the seconds of the last save to disk."""

    path: Path | None = None
    seconds: float = 0.0


def agreed_save(own: KnownSave, restored: Path | None, world: World) -> KnownSave:
    """Return what the ranks of a new world go by, who do different things where one knows of no checkpoint.

    `own` is what this rank brings from the world before, nothing where it has come anew; `restored` is the checkpoint
    on disk from which all of them go on, if they do. Every rank calls it.
    """
    known: KnownSave = world.first_told(own if own.path else None) or own
    return known if restored is None else replace(known, path=restored)


def seconds_on_record(run_dir: Path) -> float:
    """Return how long the last save to disk took of which the journal tells, 0 where it tells of none."""
    found = 0.0
    with reading_of(run_dir):
        for record in read_kind(run_dir, CheckpointRecord):
            if record.tier is None and record.seconds is not None:
                found = record.seconds
    return found
