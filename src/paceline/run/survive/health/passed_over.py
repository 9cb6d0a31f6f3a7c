"""What a run passes over: samples that it has gone back for, kept in the run's directory beside the checkpoints.

`RUN/passed_over.json` is written before the run goes back, so that a run that is killed then passes over the same
samples. Checkpoints hold the position in the data; what lies between two positions and is not in this file was trained
on, once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.durable import write_text
from paceline.errors import StorageError
from paceline.run.process.world import World

NAME = "passed_over.json"


@dataclass(frozen=True)
class Passage:
    """Samples of one global batch that are passed over, by position, and the step that was to learn from them."""

    step: int
    position: int
    samples: int


class PassedOver:
    """The passages of a run, alike on all ranks."""

    def __init__(self, run_dir: Path, world: World) -> None:
        """Every rank calls it: rank 0 reads the file. Raises StorageError for one that is not readable."""
        self._path, self._world = run_dir / NAME, world
        told = world.share(_read(self._path) if world.is_first else None)
        self.passages = [Passage(**each) for each in told]

    def position_from(self, position: int) -> int:
        """Return where the next batch begins that is trained on, from a position on."""
        ends = {each.position: each.position + each.samples for each in self.passages}
        while position in ends:
            position = ends[position]
        return position

    def add(self, passage: Passage) -> None:
        """Pass over a batch from now on. Every rank calls it; it is on disk when all return. Raises StorageError."""
        self.passages.append(passage)
        failed = ""
        if self._world.is_first:
            try:
                write_text(self._path, json.dumps([asdict(each) for each in self.passages]))
            except OSError as error:
                failed = str(error)
        if failed := self._world.share(failed):
            raise StorageError(f"cannot write {self._path}", failed, "free space and start again")


def _read(path: Path) -> list[dict[str, int]]:
    if not path.exists():
        return []
    try:
        return [asdict(Passage(**each)) for each in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(
            f"cannot read {path}", str(error), "restore it: without it the run would train on samples that it left out"
        ) from error
