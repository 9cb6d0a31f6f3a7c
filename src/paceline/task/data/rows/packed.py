"""A source whose batches also say where packed documents begin, found on the host while the rows are there."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from paceline.spec.task import ModelSpec
from paceline.task.data.protocol import Source
from paceline.task.models.sizes import is_named

STARTS = "document_starts"


class SaysStarts:
    """Another source, whose batches with "documents" hold "document_starts" as well. In all else it is that source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, ids: npt.NDArray[Any], positions: npt.NDArray[Any] | None = None) -> Any:
        """Return the source's batch, and where its documents begin in the flattened rows."""
        from paceline.task.models.layers.packed import document_starts

        batch = self._source.read(ids, positions)
        documents = batch.get("documents") if isinstance(batch, dict) else None
        starts = None if documents is None else document_starts(documents)
        return batch if starts is None else {**batch, STARTS: starts}

    def __getattr__(self, name: str) -> Any:
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)


def for_device(source: Source, device_kind: str, model: object) -> Source:
    """Return a source whose batches suit the model on its device: the built-in decoder reads starts, on CUDA."""
    reads = device_kind == "cuda" and isinstance(model, ModelSpec) and is_named(model.name)
    return SaysStarts(source) if reads else source
