"""How the files of a corpus are parted among workers: by their sizes alone, so that the parts are always the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from paceline.spec.task import DataSpec
from paceline.task.data.sources.documents import Damaged, Document, read_documents, read_file, read_lines
from paceline.task.data.sources.files import kind_of
from paceline.task.data.sources.listing import CorpusFiles, File, packed_suffix

PART_BYTES = 64 * 2**20


@dataclass(frozen=True)
class CorpusPart:
    """Some files one after the other, or those lines of one JSONL file that begin in the bytes start..stop."""

    number: int
    files: tuple[File, ...]
    start: int = 0
    stop: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that are read for it."""
        return self.stop - self.start if self.stop else sum(file.size for file in self.files)


def parts_of(listing: CorpusFiles, part_bytes: int = PART_BYTES, is_whole: bool = False) -> list[CorpusPart]:
    """Return the parts in order: small files together, JSONL cut at lines, any other file whole.

    What `is_whole` is one part: of documents that stop after so many bytes, where follows from all that is read before.
    """
    if is_whole:
        return [CorpusPart(0, listing.files)]
    parts: list[CorpusPart] = []
    together: list[File] = []

    def close() -> None:
        if together:
            parts.append(CorpusPart(len(parts), tuple(together)))
            together.clear()

    for file in listing.files:
        if kind_of(file.name) == "jsonl" and not packed_suffix(file.name) and file.size > part_bytes:
            close()
            cuts = -(-file.size // part_bytes)
            bounds = [file.size * cut // cuts for cut in range(cuts + 1)]
            for start, stop in pairwise(bounds):
                parts.append(CorpusPart(len(parts), (file,), start, stop))
            continue
        if together and sum(each.size for each in together) + file.size > part_bytes:
            close()
        together.append(file)
    close()
    return parts


def documents_of(data: DataSpec, listing: CorpusFiles, part: CorpusPart, damaged: Damaged) -> Iterator[Document]:
    """Yield a part's documents in order, without empty ones."""
    if data.max_bytes:
        yield from read_documents(data, replace(listing, files=part.files), damaged)
        return
    if part.stop:
        found = read_lines(part.files[0], part.start, part.stop, data, damaged)
        yield from (document for document in found if document.text)
        return
    for file in part.files:
        yield from (document for document in read_file(data, listing, file, damaged) if document.text)
