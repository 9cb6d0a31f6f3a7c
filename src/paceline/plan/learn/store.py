"""Where finished runs are remembered: one small JSON file each, in a folder for every machine in the user's cache.

Every file is written whole, so runs that end at once cannot spoil each other's. The folder holds MOST files, the newest
ones, and MOST_ALIKE of one task under one plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from pathlib import Path

from paceline.cluster.store import cache_dir, safe_name, write_json
from paceline.plan.learn.observation import Observation, observation_from_dict

MOST = 64
MOST_ALIKE = 8


def observations_folder(machine: str) -> Path:
    """Return the folder of a machine's observations."""
    return cache_dir() / "runs" / safe_name(machine)


def write_observation(observation: Observation) -> Path:
    """Keep an observation, drop the oldest ones beyond the bounds, and return its file.

    Raises StorageError where the cache cannot be written.
    """
    folder = observations_folder(observation.machine)
    record = observation.as_dict()
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:8]
    path = folder / f"{safe_name(observation.date)}-{digest}.json"
    write_json(record, path)
    alike: Counter[tuple[str, str]] = Counter()
    for count, (file, found) in enumerate(_read(folder)):
        alike[key := (found.task, str(found.plan)) if found else ("", "")] += 1
        if count >= MOST or alike[key] > MOST_ALIKE:
            _remove(file)
    return path


def read_observations(machine: str) -> list[Observation]:
    """Return a machine's observations, newest first. What another version wrote, or nobody can read, is left out."""
    return [found for _, found in _read(observations_folder(machine)) if found is not None]


def forget_observations(machine: str) -> int:
    """Delete all of a machine's observations and return how many there were."""
    files = list(observations_folder(machine).glob("*.json"))
    for file in files:
        _remove(file)
    return len(files)


def _read(folder: Path) -> list[tuple[Path, Observation | None]]:
    found: list[tuple[Path, Observation | None]] = []
    for file in sorted(folder.glob("*.json"), reverse=True):
        try:
            found.append((file, observation_from_dict(json.loads(file.read_text("utf-8")))))
        except FileNotFoundError:
            continue  # another run has just dropped it
        except (OSError, ValueError, TypeError, KeyError):
            found.append((file, None))
    return found


def _remove(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another run was faster
        file.unlink()
