"""Sources: what gives batches of samples by their numbers, and how a task's data become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, DataError, PacelineError
from paceline.spec.import_paths import load_object
from paceline.spec.task import DataSpec
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.cache import Say, open_corpus
from paceline.task.data.sources.digits import open_digits
from paceline.task.data.sources.manifest import Corpus
from paceline.task.data.sources.named import kind_of_source
from paceline.task.data.sources.shards.opened import open_token_set


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


Pair = tuple[Source, Source | None]  # for training, and held out


@runtime_checkable
class OpensSources(Protocol):
    """Data that make their sources themselves: a task's `data` may be one, or a factory's result."""

    def open_sources(self, seed: int) -> Pair:
        """Return (train, validation or None). The same seed gives the same rows in any process."""
        ...


def open_sources(data: Any, seed: int, say: Say | None = None) -> Pair:
    """Return (train, validation or None) for a DataSpec, a data set, a Source, a tuple of two, or an OpensSources.

    There is no validation source where `validation_fraction` is 0 or what it holds out does not make one sample.
    Raises DataError for data that cannot be read, ConfigError for a factory that cannot be imported.
    """
    if not isinstance(data, DataSpec):
        return _sources_of(data, seed)
    if (named := OPENERS.get(data.source)) is not None:
        return named(data, seed, say)
    return OF_KIND[kind_of_source(data.source)[0]](data, seed, say)


def _open_factory(data: DataSpec, seed: int, say: Say | None) -> Pair:
    return _sources_of(_call_factory(data), seed, _collate_of(data))


def _open_digits(data: DataSpec, seed: int, say: Say | None) -> Pair:
    _refuse_collate(data)
    return open_digits(data.validation_fraction)


def _open_corpus(data: DataSpec, seed: int, say: Say | None) -> Pair:
    _refuse_collate(data)
    return token_sources(open_corpus(data, say), data.seq_len, data.cross_documents)


def _open_tokens(data: DataSpec, seed: int, say: Say | None) -> Pair:
    _refuse_collate(data)
    return open_token_set(data, *kind_of_source(data.source)).sources(data)


Opener = Callable[[DataSpec, int, Say | None], Pair]

# By the name in `task.data.source`; any other name is of a kind.
OPENERS: dict[str, Opener] = {"digits": _open_digits}
OF_KIND: dict[str, Opener] = {
    "text": _open_corpus, "hf": _open_corpus, "shards": _open_tokens, "megatron": _open_tokens, "object": _open_factory,
}  # fmt: skip


def is_text(source: str) -> bool:
    """Return whether `task.data.source` names text, which is tokenised into the cache."""
    return source not in OPENERS and OF_KIND[kind_of_source(source)[0]] is _open_corpus


def _refuse_collate(data: DataSpec) -> None:
    if data.collate:
        raise ConfigError(
            f"task.data.collate with task.data.source = '{data.source}'",
            "it makes batches of a user's own samples; those of text and digits have one shape",
            "leave it out, or name a data set of your own: package.module:factory",
        )


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


def _sources_of(data: Any, seed: int, collate: Any = None) -> Pair:
    """Return the sources of one data set or of a (train, validation) tuple, whose second may be None."""
    if isinstance(data, OpensSources):
        _refuse_collate_of(data, collate)
        return data.open_sources(seed)
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
        _refuse_collate_of(data, collate)
        return data
    from paceline.task.data.sources.mapped import MapSource  # imports torch, which planning on text does not need

    return MapSource(data, seed, collate)


def _refuse_collate_of(data: Any, collate: Any) -> None:
    if collate is not None:
        raise ConfigError(
            f"task.data.collate with a {type(data).__name__}", "a source makes its batches itself, in read()",
            "leave it out",
        )  # fmt: skip
