"""What a task depends on outside of Paceline and torch, as one digest: the user's code, and files that the task names.

What is worked out from a task is remembered only under a digest of all that it depends on. A module may import others
at any time, by any name: so what is read is whole folders, not the module alone. Of the user's code the contents are
read; of settings beside it, which may be large, of files that the task names and of installed packages sizes and times.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.spec.import_paths import SCHEMES, is_import_path
from paceline.spec.model_folder import folder_of, is_model_folder

MOST_FILES = 1000  # of the user's own code; a folder with more is not read, and nothing is remembered
MOST_INSTALLED = 20_000  # of installed packages, whose files are only counted, measured and dated
MOST_NAMED = 200  # of a folder that an argument of the model names
CODE = (".py", ".so", ".pyd")
SETTINGS = (".json", ".toml", ".yaml", ".yml", ".cfg", ".ini")  # beside code; a model may be built from one
OURS = Path(__file__).resolve().parents[1]  # a part of every key


def own_code(table: Iterable[object], folders: Iterable[Path] = ()) -> str | None:
    """Return a digest of what the values of a task's table can reach, "" where nothing, None where it is too much.

    `folders` are read beside the current one and those of PYTHONPATH. None too where a module cannot be found, or a
    file cannot be read.
    """
    texts = list(_texts(list(table)))
    try:
        return _digest_of(texts, folders)
    except OSError:
        return None


def _digest_of(texts: Sequence[str], folders: Iterable[Path]) -> str | None:
    modules = [text.partition(":")[0].strip() for text in texts if is_import_path(text)]
    modules = [name for name in modules if name not in SCHEMES or _is_file(name)]
    paths = [text for text in texts if os.sep in text and _exists(text)]
    folders_named = [folder for text in texts if (folder := folder_of(text)) is not None and _exists(str(folder))]
    models = [folder for folder in folders_named if is_model_folder(str(folder))]
    built = [dates(sorted(folder.glob("*.json"))) for folder in models]
    built += [str(installed_at("transformers"))] if models else []
    if not modules:
        return hashlib.sha256("\0".join(built).encode()).hexdigest() if built else ""
    read = {*folders, Path.cwd(), *(Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)}
    dated: set[Path] = set()
    for module in modules:
        found = importlib.util.find_spec(module.partition(".")[0])
        inside = [Path(folder) for folder in (found.submodule_search_locations or ())] if found else []
        if found and found.origin and not inside:
            inside.append(Path(found.origin).parent)
        if not inside:
            return None
        for folder in inside:
            (dated if is_installed(folder) else read).add(folder)
    files = _found(read, MOST_FILES, SETTINGS)
    installed = _found(dated, MOST_INSTALLED)
    if files is None or installed is None:
        return None
    code = {path for path in files if path.endswith(CODE)}
    named = {str(path) for text in paths for path in _named(Path(text))}
    parts = (contents(sorted(code)), dates(sorted((files - code) | installed | named)), *built)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _is_file(module: str) -> bool:
    """Return whether a module is there and has objects: a folder without `__init__.py` has none."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def modules_named(table: Iterable[object]) -> dict[str, str]:
    """Return a digest of the file of each module of the user's that values of a task's table name, by the module.

    What these import is not in it, nor are installed packages, which have versions.
    """
    found = {}
    for text in _texts(list(table)):
        module = text.partition(":")[0].strip() if is_import_path(text) else ""
        origin = getattr(sys.modules.get(module), "__file__", None)
        if origin and Path(origin).is_file() and not (is_installed(Path(origin)) or Path(origin).is_relative_to(OURS)):
            found[module] = hashlib.sha256(Path(origin).read_bytes()).hexdigest()[:16]
    return found


def contents(files: Iterable[Path | str]) -> str:
    """Return a digest of files' names and contents."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path).encode() + b"\0" + hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()


def dates(files: Iterable[Path | str]) -> str:
    """Return a digest of files' names, sizes and times of change."""
    digest = hashlib.sha256()
    for path in files:
        status = Path(path).stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def installed_at(module: str) -> tuple[str, int, int] | None:
    """Return a module's file, its size and when it was written, without importing it."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        return None
    status = Path(found.origin).stat()
    return found.origin, status.st_size, status.st_mtime_ns


def _exists(text: str) -> bool:
    """Return whether a text is the name of a file or a folder; a prompt may have a slash in it too, and be long."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _texts(value: object) -> Iterator[str]:
    """Yield every text in nested plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def is_installed(folder: Path) -> bool:
    """Return whether a folder is of installed packages."""
    return not {"site-packages", "dist-packages"}.isdisjoint(folder.resolve().parts)


def dates_below(folder: Path, ending: str) -> str:
    """Return a digest of names, sizes and times of change of the files below a folder that end so.

    Of a thousand files, making a Path of each takes longer than planning.
    """
    digest = hashlib.sha256()
    for entry in sorted(_entries(str(folder)), key=lambda entry: entry.path):
        if entry.name.endswith(ending):
            status = entry.stat()
            digest.update(f"{entry.path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files below a folder; links to folders are not entered."""
    with os.scandir(folder) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_file():
            yield entry
        elif entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)


def _code(folder: str, beside: tuple[str, ...]) -> Iterator[str]:
    """Yield the files of code below a folder, and those of the endings `beside` next to code.

    Hidden folders and environments of their own are left out, and Paceline itself where it lies below. So is what is no
    folder that can be read, as part of PYTHONPATH: nothing can be imported from it either.
    """
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except OSError:
        return
    files = [entry for entry in entries if entry.is_file()]
    if any(entry.name == "pyvenv.cfg" for entry in files):
        return
    code = [entry.path for entry in files if entry.name.endswith(CODE)]
    yield from code
    yield from (entry.path for entry in files if code and beside and entry.name.endswith(beside))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name != "__pycache__":
            yield from () if entry.path == str(OURS) else _code(entry.path, beside)


def _found(folders: Iterable[Path], most: int, beside: tuple[str, ...] = ()) -> set[str] | None:
    """Return the files of code below folders, and those of the endings `beside` next to code; None above `most`."""
    files: set[str] = set()
    for folder in {folder.resolve() for folder in folders}:
        if folder.is_relative_to(OURS):
            continue
        for found in _code(str(folder), beside):
            files.add(found)
            if len(files) > most:
                return None
    return files


def _named(path: Path) -> Iterator[Path]:
    """Yield the file that a value names, or the files of the folder."""
    if path.is_file():
        yield path
    elif path.is_dir():
        for index, entry in enumerate(sorted(path.iterdir())):
            if index >= MOST_NAMED:
                return
            if entry.is_file():
                yield entry
