"""Which order a source's samples come in: the one that the source brings, or the global permutation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError
from paceline.spec.task import DataSpec
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.order.windowed import WindowedOrder


class Order(Protocol):
    """The samples of a source along the training: a pure function of the seed and the position."""

    def ids(self, seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sample at each position; positions count from 0 without an end."""
        ...


@dataclass(frozen=True)
class FiledOrder:
    """The samples as they are filed, epoch after epoch."""

    samples: int

    def ids(self, seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return position modulo samples."""
        found: npt.NDArray[np.int64] = np.asarray(positions, dtype=np.int64) % self.samples
        return found


@dataclass(frozen=True)
class GlobalOrder:
    """A fresh permutation of all samples in each epoch."""

    samples: int
    is_scattered = True

    def ids(self, seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `sample_ids`."""
        return sample_ids(seed, positions, self.samples)


def ordering(data: DataSpec, source: Any) -> Order:
    """Return the order of a source that `task.data.shuffle` asks for. Raises ConfigError where it needs lengths."""
    samples: int = source.samples
    if data.shuffle == "windowed":
        return WindowedOrder(samples, data.shuffle_block, data.shuffle_window)
    if data.shuffle == "bucketed":
        lengths = getattr(source, "lengths", None)
        if lengths is None:
            raise ConfigError(
                "task.data.shuffle = 'bucketed' with samples whose lengths are not known",
                "the data set has no attribute 'lengths'; samples of text all have one length",
                "lengths = [...] on the data set, a number per sample, or rows = 'packed' for text",
            )
        return BucketedOrder(lengths, data.shuffle_bucket, data.shuffle_block * data.shuffle_window)
    return FiledOrder(samples) if data.shuffle == "none" else GlobalOrder(samples)


def order_of(source: Any) -> Order:
    """Return the order of a source: its own `order`, or the global one of its `samples`."""
    order = getattr(source, "order", None)
    return GlobalOrder(source.samples) if order is None else order


def is_scattered(order: object) -> bool:
    """Return whether samples that follow each other lie anywhere among all of them."""
    return bool(getattr(order, "is_scattered", False))


def ids_at(source: Any, seed: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the ids of the source's samples at these positions of the training."""
    return order_of(source).ids(seed, positions)
