"""Sources put together: several as one, in the order of a mixture, and a source in another order than the global."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError
from paceline.task.data.order.mixture import MixtureOrder
from paceline.task.data.order.of_source import Order
from paceline.task.data.protocol import FillsRows, FinishesBatches, Source, read_scattered, reading_ahead, tightened
from paceline.task.data.rows.of_split import SourceOfSplit
from paceline.task.data.rows.windows import windows_across

MOST_SHOWN = 8  # classes that an error lists


class MixedSource:
    """Several sources as one: ids count through them, one after the other. An epoch is all their samples together.

    `order` says which of them is read where; without one (held-out samples) any sample may follow any other.
    """

    def __init__(self, sources: Sequence[Source], names: Sequence[str], order: MixtureOrder | None = None) -> None:
        """Raises DataError where the sources do not count the same things, or not as many of them in a sample."""
        first = sources[0]
        for name, source in zip(names, sources, strict=True):
            if differs := difference_of(source, first, ("unit", "items_per_sample")):
                raise DataError(
                    f"'{name}' and '{names[0]}' do not make one mixture", differs, "sources whose samples are alike"
                )
        self.sources, self.names = tuple(sources), tuple(names)
        self.items_per_sample, self.unit = first.items_per_sample, first.unit
        self.classes = getattr(first, "classes", None)
        known = [source.vocab for source in sources if source.vocab is not None]
        self.vocab: int | None = max(known) if len(known) == len(sources) else None
        self._ends = np.cumsum([source.samples for source in sources])
        self._begins = self._ends - np.array([source.samples for source in sources])
        self.samples = int(self._ends[-1])
        self.fingerprint = _hash([source.fingerprint for source in sources])
        self.reads_in_threads = all(getattr(source, "reads_in_threads", False) for source in sources)
        self.steps_ahead = max(getattr(source, "steps_ahead", 0) for source in sources)
        self.order = order
        self.gathers_rows = _gather_alike(sources)
        self._across = windows_across(sources) if self.gathers_rows else None
        self.is_ragged = all(getattr(source, "is_ragged", False) for source in sources)
        lengths = [getattr(source, "lengths", None) for source in sources]
        if all(each is not None for each in lengths):
            self.lengths = np.concatenate(cast(list[npt.NDArray[np.int64]], lengths))
        if all(hasattr(source, "longest") for source in sources):
            self.longest = max(cast(FillsRows, source).longest for source in sources)
        alike = [getattr(source, "filled_alike", None) for source in sources]
        self._filled_alike = alike[0] if all(alike) else None
        ends = {getattr(source, "finishes_as", None) for source in sources}
        if len(ends) == 1 and None not in ends:  # any of them finishes what all have begun
            self.read_unfinished = partial(self._read, "read_unfinished")
            self.finish = cast(FinishesBatches, first).finish

    def gather(self, ids: npt.NDArray[np.int64]) -> Any:
        """Return the rows of these samples as they lie. Raises DataError where one cannot be read."""
        if self._across is not None:
            numbers = np.searchsorted(self._ends, ids, side="right")
            if (found := self._across.gather(numbers, ids - self._begins[numbers])) is not None:
                return found
        places, parts = [], []
        for source, here, own in self.apart(ids):
            places.append(here)
            parts.append(cast(SourceOfSplit, source).gather(own))
        return parts[0] if len(parts) == 1 else cast(SourceOfSplit, self.sources[0]).joined(parts, places)

    def batch(self, gathered: Any, first: int, last: int) -> Any:
        """Return the batch of the gathered rows first..last, as `read` does."""
        return cast(SourceOfSplit, self.sources[0]).batch(gathered, first, last)

    def apart(self, ids: npt.NDArray[np.int64]) -> Iterator[tuple[Source, npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield each source of some samples, with the places of its samples in `ids`, and their ids in the source."""
        which = np.searchsorted(self._ends, ids, side="right")
        for number in np.unique(which).tolist():
            here, source = np.flatnonzero(which == number), self.sources[number]
            yield source, here, ids[here] - self._begins[number]

    def tight(self) -> Source:
        """Return the same sources in the same order, whose rows are filled up no further than they must be."""
        tight = [tightened(source) for source in self.sources]
        same = all(one is other for one, other in zip(tight, self.sources, strict=True))
        return self if same else MixedSource(tight, self.names, self.order)

    def reads_scattered(self) -> None:
        """Read from now on at scattered places."""
        read_scattered(self.sources)

    def expect(self, ids: npt.NDArray[np.int64]) -> None:
        """Say which samples will be read next, to those sources that fetch what they read."""
        which = np.searchsorted(self._ends, ids, side="right")
        for number, source in enumerate(self.sources):
            if (ahead := reading_ahead(source)) is not None:
                ahead.expect(ids[which == number] - self._begins[number])

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return one batch of these rows, in their order. Raises DataError where the sources' batches do not fit."""
        return self._read("read", ids, positions)

    def _read(self, how: str, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return what the sources' method of a name returns of these rows, in their order."""
        import torch
        from torch.utils._pytree import tree_map

        apart = list(self.apart(ids))
        if self.is_ragged and len(apart) > 1:  # all are filled up to the longest of any
            longest = int(self.lengths[ids].max())
            apart = [(cast(FillsRows, source).filled_to(longest), here, own) for source, here, own in apart]
        places, parts = [], []
        for source, here, own in apart:
            places.append(here)
            parts.append(getattr(source, how)(own, None if positions is None else positions[here]))
        if len(parts) == 1:
            return parts[0]
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        try:
            if self._filled_alike is not None:
                parts = self._filled_alike(parts)
            return tree_map(lambda *leaves: torch.cat(leaves)[back], *parts)
        except (RuntimeError, ValueError, TypeError) as error:
            raise DataError(
                f"rows of {', '.join(self.names)} do not make one batch",
                f"{type(error).__name__}: {error}",
                "sources whose batches have the same entries, of one shape and kind",
            ) from error

    def given(self, seed: int, position: int) -> dict[str, dict[str, float]]:
        """Return what each source has given before a position: its samples, and how many epochs of it they are."""
        if self.order is None:
            return {}
        return {
            name: {"samples": given, "epochs": given / source.samples}
            for name, source, given in zip(self.names, self.sources, self.order.given(seed, position), strict=True)
        }


def difference_of(source: Source, other: Source, whats: Sequence[str]) -> str:
    """Return in what of these, or in the classes that their labels count, the samples of two sources differ, or ""."""
    for what in whats:
        if (own := getattr(source, what)) != (its := getattr(other, what)):
            return f"their {what} are {own} and {its}"
    known, its_known = getattr(source, "classes", None), getattr(other, "classes", None)
    if known is not None and its_known is not None and tuple(known) != tuple(its_known):
        return f"their labels count the classes {_shown(known)} and {_shown(its_known)}"
    return ""


def _shown(classes: Sequence[object]) -> str:
    more = f" and {len(classes) - MOST_SHOWN} more" if len(classes) > MOST_SHOWN else ""
    return ", ".join(map(str, classes[:MOST_SHOWN])) + more


def _gather_alike(sources: Sequence[Source]) -> bool:
    """Return whether what these sources gather can be put together: of one kind, in near memory, and checked there.

    What has no checksums is held against the vocabulary of its own source.
    """
    kinds = {(getattr(type(source), "joined", None), getattr(source, "cross_documents", None)) for source in sources}
    return len(kinds) == 1 and all(
        isinstance(source, SourceOfSplit) and source.gathers_rows and source.is_checked for source in sources
    )


class InOrder:
    """Another source with an order of its own. In all else it is that source."""

    def __init__(self, source: Source, order: Order) -> None:
        self.inner, self.order = source, order
        self.samples, self.items_per_sample, self.unit = source.samples, source.items_per_sample, source.unit
        self.vocab, self.fingerprint = source.vocab, source.fingerprint
        self.read = source.read

    def tight(self) -> Source:
        """Return the same source in the same order, whose rows are filled up no further than they must be."""
        return InOrder(tight, self.order) if (tight := tightened(self.inner)) is not self.inner else self

    def __getattr__(self, name: str) -> object:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def _hash(parts: Sequence[str]) -> str:
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()
