"""Which files a corpus is made of: the standard library, one file, or a folder, local or remote, in a fixed order."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import stat
import sysconfig
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from paceline.errors import ConfigError, DataError, suggestion
from paceline.spec.import_paths import scheme_of
from paceline.spec.task import DataSpec
from paceline.task.data.listed_once import listed
from paceline.task.data.sources.hub import list_hub
from paceline.task.data.sources.listing import (
    PACKED_SUFFIXES,
    CorpusFiles,
    File,
    Skipped,
    by_named_splits,
    is_cache,
    unpacked_name,
)
from paceline.task.data.storage.remote import RemoteFile, RemoteFiles, is_remote, name_of

NAMED_SOURCES = ("stdlib", "digits")
TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js",
     ".ts", ".go", ".rs", ".rb", ".sh", ".sql", ".html", ".css", ".toml", ".yaml", ".yml")
)  # fmt: skip
TABLE_SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".json": "json"}
JSONL_SUFFIXES = frozenset((".jsonl", ".ndjson"))
PARQUET_SUFFIXES = frozenset((".parquet",))
ARROW_SUFFIXES = frozenset((".arrow", ".feather", ".ipc"))
ROW_KINDS = ("jsonl", "parquet", "arrow")  # of files that hold many documents
TEXT_KINDS = ("text", "jsonl", "parquet", "arrow")  # a table of CSV is never taken for prose
NOT_READ = "not read"
ABOUT_DATA = ("readme", "license", "licence", "citation", "notice")  # how files begin that tell of the data beside them
COMPRESSED = {".tar.gz": "gunzip", ".tar.bz2": "bunzip2", ".tar.xz": "unxz", ".tar.zst": "unzstd", ".tgz": "gunzip",
              ".zip": "unzip", ".7z": "7z x", ".rar": "unrar x", ".lz4": "unlz4"}  # fmt: skip
OTHER_KINDS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), ("a spreadsheet", "save it as CSV, in UTF-8")),
    **dict.fromkeys((".pdf", ".docx", ".doc", ".odt", ".rtf"), ("a document of an office program", "save it as text")),
    **dict.fromkeys((".pkl", ".pickle", ".npy", ".npz", ".pt", ".h5", ".hdf5", ".db", ".sqlite"),
                    ("a file of a program", "write it as CSV, JSONL or Parquet, or name a data set of your own"
                     " (module:factory)")),
}  # fmt: skip
NOT_STDLIB = frozenset(("site-packages", "dist-packages"))


def kind_of(name: str) -> str:
    """Return "text", "csv", "tsv", "json", "jsonl", "parquet", "arrow", or "" for a kind that is not known.

    How it is packed does not count.
    """
    suffix = Path(unpacked_name(name)).suffix
    if suffix in TABLE_SUFFIXES:
        return TABLE_SUFFIXES[suffix]
    if suffix in JSONL_SUFFIXES:
        return "jsonl"
    if suffix in PARQUET_SUFFIXES:
        return "parquet"
    if suffix in ARROW_SUFFIXES:
        return "arrow"
    return "text" if suffix in TEXT_SUFFIXES else ""


def list_files(data: DataSpec, kinds: Collection[str] = TEXT_KINDS) -> CorpusFiles:
    """Return the files that `data.source` names. Reads folders, not files.

    Of a folder those of some `kinds` are read, and what is not is told. Raises DataError for a path that is not there,
    a folder without readable files, or one that cannot be listed.
    """
    asked = ("files", data.source, tuple(data.include), repr(data.arguments), tuple(sorted(kinds)))
    return listed(asked, lambda: _list_files(data, kinds))


def list_undivided(data: DataSpec) -> CorpusFiles:
    """Return `list_files`, for who writes all documents into one file: what is held out would be trained on there.

    Raises ConfigError where a file is held out by its name.
    """
    listing = list_files(data)
    held_out = [file.name for file in listing.files if file.held_out]
    if held_out:
        raise ConfigError(
            f"'{data.source}' holds out {held_out[0]}, as its name says",
            "documents of all files are written into one, which would be trained on",
            'those for training alone, such as --set task.data.include=["train*"]',
        )
    return listing


def _list_files(data: DataSpec, kinds: Collection[str]) -> CorpusFiles:
    if data.source == "stdlib":
        return _list_stdlib(data)
    if not data.source:
        raise DataError(
            "the data source is empty", "task.data.source names no file", "'stdlib', or '.' for this folder"
        )
    scheme, name = scheme_of(data.source)
    if scheme == "hf":
        return list_hub(name, data.arguments)
    if is_remote(name):
        return _list_remote(data, name, kinds)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _list_folder(data, path, kinds)
        found = path.stat()
    except FileNotFoundError as error:
        raise _not_there(data.source, path) from error
    except OSError as error:
        raise DataError(
            f"'{data.source}' cannot be read", error.strerror or str(error), "check its permissions"
        ) from error
    _refuse_other_kind(path)
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"'{data.source}' is no file", f"it is {_mode_kind(found.st_mode)}, and data are read more than once",
            "write what comes out of it to a file",
        )  # fmt: skip
    file = File(str(path.resolve()), path.name, found.st_size, found.st_mtime_ns)
    return CorpusFiles(f"text in {path.name}", (file,), "file", name=path.name)


def _refuse_other_kind(path: Path) -> None:
    """Raise DataError for a file that its name says is no text: a spreadsheet, or packed by another program."""
    packed = next((suffix for suffix in COMPRESSED if path.name.lower().endswith(suffix)), "")
    if packed:
        known = ", ".join(PACKED_SUFFIXES)
        because = f"{known} are unpacked on the way, {packed} is not"
        raise DataError(f"'{path}' is packed", because, f"unpack it: {COMPRESSED[packed]} '{path}'")
    suffix = Path(unpacked_name(path.name)).suffix
    if suffix in OTHER_KINDS:
        what, hint = OTHER_KINDS[suffix]
        raise DataError(f"'{path}' cannot be read", f"it is {what}", hint)


def is_about_data(name: str) -> bool:
    """Return whether a file tells of the data beside it, as README.md and LICENSE do."""
    return name.rpartition("/")[2].lower().startswith(ABOUT_DATA)


def _list_stdlib(data: DataSpec) -> CorpusFiles:
    """Return the sources of the running Python's standard library, its tests included, packages installed later not."""
    root = Path(sysconfig.get_path("stdlib"))
    wanted = wanted_by(data.include, lambda name: True)
    files = sorted(
        (file for file in walk_files(root, NOT_STDLIB) if file.name.endswith(".py") and wanted(file.name)),
        key=lambda file: file.name,
    )
    if not files:
        why = f"no file in {root} matches include = {list(data.include)}" if data.include else f"{root} has none"
        raise DataError("the standard library has no Python sources", why, "name a file or a folder as the data source")
    return CorpusFiles("Python source", tuple(files), "stdlib")


