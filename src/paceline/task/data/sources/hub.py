"""Data sets of Hugging Face: the Arrow files that the package `datasets` keeps of them, or wrote to a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import DataError, MissingExtra
from paceline.task.data.sources.listing import CorpusFiles, File, is_cache
from paceline.task.data.sources.reading.arrow import arrow_rows
from paceline.task.data.storage.bytes import named_inside


def list_hub(name: str, arguments: Mapping[str, Any]) -> CorpusFiles:
    """Return the files of a data set in their order, and what they are for people.

    `name` is a folder that `save_to_disk` wrote, or a data set on the hub, which `datasets.load_dataset(name,
    **arguments)` downloads into its own cache. Raises DataError where it is neither, or has several splits.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        files = _saved(folder) or sorted(path for path in folder.glob("*.arrow") if not is_cache(_file(path)))
        if not files:
            splits = sorted(path.parent.name for path in folder.glob("*/*.arrow"))
            raise DataError(
                f"'{name}' holds no Arrow files",
                f"it has the splits {', '.join(dict.fromkeys(splits))}"
                if splits
                else "save_to_disk writes data-*.arrow",
                f'name one of them: "hf:{name}/{splits[0]}"' if splits else "check the path",
            )
        called = folder.resolve().name
        return CorpusFiles(f"text in {called}", tuple(map(_file, files)), "folder", name=called)
    found = _load(name, arguments)
    one = next(iter(found.values()), None) if isinstance(found, Mapping) else found
    if not hasattr(one, "cache_files"):  # nothing of a stream is on a disk
        raise DataError(
            f"'{name}' is a {type(found).__name__}", "the order of samples needs to reach any of them by its number",
            "leave streaming out of task.data.arguments",
        )  # fmt: skip
    if isinstance(found, Mapping):
        raise DataError(
            f"'{name}' has several splits", f"they are {', '.join(map(str, found))}",
            'name one of them: task.data.arguments = { split = "train" }',
        )  # fmt: skip
    return CorpusFiles(f"text of {name}", _files_of(found), "folder", name=name)


def _saved(folder: Path) -> list[Path]:
    """Return the files that `save_to_disk` says it wrote, none where it says nothing: others are of an older save.

    Raises DataError for one that is gone, and for files of which some rows are meant alone.
    """
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [str(each["filename"]) for each in state["_data_files"]]
        is_selection = bool(state.get("_indices_data_files"))
    except (OSError, ValueError, KeyError, TypeError):
        return []
    files = [Path(named_inside(str(folder), name)) for name in names]
    if is_selection:
        raise DataError(
            f"'{folder}' is a selection of the rows of its files", "an old version of datasets has saved it so",
            "load it with datasets and save it again",
        )  # fmt: skip
    if gone := [path.name for path in files if not path.is_file()]:
        raise DataError(f"'{folder}' lacks {gone[0]}", "its state.json names that file", "save or copy it again")
    return files


def _files_of(found: Any) -> tuple[File, ...]:
    """Return the files of a data set of the package, which hold its rows and no others.

    A part of one (split = "train[:10%]") names the files of the whole: its own rows are then written beside them, once,
    by the package, which finds them again at later starts.
    """
    paths, rows = _paths_and_rows(found)
    if rows != len(found):
        paths, rows = _paths_and_rows(found.flatten_indices())
    if rows == len(found):
        return tuple(map(_file, paths))
    raise DataError(
        "the data set cannot be read from its files",
        f"it has {len(found):,} rows, and its files have {rows:,}",
        "data.save_to_disk(PATH) writes them; name hf:PATH",
    )


def _paths_and_rows(found: Any) -> tuple[list[Path], int]:
    """Return the files of a data set, and how many rows they have: of which the heads of batches alone are read."""
    import pyarrow as arrow

    paths, rows = [Path(each["filename"]) for each in found.cache_files], 0
    for path in paths:
        try:
            with arrow.memory_map(str(path)) as mapped:
                rows += sum(batch.num_rows for batch in arrow_rows(mapped)[1])
        except (arrow.ArrowException, OSError) as error:
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{path} cannot be read", told, "remove it: the package makes it again") from error
    return paths, rows


def _load(name: str, arguments: Mapping[str, object]) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtra("datasets", "huggingface", f"the data set '{name}' of Hugging Face") from error
    try:
        return load_dataset(name, **arguments)
    except Exception as error:  # the package raises errors of its own, and those of its network
        raise DataError(
            f"'{name}' cannot be loaded", f"{type(error).__name__}: {error}",
            f"datasets.load_dataset('{name}') shows it; a folder that save_to_disk wrote is named hf:PATH",
        ) from error  # fmt: skip


def _file(path: Path) -> File:
    found = path.stat()
    return File(str(path.resolve()), path.name, found.st_size, found.st_mtime_ns)
