"""What has not changed since the last checkpoint is not written again: its file is linked into the next one.

Frozen weights, and the state of an optimizer that does not touch them, keep their values from checkpoint to checkpoint.
The second save finds out which, by the fingerprints of the parts, and writes them to a file of their own. As long as
they stay the same, every further checkpoint has a hard link to that file, made after it was read and found sound. So
each checkpoint is complete in its own folder, and removing one takes nothing from the others: the file system counts
links. Where it has none, or the file is damaged, the parts are written anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.checkpoint.files.read_back import verify_files
from paceline.checkpoint.manifest import FileEntry
from paceline.checkpoint.snapshot import Part
from paceline.errors import StorageError


@dataclass
class Unchanged:
    """What this rank knows of the last checkpoint in a folder: its parts, and the file of those that stayed the same.

    Ranks that hold a copy of a part come to the same answers, so that their indexes name the same file.
    """

    parts: frozenset[Part] = frozenset()  # with fingerprints
    still: frozenset[Part] = frozenset()  # of these, what this rank wrote to `name`, or linked
    folder: Path | None = None  # of the last checkpoint
    name: str = ""
    entry: FileEntry | None = None
    samples: dict[Part, bytes] = field(default_factory=dict, repr=False)  # first values of `parts`, by part without sum
    _next: tuple[frozenset[Part], frozenset[Part], str, FileEntry | None, dict[Part, bytes]] = field(
        default=(frozenset(), frozenset(), "", None, {}), repr=False
    )

    def forget(self) -> None:
        """Know of no last checkpoint: all is written anew."""
        self.parts, self.still, self.folder, self.name, self.entry = frozenset(), frozenset(), None, "", None
        self.samples = {}

    def may_be_still(self, part: Part, first: bytes) -> bool:
        """Return whether a part whose fingerprint is not known may have the values that it had in the last checkpoint.

        It has not where its first values are others.
        """
        return self.samples.get(part) == first

    def since_last(self, parts: Iterable[Part]) -> frozenset[Part]:
        """Return which of the parts have the values that they had in the last checkpoint."""
        return frozenset(part for part in parts if part.fingerprint is not None and part in self.parts)

    def link(self, still: frozenset[Part], target: Path) -> FileEntry | None:
        """Link the last checkpoint's file of exactly these parts to `target`; None where it must be written."""
        if self.folder is None or self.entry is None or not still or still != self.still:
            return None
        try:
            os.link(self.folder / self.name, target)
            verify_files(target.parent, {target.name: self.entry})
        except (OSError, StorageError):  # no links here, or it is gone or damaged
            target.unlink(missing_ok=True)
            return None
        return self.entry

    def wrote(
        self, parts: Iterable[Part], still: frozenset[Part], name: str, entry: FileEntry | None,
        samples: dict[Part, bytes],
    ) -> None:  # fmt: skip
        """Take note of what the save under way holds; it counts from `published` on."""
        self._next = (frozenset(parts), still, name, entry, samples)

    def published(self, folder: Path) -> None:
        """Take note that this checkpoint is the last one now."""
        self.parts, self.still, self.name, self.entry, self.samples = self._next
        self.folder = folder
