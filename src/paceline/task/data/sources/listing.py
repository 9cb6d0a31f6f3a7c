"""The files of a corpus, as they are listed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """One file: its path or URL, its name within the corpus, and what tells that it changed."""

    path: str
    name: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Skipped:
    """Files of a folder that are not read: why, how many, and the first of them."""

    why: str
    count: int
    first: str

    def __str__(self) -> str:
        return f"{self.count:,} {self.why} ({self.first}{', ...' if self.count > 1 else ''})"


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus, sorted by name. `what` names their content for people: "Python source"."""

    what: str
    files: tuple[File, ...]
    kind: str  # "stdlib", "file" or "folder"
    skipped: tuple[Skipped, ...] = ()
