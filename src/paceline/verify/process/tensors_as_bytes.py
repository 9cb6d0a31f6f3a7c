"""What ranks of a proof tell each other, many small tensors among it: tensors travel as bytes, which is quick."""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from paceline.run.process.world import World

Shared = TypeVar("Shared")


def told_by_first(world: World, item: Shared | None) -> Shared:
    """Return on every rank what the first one has. Every rank calls it."""
    if world.size == 1:
        assert item is not None
        return item
    told = world.share(to_bytes(item) if world.is_first else None)
    own: Any = item if world.is_first else pickle.loads(told)
    return own


def brought_to_first(world: World, item: Shared) -> list[Shared] | None:
    """Return every rank's item, in rank order, on rank 0; None on the others. Every rank calls it."""
    if world.size == 1:
        return [item]
    everyone = world.bring_to_first(to_bytes(item))
    return None if everyone is None else [pickle.loads(each) for each in everyone]


def to_bytes(item: object) -> bytes:
    """Return what `pickle.loads` makes the item of again."""
    written = io.BytesIO()
    _Pickler(written, protocol=5).dump(item)
    return written.getvalue()


class _Pickler(pickle.Pickler):
    """Writes plain tensors as bytes; torch writes each as an archive of its own."""

    def reducer_override(self, item: Any) -> Any:
        """Return how to make a plain tensor again, and leave all else to pickle."""
        if type(item) is not torch.Tensor or not _is_plain(item):
            return NotImplemented
        return _tensor, (item.dtype, tuple(item.shape), item.reshape(-1).view(torch.uint8).numpy())


def _is_plain(tensor: torch.Tensor) -> bool:
    is_real = not (tensor.is_complex() or tensor.is_neg() or tensor.is_quantized)
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_real and is_dense and not tensor.requires_grad


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], content: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(content).view(dtype).view(shape)
