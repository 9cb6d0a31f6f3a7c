"""Sources: what gives batches of samples by their numbers, and how a task's data become one."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, DataError, PacelineError
from paceline.spec.import_paths import is_import_path, load_object
from paceline.spec.task import DataSpec
from paceline.task.data.cache import Say, open_corpus
from paceline.task.data.digits import open_digits
from paceline.task.data.manifest import Corpus
from paceline.task.data.windows import TokenSource


@runtime_checkable
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

        `positions` are the rows' places in the training (see order.py); what is random in a row may depend on its
        position and on nothing else. Without them (evaluation) it depends on the id.
        """
        ...


def open_sources(data: Any, seed: int, say: Say | None = None) -> tuple[Source, Source | None]:
    """Return (train, validation or None) for a DataSpec, a map-style data set, a Source, or a tuple of two of these.

    There is no validation source where `validation_fraction` is 0 or what it holds out does not make one sample.
    Raises DataError for data that cannot be read, ConfigError for a factory that cannot be imported.
    """
    if not isinstance(data, DataSpec):
        return _wrap_pair(data, seed)
    if is_import_path(data.source):
        return _wrap_pair(_call_factory(data), seed, _collate_of(data))
    if data.collate:
        raise ConfigError(
            f"task.data.collate with task.data.source = '{data.source}'",
            "it makes batches of a user's own samples; those of text and digits have one shape",
            "leave it out, or name a data set of your own: package.module:factory",
        )
    if data.source == "digits":
        return open_digits(data.validation_fraction)
    return token_sources(open_corpus(data, say), data.seq_len, data.cross_documents)


def token_sources(corpus: Corpus, seq_len: int, cross_documents: bool = True) -> tuple[TokenSource, TokenSource | None]:
    """Return the windows of a corpus: (train, validation or None). Raises DataError where `train` has none."""
    train = TokenSource(corpus.train, corpus.vocab, seq_len, cross_documents)
    enough = corpus.validation.windows(seq_len) > 0
    return train, TokenSource(corpus.validation, corpus.vocab, seq_len, cross_documents) if enough else None


def _call_factory(data: DataSpec) -> Any:
    """Return what the user's factory returns. Raises DataError where it fails."""
    factory = load_object(data.source, "task.data.source")
    if not callable(factory):
        return factory  # a data set itself
    try:
        return factory(**data.arguments)
    except PacelineError:
        raise
    except Exception as error:  # a user's function may raise anything; the traceback stays attached
        raise DataError(
            f"task.data.source = '{data.source}' failed",
            f"{type(error).__name__}: {error}",
            f"call it by hand with arguments = {data.arguments}",
        ) from error


def _collate_of(data: DataSpec) -> Any:
    """Return the function that makes batches, None for the usual one. Raises ConfigError where it is none."""
    found = load_object(data.collate, "task.data.collate") if isinstance(data.collate, str) and data.collate else None
    found = found or data.collate or None
    if found is not None and not callable(found):
        raise ConfigError(
            f"task.data.collate = '{data.collate}' is of type {type(found).__name__}", "it cannot be called",
            "a function collate(samples) or collate(samples, ids) that returns a batch",
        )  # fmt: skip
    return found


def _wrap_pair(data: Any, seed: int, collate: Any = None) -> tuple[Source, Source | None]:
    """Return the sources of one data set or of a (train, validation) tuple, whose second may be None."""
    if not isinstance(data, tuple):
        return _wrap(data, seed, collate), None
    if len(data) != 2:
        raise DataError(
            f"the data are a tuple of {len(data)}", "a tuple is taken as (train, validation)", "return one or two sets"
        )
    train, validation = data
    return _wrap(train, seed, collate), None if validation is None else _wrap(validation, seed, collate)


def _wrap(data: Any, seed: int, collate: Any = None) -> Source:
    if isinstance(data, Source):
        if collate is not None:
            raise ConfigError(
                f"task.data.collate with a {type(data).__name__}", "a source makes its batches itself, in read()",
                "leave it out",
            )  # fmt: skip
        return data
    from paceline.task.data.mapped import MapSource  # imports torch, which planning on text does not need

    return MapSource(data, seed, collate)
