"""Data sets of Hugging Face: the Arrow files that the package `datasets` keeps of them, or wrote to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import DataError, MissingExtra
from paceline.task.data.sources.listing import File, is_cache


def list_hub(name: str, arguments: Mapping[str, Any]) -> tuple[str, tuple[File, ...]]:
    """Return what the data are, for people, and their files in order.

    `name` is a folder that `save_to_disk` wrote, or a data set on the hub, which `datasets.load_dataset(name,
    **arguments)` downloads into its own cache. Raises DataError where it is neither, or has several splits.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        files = sorted(path for path in folder.glob("*.arrow") if not is_cache(_file(path)))
        if not files:
            splits = sorted(path.parent.name for path in folder.glob("*/*.arrow"))
            raise DataError(
                f"'{name}' holds no Arrow files",
                f"it has the splits {', '.join(dict.fromkeys(splits))}"
                if splits
                else "save_to_disk writes data-*.arrow",
                f'name one of them: "hf:{name}/{splits[0]}"' if splits else "check the path",
            )
        return f"text in {folder.resolve().name}", tuple(map(_file, files))
    found = _load(name, arguments)
    if not hasattr(found, "cache_files"):
        raise DataError(
            f"'{name}' has several splits", f"they are {', '.join(map(str, found))}",
            'name one of them: task.data.arguments = { split = "train" }',
        )  # fmt: skip
    return f"text of {name}", tuple(_file(Path(each["filename"])) for each in found.cache_files)


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
