"""The lists of files of a large world's checkpoint, written by one process as its ranks would."""

from __future__ import annotations

import itertools
from pathlib import Path

from paceline.checkpoint.files.flushes import Flushes
from paceline.checkpoint.manifest import (
    FileEntry,
    encode_list,
    files_of,
    list_counts,
    list_name,
    lists_in_a_list,
    ranks_in_a_list,
)
from paceline.checkpoint.shards import write_file


def write_lists(folder: Path, files: dict[str, FileEntry], ranks: int, flushes: Flushes) -> int:
    """Write the lists of files, which take the place of these in `files`; return the length of the longest one."""
    of_a_list, of_lists = ranks_in_a_list(ranks), lists_in_a_list(ranks)
    longest = 0

    def write(name: str, names: list[str]) -> None:
        nonlocal longest
        content = encode_list({each: files.pop(each) for each in names if each in files})
        files[name] = write_file(folder / name, content, flushes)
        longest = max(longest, len(content))

    if not of_a_list:
        return 0
    counts = list_counts(ranks, of_a_list, of_lists)
    for number in range(counts[0]):
        its_ranks = range(number * of_a_list, min((number + 1) * of_a_list, ranks))
        write(list_name(number), [name for rank in its_ranks for name in files_of(rank, ranks)])
    for level, (below, count) in enumerate(itertools.pairwise(counts), 1):
        for number in range(count):
            its_lists = range(number * of_lists, min((number + 1) * of_lists, below))
            write(list_name(number, level), [list_name(each, level - 1) for each in its_lists])
    return longest
