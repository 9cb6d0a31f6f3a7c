"""Which files a table is made of: one, those of a folder, or a data set of Hugging Face, in the order of names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from paceline.errors import DataError
from paceline.spec.import_paths import scheme_of
from paceline.spec.task import DataSpec
from paceline.task.data.sources.files import NOT_READ, kind_of, list_files
from paceline.task.data.sources.listing import CorpusFiles, File, Skipped, split_of

TABLE_KINDS = ("csv", "tsv", "json", "jsonl", "parquet", "arrow")
# What programs write beside data about them, and no rows.
ABOUT_DATA = frozenset(("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json",
                        "metadata.json", "package.json", "index.json", "tokenizer.json"))  # fmt: skip


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
    several = found.kind == "folder"
    rows = tuple(file for file in found.files if not (several and _is_about_data(file.name, found.files)))
    kept = tuple(file for file in rows if not (several and split_of(file.name) == "test"))
    if not kept:
        raise DataError(
            f"'{path}' holds nothing to train on", f"all of its tables are called after a test, such as "
            f"{found.files[0].name}", "name the file itself, or rename it",
        )  # fmt: skip
    read = {file.name for file in rows}
    reasons = {": of another kind": [file for file in found.files if file.name not in read],
               " for a test": [file for file in rows if several and split_of(file.name) == "test"]}  # fmt: skip
    told = (Skipped(f"{NOT_READ}{why}", len(left), left[0].name) for why, left in reasons.items() if left)
    skipped = (*found.skipped, *told)
    return CorpusFiles(found.name or found.what, kept, found.kind, skipped, found.name)


def _is_about_data(name: str, files: tuple[File, ...]) -> bool:
    """Return whether a file of a folder tells of its data: by its name, or as JSON beside other tables."""
    if kind_of(name) != "json":
        return False
    return name.rpartition("/")[2] in ABOUT_DATA or any(kind_of(file.name) != "json" for file in files)


def inner_path(source: str) -> str:
    """Return a table's source without the word `table:`."""
    scheme, rest = scheme_of(source)
    return rest if scheme == "table" else source
