"""The files of a corpus, as they are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PACKED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")  # what is unpacked on the way
SPLIT_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
               "val": "validation", "dev": "validation", "test": "test", "testing": "test"}  # fmt: skip


@dataclass(frozen=True)
class File:
    """One file: its path or URL, its name within the corpus, and what tells that it changed."""

    path: str
    name: str
    size: int
    mtime_ns: int
    held_out: bool | None = None  # as its name says; None where its documents are split by their hashes

    def decides(self) -> tuple[object, ...]:
        """Return what stands for the file's content and its use."""
        plain = (self.path, self.name, self.size, self.mtime_ns)
        return plain if self.held_out is None else (*plain, self.held_out)


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
    name: str = ""  # what holds them: the last part of a path, or a data set's name


def packed_suffix(name: str) -> str:
    """Return how a file is packed, by the end of its name: ".gz" and the like, "" where it is not."""
    return next((suffix for suffix in PACKED_SUFFIXES if name.lower().endswith(suffix)), "")


def unpacked_name(name: str) -> str:
    """Return a file's name in small letters, without what says how it is packed."""
    return name.lower().removesuffix(packed_suffix(name))


def split_of(name: str) -> str:
    """Return the split that a file's name says: "train", "validation" or "test", "" where it says none.

    `train.csv`, `train-00001-of-00002.parquet` and `train/data-0.arrow` are of the split train.
    """
    for part in reversed(name.lower().split("/")):
        stem = part.partition(".")[0].replace("_", "-").partition("-")[0]
        if stem in SPLIT_NAMES:
            return SPLIT_NAMES[stem]
    return ""


def by_named_splits(files: Sequence[File]) -> tuple[tuple[File, ...], list[str]]:
    """Return files that are called after splits as those splits, without those for a test, and the names of the latter.

    They are where every file's name says a split and one of them that for training; else nothing changes.
    """
    splits = [split_of(file.name) for file in files]
    if "" in splits or "train" not in splits:
        return tuple(files), []
    says = "validation" in splits
    kept = tuple(replace(file, held_out=split == "validation") if says else file
                 for file, split in zip(files, splits, strict=True) if split != "test")  # fmt: skip
    return kept, [file.name for file, split in zip(files, splits, strict=True) if split == "test"]


def is_cache(file: File) -> bool:
    """Return whether a file is one that the package `datasets` made of the others of its folder, as `map` does."""
    return file.name.rpartition("/")[2].startswith("cache-")
