"""Which kind of data a source names: told by its scheme, its suffix, or what lies there."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import DataError
from paceline.spec.import_paths import names_object, scheme_of
from paceline.task.data.sources.files import kind_of
from paceline.task.data.sources.shards.folder import INDEX
from paceline.task.data.storage.bytes import beside
from paceline.task.data.storage.remote import RemoteFiles, is_remote

TABLE_KINDS = ("csv", "tsv")  # of a file or a folder that is a table whatever is in it
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
LOOKED_AT = 64  # files of a folder that say whether it holds images


def kind_of_source(source: str) -> tuple[str, str]:
    """Return the kind of a source, and its path without a scheme.

    Kinds are "text", "table", "hf", "shards", "megatron", "images" and "object".

    Raises DataError where remote storage does not say what is there.
    """
    scheme, rest = scheme_of(source)
    if scheme:
        return scheme, rest
    if names_object(source):
        return "object", source
    if source in ("", "stdlib"):
        return "text", source
    if is_remote(source):
        return _kind_of_remote(source), source
    path = Path(source).expanduser()
    return _kind_of_local(path), source


def _kind_of_remote(url: str) -> str:
    if url.endswith((".idx", ".bin")):
        return "megatron"
    if url.endswith(".tar"):
        return "images"
    if kind_of(url) in TABLE_KINDS:
        return "table"
    if Path(url).suffix:
        return "text"
    return "shards" if RemoteFiles(url).exists(beside(url, INDEX)) else "text"


def _kind_of_local(path: Path) -> str:
    try:
        if path.is_dir():
            if (path / INDEX).is_file():
                return "shards"
            return "images" if _holds_images(path) else "table" if _holds_tables(path) else "text"
        stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
        if all(stem.with_name(stem.name + suffix).is_file() for suffix in (".idx", ".bin")):
            return "megatron"
    except OSError as error:
        raise DataError(f"'{path}' cannot be read", error.strerror or str(error), "check its permissions") from error
    return "images" if path.suffix == ".tar" else "table" if kind_of(path.name) in TABLE_KINDS else "text"


def _holds_images(folder: Path) -> bool:
    """Return whether the first files below a folder are images or tar files, all of them."""
    seen = 0
    for path in sorted(folder.iterdir())[:LOOKED_AT]:
        if path.name.startswith("."):
            continue
        files = sorted(path.iterdir())[:LOOKED_AT] if path.is_dir() else [path]
        for file in files:
            if file.name.startswith(".") or file.is_dir():
                continue
            if file.suffix.lower() not in (*IMAGE_SUFFIXES, ".tar"):
                return False
            seen += 1
    return seen > 0


def _holds_tables(folder: Path) -> bool:
    """Return whether the files of a folder that are of a kind that is known are tables of CSV, all of them."""
    kinds = {kind_of(path.name) for path in sorted(folder.iterdir())[:LOOKED_AT] if not path.name.startswith(".")}
    return bool(kinds & {*TABLE_KINDS}) and kinds <= {*TABLE_KINDS, ""}
