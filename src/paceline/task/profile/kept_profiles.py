"""Profiles that were traced before: of the same model, code, data and versions none is traced again.

Tracing takes seconds, most of them to import torch. A profile is kept in the user's cache under a key of all that it
depends on; where not all of that can be known, it is traced anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from pathlib import Path

from paceline.cluster.store import cache_dir, write_json
from paceline.errors import StorageError
from paceline.spec.import_paths import names_object
from paceline.spec.profile import ModelProfile
from paceline.spec.task import Task
from paceline.task.data.facts import DataFacts
from paceline.task.own_code import OURS, dates_below, installed_at, is_installed, own_code
from paceline.task.profile.apart import trace_task, traced_parts, travels
from paceline.task.profile.plain import pack_profile, unpack_profile

MOST_KEPT = 200  # profiles; the oldest go


def trace_once(task: Task, facts: DataFacts) -> ModelProfile:
    """Return the profile of a task's model on its own data and objective, as it was traced before where it was.

    Raises ConfigError where the model fails.
    """
    key = _key(task, facts)
    if key is None:
        return trace_task(task)
    path = cache_dir() / "profiles" / f"{key}.json"
    if (known := _recall(path)) is not None:
        return known
    profile = trace_task(task)
    _keep(profile, path)
    return profile


def _key(task: Task, facts: DataFacts) -> str | None:
    """Return what a profile is kept under, or None where the task holds objects, or data that code of the user makes.

    What such data are cannot be seen without making them, and that takes as long.
    """
    if not travels(task) or any(names_object(each.source) for each in (task.data, *task.data.mix)):
        return None
    parts = traced_parts(task)
    code = own_code(parts.values(), [Path(folder) for folder in sys.path if _is_own(folder)])
    if code is None:
        return None
    known = {
        **parts,
        "facts": [facts.fingerprint, facts.items_per_sample, facts.vocab, facts.unit],
        "own code": code,
        "paceline": dates_below(OURS, ".py"),  # a thousand files: reading them takes longer than planning
        "torch": installed_at("torch"),
        "python": sys.version,
    }
    return hashlib.sha256(json.dumps(known, default=str, sort_keys=True).encode()).hexdigest()


def _is_own(folder: str) -> bool:
    """Return whether a folder of the path is the user's: neither Python's, nor installed, nor ours."""
    where, paths = Path(folder or ".").resolve(), sysconfig.get_paths()
    python = any(where.is_relative_to(Path(paths[kind]).resolve()) for kind in ("stdlib", "scripts"))
    return where.is_dir() and not (python or is_installed(where) or OURS.is_relative_to(where))


def _recall(path: Path) -> ModelProfile | None:
    """Return the profile that is kept there, or None; one that cannot be read is traced again."""
    try:
        return unpack_profile(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(profile: ModelProfile, path: Path) -> None:
    """Keep a profile, and as many of those before it as there may be. One that cannot be written is traced again."""
    try:
        write_json(pack_profile(profile), path)
    except StorageError:
        return
    kept = sorted(path.parent.glob("*.json"), key=_written)
    for old in kept[:-MOST_KEPT]:
        old.unlink(missing_ok=True)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0
