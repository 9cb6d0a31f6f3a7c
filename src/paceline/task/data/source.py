"""How a task's data become sources: opened, mixed and put into the order that the task asks for.

What reads tables and images is imported where there are any: a plan of other data is to come at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, DataError, PacelineError
from paceline.spec.data.mix import MixSpec
from paceline.spec.import_paths import load_object
from paceline.spec.task import DataSpec
from paceline.task.data.order.mixture import MixShare, MixtureOrder
from paceline.task.data.order.of_source import ordering
from paceline.task.data.protocol import Pair, Source, is_source, opens_sources
from paceline.task.data.rows.mixed import InOrder, MixedSource
from paceline.task.data.sources.digits import open_digits
from paceline.task.data.sources.manifest import Corpus
from paceline.task.data.sources.named import kind_of_source

if TYPE_CHECKING:
    from paceline.task.data.rows.packed_source import PackedSource
    from paceline.task.data.rows.windows import TokenSource
    from paceline.task.data.sources.cache import Say
    from paceline.task.data.sources.tables.store import TextTable


def open_sources(data: object, seed: int, say: Say | None = None) -> Pair:
    """Return (train, validation or None) for a DataSpec, a data set, a Source, a tuple of two, or an OpensSources.

    There is no validation source where `validation_fraction` is 0 or what it holds out does not make one sample.
    Raises DataError for data that cannot be read, ConfigError for a factory that cannot be imported.
    """
    if not isinstance(data, DataSpec):
        return _sources_of(data, seed)
    return arranged(data, [_open_part(part, seed, say) for part in data.parts()])


def _open_part(data: DataSpec, seed: int, say: Say | None) -> Pair:
    """Return the sources of data that are no mixture, in the global order."""
    if (named := OPENERS.get(data.source)) is not None:
        return named(data, seed, say)
    return OF_KIND[kind_of_source(data.source)[0]](data, seed, say)


def arranged(data: DataSpec, pairs: Sequence[Pair]) -> Pair:
    """Return the sources of a task's data, of the sources of its parts: mixed, and in the order that it asks for.

    Held-out samples are those of all parts.
    """
    if not data.mix:
        train, validation = pairs[0]
        return (train if data.shuffle == "global" else InOrder(train, ordering(data, train))), validation
    names, trains = [each.label for each in data.mix], [train for train, _ in pairs]
    _refuse_other_tokens(names, trains)
    shares = [
        MixShare(
            samples=train.samples,
            weight=each.weight,
            changes=tuple((change.at, change.weight) for change in each.changes),
            most=_most(each, train.samples),
        )
        for each, train in zip(data.mix, trains, strict=True)
    ]
    order = MixtureOrder(shares, [ordering(data, train) for train in trains])
    held_out = [(name, validation) for name, (_, validation) in zip(names, pairs, strict=True) if validation]
    validation = MixedSource([each for _, each in held_out], [name for name, _ in held_out]) if held_out else None
    return MixedSource(trains, names, order), validation


def _refuse_other_tokens(names: Sequence[str], trains: Sequence[Source]) -> None:
    """Raise DataError where sources of a mixture were tokenised otherwise: one number would stand for two texts."""
    from paceline.task.data.rows.one_tokenizer import tokenizer_text, unlike

    texts = [(name, text) for name, train in zip(names, trains, strict=True) if (text := tokenizer_text(train))]
    for name, text in texts[1:]:
        if differs := unlike(texts[0][1], text):
            raise DataError(
                f"'{texts[0][0]}' and '{name}' were not made by one tokenizer", differs,
                "task.data.tokenizer for texts; prepared folders are made with it by paceline data prepare SOURCE OUT"
                " --set task.data.tokenizer=...",
            )  # fmt: skip


def _most(part: MixSpec, samples: int) -> int | None:
    """Return how many samples a source of a mixture gives at most; None where it has no limit."""
    limits = [part.most_samples] if part.most_samples else []
    limits += [max(1, round(part.most_epochs * samples))] if part.most_epochs else []
    return min(limits, default=None)


def _open_factory(data: DataSpec, seed: int, say: Say | None) -> Pair:
    return _sources_of(_call_factory(data), seed, _collate_of(data))


def _open_digits(data: DataSpec, seed: int, say: Say | None) -> Pair:
    _refuse_collate(data)
    return open_digits(data.validation_fraction)


def _open_corpus(data: DataSpec, seed: int, say: Say | None) -> Pair:
    from paceline.task.data.sources.cache import open_corpus

    _refuse_collate(data)
    return corpus_sources(open_corpus(data, say), data)


def _open_tokens(data: DataSpec, seed: int, say: Say | None) -> Pair:
    from paceline.task.data.sources.shards.opened import open_token_set

    _refuse_collate(data)
    return open_token_set(data, *kind_of_source(data.source)).sources(data)


def _open_table(data: DataSpec, seed: int, say: Say | None) -> Pair:
    from paceline.task.data.sources.tables.store import open_table

    _refuse_collate(data)
    return sources_of_table(open_table(data, say), data)


def sources_of_table(table: TextTable, data: DataSpec) -> Pair:
    """Return the samples of a table: (train, validation or None). One of text alone is a corpus like any other."""
    if table.columns.kind == "text":
        return corpus_sources(table.corpus, data)
    from paceline.task.data.sources.tables.table_sources import table_sources

    return table_sources(table, data)


def _open_images(data: DataSpec, seed: int, say: Say | None) -> Pair:
    from paceline.task.data.sources.images.source import open_images

    _refuse_collate(data)
    return open_images(data, kind_of_source(data.source)[1], seed)


Opener = Callable[[DataSpec, int, Any], Pair]  # the last hears what is slow, as `Say` of sources/cache.py

# By the name in `task.data.source`; any other name is of a kind.
OPENERS: dict[str, Opener] = {"digits": _open_digits}
OF_KIND: dict[str, Opener] = {
    "text": _open_corpus, "hf": _open_corpus, "shards": _open_tokens, "megatron": _open_tokens, "object": _open_factory,
    "images": _open_images, "table": _open_table,
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


def corpus_sources(corpus: Corpus, data: DataSpec) -> Pair:
    """Return the samples of a corpus as `data.rows` makes them: (train, validation or None).

    Raises DataError where the training documents do not make one sample.
    """
    if data.rows == "packed":
        return packed_sources(corpus, data.seq_len, data.cross_documents)
    return token_sources(corpus, data.seq_len, data.cross_documents)


def token_sources(corpus: Corpus, seq_len: int, cross_documents: bool = True) -> tuple[TokenSource, TokenSource | None]:
    """Return the windows of a corpus: (train, validation or None). Raises DataError where `train` has none."""
    from paceline.task.data.rows.windows import TokenSource

    train = TokenSource(corpus.train, corpus.vocab, seq_len, cross_documents)
    enough = corpus.validation.windows(seq_len) > 0
    return train, TokenSource(corpus.validation, corpus.vocab, seq_len, cross_documents) if enough else None


def packed_sources(
    corpus: Corpus, seq_len: int, cross_documents: bool = True
) -> tuple[PackedSource, PackedSource | None]:
    """Return the packed documents of a corpus: (train, validation or None). Raises DataError where `train` has none."""
    from paceline.task.data.rows.packed_source import PackedSource

    train = PackedSource(corpus.train, corpus.vocab, seq_len, cross_documents)
    enough = corpus.validation.tokens > 1
    return train, PackedSource(corpus.validation, corpus.vocab, seq_len, cross_documents) if enough else None


def _call_factory(data: DataSpec) -> object:
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


def _collate_of(data: DataSpec) -> object:
    """Return the function that makes batches, None for the usual one. Raises ConfigError where it is none."""
    found = load_object(data.collate, "task.data.collate") if isinstance(data.collate, str) and data.collate else None
    found = found or data.collate or None
    if found is not None and not callable(found):
        raise ConfigError(
            f"task.data.collate = '{data.collate}' is of type {type(found).__name__}", "it cannot be called",
            "a function collate(samples) or collate(samples, ids) that returns a batch",
        )  # fmt: skip
    return found


def _sources_of(data: object, seed: int, collate: object = None) -> Pair:
    """Return the sources of one data set or of a (train, validation) tuple, whose second may be None."""
    if opens_sources(data):
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


def _wrap(data: object, seed: int, collate: Any = None) -> Source:
    if is_source(data):
        _refuse_collate_of(data, collate)
        return data
    from paceline.task.data.sources.mapped import MapSource  # imports torch, which planning on text does not need

    return MapSource(data, seed, collate)


def _refuse_collate_of(data: object, collate: object) -> None:
    if collate is not None:
        raise ConfigError(
            f"task.data.collate with a {type(data).__name__}", "a source makes its batches itself, in read()",
            "leave it out",
        )  # fmt: skip
