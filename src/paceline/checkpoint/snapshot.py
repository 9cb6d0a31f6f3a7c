"""The state of one moment, as a rank holds it: parts of tensors, copied apart from the tensors that go on training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from paceline.checkpoint.boxes import Box
from paceline.checkpoint.fingerprint import local_part, part_sums, parts_held
from paceline.checkpoint.shards import DTYPES, dtype_name
from paceline.errors import StorageError


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor that a rank holds: all but its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    fingerprint: int | None = None

    @property
    def box(self) -> Box:
        """Return where the part lies in the whole."""
        return self.offsets, self.sizes

    @property
    def bytes(self) -> int:
        """Return the length of the part's values."""
        return math.prod(self.sizes) * DTYPES[self.dtype][1]

    @property
    def key(self) -> str:
        """Return the tensor's name, with the slices where the part is not the whole."""
        if self.sizes == self.shape:
            return self.name
        slices = (f"{at}:{at + size}" for at, size in zip(self.offsets, self.sizes, strict=True))
        return f"{self.name}[{','.join(slices)}]"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint of `step` is written from on this rank: values by part, and the caller's JSON."""

    step: int
    values: Mapping[Part, torch.Tensor]
    extra: Mapping[str, object]


def take_snapshot(
    step: int, tensors: Mapping[str, torch.Tensor], extra: Mapping[str, object], *, copy: bool = True
) -> Snapshot:
    """Return the state of this moment. Nothing is sent or written, so training may go on when it returns.

    Values are copied to the host's memory. Without `copy` they are the live ones, which must then not change until the
    checkpoint is published; who writes them takes their fingerprints. Raises StorageError for what a checkpoint cannot
    hold.
    """
    checked = {name: _checked(name, tensor) for name, tensor in tensors.items()}
    if not copy:
        return Snapshot(step, dict(_parts(checked)), plain_json(extra))
    fingerprints = parts_held(checked)  # of the live tensors: what a copy or a writer gets wrong is to be seen
    values = {}
    for part, local in _parts(checked):
        known = fingerprints[part.name].get(part.box)
        values[replace(part, fingerprint=known)] = local.to("cpu", copy=True)
    return Snapshot(step, values, plain_json(extra))


def live_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yield this rank's parts of tensors with their live values. Raises StorageError as `take_snapshot` does."""
    return _parts({name: _checked(name, tensor) for name, tensor in tensors.items()})


def fingerprinted(taken: Snapshot) -> Snapshot:
    """Return the snapshot with the fingerprints of its parts, from the values that it has."""
    sums = iter(part_sums([(held, part.offsets) for part, held in taken.values.items() if part.bytes]))
    values = {
        replace(part, fingerprint=next(sums) if part.bytes else None): held for part, held in taken.values.items()
    }
    return replace(taken, values=values)


def _parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[Part, torch.Tensor]]:
    for name, tensor in tensors.items():
        local, places = local_part(tensor)
        for offsets, sizes in places:
            yield Part(name, dtype_name(tensor.dtype), tuple(tensor.shape), offsets, sizes), local


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise StorageError(f"'{name}' cannot be saved", f"it is a {type(tensor).__name__}, not a tensor", "use `extra`")
    if dtype_name(tensor.dtype) not in DTYPES or tensor.is_meta or tensor.layout != torch.strided:
        kind = f"it is a {tensor.layout} {tensor.dtype} tensor on {tensor.device}"
        raise StorageError(f"'{name}' cannot be saved", kind, f"dense, not on meta, one of: {', '.join(DTYPES)}")
    return tensor.detach()


def plain_json(extra: Mapping[str, object]) -> dict[str, object]:
    """Return a copy of `extra` as JSON has it."""
    try:
        return dict(json.loads(json.dumps(dict(extra), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise StorageError("`extra` cannot be saved", f"it is not plain JSON: {error}", "spell it out") from error
