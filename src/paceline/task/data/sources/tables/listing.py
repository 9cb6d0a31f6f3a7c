"""Which files a table is made of: one, those of a folder, or a data set of Hugging Face, in the order of names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.errors import DataError
from paceline.spec.import_paths import scheme_of
from paceline.spec.task import DataSpec
from paceline.task.data.sources.files import NOT_READ, kind_of, list_files
from paceline.task.data.sources.listing import CorpusFiles, Skipped
from paceline.task.data.sources.tables.records import split_of

TABLE_KINDS = ("csv", "tsv", "jsonl", "parquet", "arrow")


def list_table(data: DataSpec) -> CorpusFiles:
    """Return the files of the table that `data.source` names. Raises DataError where it holds none.

    Of a folder whose files are called after splits those for testing are left alone.
    """
    path = inner_path(data.source)
    scheme, name = scheme_of(path)
    folder = Path(name).expanduser()
    if scheme == "hf" and folder.is_dir() and not any(folder.glob("*.arrow")):
        path = name  # of several splits, each in a folder of its own
    found = list_files(dataclasses.replace(data, source=path), TABLE_KINDS)
    if found.kind == "file" and kind_of(found.files[0].name) not in TABLE_KINDS:
        raise DataError(
            f"'{path}' is no table", f"tables end in {', '.join(f'.{kind}' for kind in TABLE_KINDS)}",
            "another name, or text: before it, which reads it as a text",
        )  # fmt: skip
    what = found.what.replace("text in ", "").replace("text of ", "")
    several = found.kind == "folder"
    kept = tuple(file for file in found.files if not (several and split_of(file.name) == "test"))
    if not kept:
        raise DataError(
            f"'{path}' holds nothing to train on", f"all of its tables are called after a test, such as "
            f"{found.files[0].name}", "name the file itself, or rename it",
        )  # fmt: skip
    left = [file.name for file in found.files if file not in kept]
    skipped = (*found.skipped, Skipped(f"{NOT_READ} for a test", len(left), left[0])) if left else found.skipped
    return CorpusFiles(what, kept, found.kind, skipped)


def inner_path(source: str) -> str:
    """Return a table's source without the word `table:`."""
    scheme, rest = scheme_of(source)
    return rest if scheme == "table" else source
