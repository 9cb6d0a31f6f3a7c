"""Which kind of data a source names: told by its scheme, its suffix, or what lies there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.errors import DataError
from paceline.spec.import_paths import names_object, scheme_of
from paceline.task.data.listed_once import listed
from paceline.task.data.sources.files import is_about_data, kind_of
from paceline.task.data.storage.remote import RemoteFiles, is_remote, name_of

TOKEN_KINDS = ("shards", "megatron")  # of sources whose tokens are made already
TABLE_KINDS = ("csv", "tsv", "json")  # of a file or a folder that is a table whatever is in it
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"
)  # fmt: skip
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
        return listed(("kind", source), lambda: _kind_of_remote(source)), source
    path = Path(source).expanduser()
    return listed(("kind", str(path)), lambda: _kind_of_local(path)), source


def _kind_of_remote(url: str) -> str:
    name = name_of(url)
    if name.endswith((".idx", ".bin")):
        return "megatron"
    if name.endswith(".tar"):
        return "images"
    if kind_of(name) in TABLE_KINDS:
        return "table"
    if Path(name).suffix:
        return "text"
    from paceline.task.data.sources.shards.folder import INDEX  # with readers of tokens, which few sources are
    from paceline.task.data.storage.bytes import beside

    return "shards" if RemoteFiles(url).exists(beside(url, INDEX)) else "text"


def _kind_of_local(path: Path) -> str:
    try:
        if path.is_dir():
            from paceline.task.data.sources.shards.folder import INDEX

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
    """Return whether the first files below a folder are images or tar files.

    What tells of them does not count, nor files of no kind that is known; nor do a few others, such as labels.csv,
    beside folders of images.
    """
    images, others, folders = 0, 0, set()
    for file in _below(folder, 2):
        if file.suffix.lower() in (*IMAGE_SUFFIXES, ".tar"):
            images += 1
            folders.add(file.parent)
        elif kind_of(file.name) and not is_about_data(file.name):
            others += 1
    return images > 0 and (not others or (len(folders - {folder}) > 1 and 4 * others <= images))


def _below(folder: Path, levels: int) -> Iterator[Path]:
    """Yield the first files of a folder and of its folders, so many levels down, but hidden ones."""
    for path in sorted(folder.iterdir())[:LOOKED_AT]:
        if path.name.startswith("."):
            continue
        if not path.is_dir():
            yield path
        elif levels:
            yield from _below(path, levels - 1)


def _holds_tables(folder: Path) -> bool:
    """Return whether the files of a folder that are of a kind that is known are tables of CSV or JSON, all of them.

    Those of its folders count, such as train/ and validation/. What tells of the data, such as README.md, does not.
    """
    kinds = {kind_of(file.name) for file in _below(folder, 1) if not is_about_data(file.name)}
    return bool(kinds & {*TABLE_KINDS}) and kinds <= {*TABLE_KINDS, ""}
