"""A source whose batches also say where packed documents begin, found on the host while the rows are there."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from paceline.spec.task import ModelSpec
from paceline.task.data.protocol import GathersRows, Source
from paceline.task.models.sizes import is_named

STARTS = "document_starts"


class SaysStarts:
    """Another source, whose batches with "documents" hold "document_starts" as well. In all else it is that source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the source's batch, and where its documents begin in the flattened rows."""
        return _with_starts(self._source.read(ids, positions))

    def batch(self, gathered: Any, first: int, last: int) -> Any:
        """Return the batch of gathered rows, as `read` does. Who gathers is the source."""
        return _with_starts(cast(GathersRows, self._source).batch(gathered, first, last))

    def __getattr__(self, name: str) -> Any:
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)


def _with_starts(batch: Any) -> Any:
    from paceline.task.models.layers.packed import document_starts

    documents = batch.get("documents") if isinstance(batch, dict) else None
    starts = None if documents is None else document_starts(documents)
    return batch if starts is None else {**batch, STARTS: starts}


def for_device(source: Source, device_kind: str, model: object) -> Source:
    """Return a source whose batches suit the model on its device: the built-in decoder reads starts, on CUDA."""
    reads = device_kind == "cuda" and isinstance(model, ModelSpec) and is_named(model.name)
    return SaysStarts(source) if reads else source
