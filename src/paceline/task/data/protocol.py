"""What a source of samples is: numbered samples that are read in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import numpy.typing as npt


class Source(Protocol):
    """Numbered samples, read in batches. The same ids and positions give the same batch in any process.

    `items_per_sample` is what the loss counts per sample at most: the sequence length, or 1. `unit` is "tokens" or
    "samples". `vocab` is the number of token ids, None for other data. `fingerprint` is a hash of the content.
    """

    samples: int
    items_per_sample: int
    unit: str
    vocab: int | None
    fingerprint: str

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return one batch of len(ids) rows, as nested tensors on the CPU.

        `positions` are the rows' places in the training (see order/); what is random in a row may depend on its
        position and on nothing else. Without them (evaluation) it depends on the id.
        """
        ...


class FinishesBatches(Protocol):
    """A source whose batches can be finished on a device: `finish(read_unfinished(...))` is `read(...)`, bit for bit,
    wherever `finish` runs. Sources whose `finishes_as` are equal finish each other's batches, in a mixture."""

    @property
    def finishes_as(self) -> object:
        """What all that `finish` does follows from."""
        ...

    def read_unfinished(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> object:
        """Return what `read` starts from, on the CPU."""
        ...

    def finish(self, batch: object) -> Any:
        """Return the batch as `read` does, on the device on which its tensors are."""
        ...


class GathersRows(Protocol):
    """A source whose rows are copies of near memory: those of several steps are gathered at once, and made into batches
    step by step. `batch(gather(ids), first, last)` is `read(ids[first:last])`, bit for bit.
    """

    gathers_rows: bool

    def gather(self, ids: npt.NDArray[np.int64]) -> Any:
        """Return what `batch` makes batches of these samples from. Raises DataError where one cannot be read."""
        ...

    def batch(self, gathered: Any, first: int, last: int) -> Any:
        """Return the batch of the gathered rows first..last."""
        ...


class ReadsAhead(Protocol):
    """A source that fetches what it reads: it wants to know the samples of the next `steps_ahead` steps, 0 of none."""

    steps_ahead: int

    def expect(self, ids: npt.NDArray[np.int64]) -> None:
        """Begin to fetch these samples, the first ones first."""
        ...


class FillsRows(Protocol):
    """A source of rows of different lengths that fills them up further than it must."""

    longest: int  # of its samples' lengths

    def tight(self) -> Source:
        """Return the same source, whose rows are filled up to the longest beside them and no further."""

    def filled_to(self, tokens: int) -> Source:
        """Return the same source, whose rows are filled up as if one of so many tokens were beside them."""


def filled_for(source: Source, device_kind: str, tp: int, precision: str) -> Source:
    """Return a source whose rows are filled up as far as these devices gain by it.

    GPUs like even lengths, ranks of tp share a row's tokens, and a CPU makes its kernels in bf16 and fp16 anew for each
    length that it sees.
    """
    return source if device_kind != "cpu" or tp > 1 or precision in ("bf16", "fp16") else tightened(source)


def tightened(source: Source) -> Source:
    """Return a source whose rows are filled up no further than they must be, itself where there is nothing to do.

    By its class: a source around another one has its attributes, and would be left behind with its order.
    """
    tight = getattr(type(source), "tight", None)
    return source if tight is None else cast(FillsRows, source).tight()


def finishing(source: Source) -> FinishesBatches | None:
    """Return a source whose batches a device can finish as such a source; None where the source finishes batches."""
    # By the attribute, as below: a check of a protocol does not see what is passed on, from Python 3.12 on.
    return cast(FinishesBatches, source) if hasattr(source, "read_unfinished") else None


def reading_ahead(source: Source) -> ReadsAhead | None:
    """Return a source as one that fetches what it reads; None where nothing of it is fetched."""
    # By the attribute: a source in an order of its own, or of documents that say their starts, passes it on.
    return cast(ReadsAhead, source) if getattr(source, "steps_ahead", 0) else None


def read_scattered(sources: Sequence[Source]) -> None:
    """Tell those sources that want to know it that they are read at scattered places."""
    for source in sources:
        if (told := getattr(source, "reads_scattered", None)) is not None:
            told()


Pair = tuple[Source, Source | None]  # for training, and held out


class OpensSources(Protocol):
    """Data that make their sources themselves: a task's `data` may be one, or a factory's result."""

    def open_sources(self, seed: int) -> Pair:
        """Return (train, validation or None). The same seed gives the same rows in any process."""
        ...


# What each of them has, by name: `isinstance` of a protocol does not see what `__getattr__` passes on (Python 3.12).
SOURCE = ("samples", "items_per_sample", "unit", "vocab", "fingerprint", "read")


def is_source(data: object) -> TypeGuard[Source]:
    """Return whether data have all that a source has, their own or passed on from another."""
    return all(hasattr(data, name) for name in SOURCE)


def opens_sources(data: object) -> TypeGuard[OpensSources]:
    """Return whether data make their sources themselves."""
    return callable(getattr(data, "open_sources", None))