def _list_folder(data: DataSpec, root: Path, kinds: Collection[str]) -> CorpusFiles:
    odd: dict[str, list[str]] = {}
    seen = sorted(walk_files(root, frozenset(), odd), key=lambda file: file.name)
    return _chosen(data, seen, root.resolve().name or str(root), kinds, odd)


def _list_remote(data: DataSpec, url: str, kinds: Collection[str]) -> CorpusFiles:
    files, name = RemoteFiles(url), name_of(url)
    if kind_of(name) or not files.is_folder():
        return CorpusFiles(f"text in {name}", (_remote(files.file()),), "file", name=name)
    return _chosen(data, [_remote(file) for file in files.below()], name, kinds, {})


def _remote(file: RemoteFile) -> File:
    return File(file.url, file.name, file.size, int(file.version, 16))


def _chosen(
    data: DataSpec, seen: list[File], name: str, kinds: Collection[str], odd: dict[str, list[str]]
) -> CorpusFiles:
    """Return those files of a folder that are wanted, in their order. Raises DataError where there are none.

    `odd` are the names of entries that are no files, by what they are.
    """
    wanted = wanted_by(data.include, lambda name: kind_of(name) in kinds)
    files = tuple(file for file in seen if wanted(file.name) and not (kind_of(file.name) == "arrow" and is_cache(file)))
    about = {file.name for file in files if is_about_data(file.name) and kind_of(file.name) == "text"}
    if not data.include and any(kind_of(file.name) not in ("text", "") for file in files):
        files = tuple(file for file in files if file.name not in about)  # README.md beside shards of Parquet
    if not files:
        suffixes = TEXT_SUFFIXES | JSONL_SUFFIXES | PARQUET_SUFFIXES | ARROW_SUFFIXES
        known = " ".join(sorted({*TABLE_SUFFIXES, *suffixes} - (TEXT_SUFFIXES if "text" not in kinds else set())))
        fix = 'name patterns to read: include = ["*.ext"]'
        if not seen:
            why, fix = "the folder holds no files (hidden ones do not count)", "a folder with data in it"
        elif data.include:
            why = f"none of its {len(seen):,} files matches include = {list(data.include)}, such as {seen[0].name}"
        else:
            why = f"none of its {len(seen):,} files is of a known kind, such as {seen[0].name}; known are {known}"
        raise DataError(f"'{data.source}' holds no documents", why, fix)
    python = all(file.name.endswith(".py") for file in files)
    read = {file.name for file in files}
    left = [file.name for file in seen if file.name not in read]
    why = f"{NOT_READ}: include names others" if data.include else f"{NOT_READ}: of another kind"
    tests: list[str] = []
    if not data.include and "text" in kinds and all(kind_of(file.name) in ROW_KINDS for file in files):
        files, tests = by_named_splits(files)
    told = {why: left, f"{NOT_READ} for a test": tests}
    skipped = skipped_files({why: names for why, names in told.items() if names}, odd)
    what = f"Python source in {name}" if python else f"text in {name}"
    return CorpusFiles(what, files, "folder", skipped, name)


