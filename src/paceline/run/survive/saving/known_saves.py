"""What ranks tell the next world of saves: the newest checkpoint on disk, and when the next checkpoint is due."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.run.process.world import World
from paceline.run.survive.saving.pace import KnownPace
from paceline.spec.journal.kinds import CheckpointRecord
from paceline.spec.journal.reading import read_kind, reading_of


@dataclass(frozen=True)
class KnownSave:
    """What a rank knows of its run's saves, for the world after this one.

    `path` is a checkpoint on disk that is known to be whole, if there is one, `seconds` are those of the last save to
    disk, and `published` is how many were published there so far: a rank that knows of more has heard of a later one.
    """

    path: Path | None = None
    seconds: float = 0.0
    published: int = 0
    failures: int = 0  # saves to disk that failed in a row
    pace: KnownPace = field(default_factory=KnownPace)
    is_beside: bool | None = None  # whether saves go on beside training, where that was for the run to decide
    has_memory: bool | None = None  # whether the memory takes checkpoints, where that is known
    is_pressed: bool = False  # whether it was told that a save waits for the one before

    @property
    def is_anew(self) -> bool:
        """Whether the rank has been in no world before."""
        return self == KnownSave(seconds=self.seconds)


def agreed_save(own: KnownSave, restored: Path | None, world: World) -> KnownSave:
    """Return what the ranks of a new world go by, who do different things where one knows of no checkpoint.

    That is what those know who have heard of the newest one: a world may be lost before all have. `own` is what this
    rank brings from the world before, nothing where it has come anew; `restored` is the checkpoint on disk from which
    all of them go on, if they do. Every rank calls it.
    """
    (most,) = world.maximum([float(own.published)])
    known: KnownSave = world.first_told(None if own.is_anew or own.published < most else own) or own
    return known if restored is None else replace(known, path=restored)


def seconds_on_record(run_dir: Path) -> float:
    """Return how long the last save to disk took of which the journal tells, 0 where it tells of none."""
    found = 0.0
    with reading_of(run_dir):
        for record in read_kind(run_dir, CheckpointRecord):
            if record.tier is None and record.seconds is not None:
                found = record.seconds
    return found
