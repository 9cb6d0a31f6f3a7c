"""Where measurements of this machine are kept, in the user's cache: JSON files, each written whole.

A probe is one file per host, kind of device, number of devices and threads.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.errors import StorageError

if TYPE_CHECKING:
    from paceline.cluster.probe.records import ProbeRecord

# Of a probe's file, by the kind of device. 9 of CUDA: operands are random, and the fused update is of larger tensors;
# 9 of CPUs: what a process holds is without the pages of files.
SCHEMAS = {"cpu": 9, "cuda": 9}


def cache_dir() -> Path:
    """Return the user's cache folder of Paceline: $XDG_CACHE_HOME/paceline or ~/.cache/paceline.

    Raises StorageError for a user without a home folder, as a container's may be.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "paceline"
    except RuntimeError as error:
        raise StorageError(
            "this user has no home folder, and so no cache", f"HOME is unset, and nobody knows user {os.getuid()}",
            "set XDG_CACHE_HOME to a folder you can write",
        ) from error  # fmt: skip


def probe_command(kind: str, devices: int) -> str:
    """Return the command that probes so many devices of this machine."""
    options = [*(["--kind", kind] if kind != "cpu" else []), *(["--devices", f"{devices}"] if devices != 1 else [])]
    return " ".join(["paceline probe", *options])


def hold_writable(path: Path) -> None:
    """Raise StorageError where a file that is to be measured for a while could not be kept then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return
    except OSError as error:
        raise _no_store(path, error) from error


def probe_path(host: str, kind: str, devices: int, threads: int, folder: Path | None = None) -> Path:
    """Return the file of a probe; hosts differ by name, and a changed processor is noticed when reading."""
    return (folder or cache_dir() / "probes") / f"{safe_name(host)}-{kind}-{devices}x{threads}.json"


def safe_name(name: str) -> str:
    """Return a machine's name as it may stand in a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name) or "host"


def write_probe(record: Mapping[str, object], path: Path) -> None:
    """Write a probe atomically. Raises StorageError where the folder cannot be written."""
    write_json(record, path)


def write_json(record: Mapping[str, object], path: Path) -> None:
    """Write what was measured here as JSON, whole or not at all. Raises StorageError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
            json.dump(record, file, indent=1)
        Path(file.name).replace(path)
    except OSError as error:
        raise _no_store(path, error) from error


def _no_store(path: Path, error: OSError) -> StorageError:
    what = f"cannot store what was measured in {path.parent}"
    return StorageError(what, str(error), "set XDG_CACHE_HOME to a folder you can write")


def read_probe(
    path: Path, processor: str, gpus: Sequence[str] = (), command: str = "paceline probe"
) -> tuple[ProbeRecord | None, str]:
    """Return the stored probe, or None and the reason why the file is not used (empty: there is none).

    `command` makes it anew. `gpus` are the names of those that this process sees: a host's others, or a slice of one,
    have other figures.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"the stored probe {path.name} cannot be read ({error}): run `{command}` again"
    if not isinstance(record, dict) or record.get("schema") != SCHEMAS.get(record.get("kind", "")):
        return None, f"the stored probe {path.name} has another format: run `{command}` again"
    if record.get("processor") != processor:
        found = record.get("processor")
        return None, f"the stored probe is of another processor ({found}): run `{command}` again"
    probed = record.get("device_name", "")
    if probed and gpus and _plain(probed) not in map(_plain, gpus):
        return None, f"the stored probe is of another GPU ({probed}): run `{command}` again"
    return cast("ProbeRecord", record), ""


def _plain(name: str) -> str:
    """Return a GPU's name as all drivers and torch tell it: some put the maker's name before it."""
    return name.lower().removeprefix("nvidia ")
