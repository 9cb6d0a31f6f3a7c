"""Whether a checkpoint is sound: every byte of it, and the values of every tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.export import WholeTensors
from paceline.checkpoint.fingerprint import parts_held, whole_fingerprints
from paceline.checkpoint.folder import verify_checkpoint
from paceline.checkpoint.index import IndexReader
from paceline.checkpoint.manifest import Manifest
from paceline.errors import StorageError


@dataclass(frozen=True)
class Soundness:
    """What was checked of a checkpoint: its bytes, and how many tensors' values; `unchecked` have no fingerprint."""

    manifest: Manifest
    tensors: int
    unchecked: tuple[str, ...]


def check_sound(path: Path) -> Soundness:
    """Read all of a checkpoint in one process, a tensor at a time, and return what was checked.

    The digest of every file is compared, the cover of every tensor by its chunks, and the fingerprint of the values
    with the one taken from the live tensors before the save. Raises StorageError naming the first file or tensor that
    is not as it was saved.
    """
    manifest = verify_checkpoint(path)
    kinds, tensors = IndexReader(path, manifest).kinds, WholeTensors(path, prefix="")
    unchecked = []
    for name, kind in kinds.items():
        if not kind.fingerprint:
            unchecked += [name] if math.prod(kind.shape) else []
            continue
        found = whole_fingerprints([parts_held({name: tensors[name]})], {name: kind.shape})[name]
        if found != kind.fingerprint:
            raise StorageError(
                f"the values of '{name}' in {path} are not those that were saved",
                f"their fingerprint is {found}, and was {kind.fingerprint} before the save",
                "use an earlier checkpoint, and report the layout that saved it",
            )
    return Soundness(manifest, len(kinds), tuple(unchecked))
