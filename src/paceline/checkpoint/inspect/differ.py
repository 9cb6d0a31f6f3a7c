"""How two checkpoints differ: in what they hold, and in values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint.export import WholeTensors
from paceline.checkpoint.index import IndexReader, TensorKind
from paceline.checkpoint.manifest import read_manifest


@dataclass(frozen=True)
class TensorChange:
    """A tensor that is not the same in both: why, and how far its values are apart (norm of the change over norm)."""

    name: str
    why: str
    relative: float | None = None


@dataclass(frozen=True)
class CheckpointChange:
    """What two checkpoints have alike and not alike, by the first one's names; `same` counts equal tensors."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[TensorChange, ...]
    same: int

    @property
    def is_none(self) -> bool:
        """Whether the two hold the same tensors with the same values."""
        return not (self.only_first or self.only_second or self.changed)


def compare_checkpoints(first: Path, second: Path, prefix: str = "") -> CheckpointChange:
    """Return how the tensors of two checkpoints differ whose names begin with `prefix`.

    Layouts do not matter. Tensors of one fingerprint are equal without being read; of others both are read, one at a
    time. Raises StorageError where one of the two is not complete.
    """
    kinds = [_kinds(path, prefix) for path in (first, second)]
    both = [name for name in kinds[0] if name in kinds[1]]
    tensors = [WholeTensors(path, prefix="") for path in (first, second)]
    changed, same = [], 0
    for name in both:
        one, other = kinds[0][name], kinds[1][name]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            was = f"{one.dtype}{list(one.shape)}"
            changed.append(TensorChange(name, f"{was} and {other.dtype}{list(other.shape)}"))
        elif one.fingerprint and one.fingerprint == other.fingerprint:
            same += 1
        elif (relative := _relative(tensors[0][name], tensors[1][name])) is not None:
            changed.append(TensorChange(name, "values", relative))
        else:
            same += 1
    return CheckpointChange(
        tuple(name for name in kinds[0] if name not in kinds[1]),
        tuple(name for name in kinds[1] if name not in kinds[0]),
        tuple(changed),
        same,
    )


def _kinds(path: Path, prefix: str) -> dict[str, TensorKind]:
    kinds = IndexReader(path, read_manifest(path)).kinds
    return {name: kind for name, kind in kinds.items() if name.startswith(prefix)}


def _relative(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Return the norm of the difference over the norm of the first, None where they are equal bit for bit."""
    if torch.equal(_bits(one), _bits(other)):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    apart, size = (other.to(wide) - one.to(wide)).norm().item(), one.to(wide).norm().item()
    return apart / size if size else float("inf") if apart else apart


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor: NaN is then equal to itself, and -0 is not 0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