def skipped_files(left: dict[str, list[str]], odd: dict[str, list[str]]) -> tuple[Skipped, ...]:
    """Return what is told of entries that are not read: files by the reason, and what are no files by what they are."""
    told = {**left, **{f"{NOT_READ}: {what}": names for what, names in sorted(odd.items())}}
    return tuple(Skipped(why, len(names), min(names)) for why, names in told.items())


def wanted_by(include: tuple[str, ...], otherwise: Callable[[str], bool]) -> Callable[[str], bool]:
    """Return the test of a name: any `include` pattern (one with a slash is held against the path), or `otherwise`."""
    if not include:
        return otherwise

    def matches(name: str) -> bool:
        last = name.rpartition("/")[2]
        return any(fnmatch.fnmatchcase(name if "/" in pattern else last, pattern) for pattern in include)

    return matches


def walk_files(root: Path, skip: frozenset[str], odd: dict[str, list[str]] | None = None) -> Iterator[File]:
    """Yield every file below `root`, but hidden ones, `__pycache__`, what `skip` names, and linked folders.

    Names of links to nothing, pipes and the like are added to `odd`, by what they are.
    """
    pending = [(str(root), "")]
    while pending:
        folder, prefix = pending.pop()
        with _listed(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name == "__pycache__" or entry.name in skip:
                    continue
                if entry.is_symlink() and not os.path.exists(entry.path):  # noqa: PTH110 (as entries are read)
                    if odd is not None:  # a link to nothing, or in a circle
                        odd.setdefault("a link to nothing", []).append(prefix + entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, f"{prefix}{entry.name}/"))
                elif entry.is_file():
                    found = entry.stat()
                    path = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                    yield File(path, prefix + entry.name, found.st_size, found.st_mtime_ns)
                elif odd is not None:
                    odd.setdefault(_odd_kind(entry), []).append(prefix + entry.name)


@contextlib.contextmanager
def _listed(folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
    """Open what a folder lists. Raises DataError where the folder, or something that it lists, cannot be looked at."""
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise DataError(
            f"folder '{folder}' cannot be listed", error.strerror or str(error), "check its permissions"
        ) from error


def _odd_kind(entry: os.DirEntry[str]) -> str:
    """Return what an entry is that is neither a file nor a folder of its own."""
    if entry.is_symlink():
        return "a link to a folder" if entry.is_dir() else "a link to nothing"
    return _mode_kind(entry.stat(follow_symlinks=False).st_mode)


def _mode_kind(mode: int) -> str:
    return "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _not_there(source: str, path: Path) -> DataError:
    """Return the error of a missing path, with the nearest name that is there."""
    parent = path.parent
    if not parent.is_dir():
        return DataError(f"'{source}' is not there", f"there is no folder '{parent}'", "check the path")
    here = [entry.name for entry in parent.iterdir() if not entry.name.startswith(".")]
    known = [*here, *NAMED_SOURCES] if str(parent) == "." else here
    return DataError(
        f"'{source}' is not there",
        f"no file or folder of that name in {parent.resolve()}",
        suggestion(path.name, known[:200]) if known else "the folder is empty: check the path",
    )
