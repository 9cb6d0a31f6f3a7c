"""What a plan needs to know of the data. Imports no torch unless the data are a user's own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.spec.import_paths import is_import_path, scheme_of
from paceline.spec.task import DataSpec
from paceline.task.data.order.of_source import order_of
from paceline.task.data.protocol import Source
from paceline.task.data.source import corpus_sources, is_text, open_sources, sources_of_table
from paceline.task.data.sources.manifest import Corpus
from paceline.task.data.sources.named import TOKEN_KINDS, kind_of_source
from paceline.units import format_data, plural

if TYPE_CHECKING:
    from paceline.task.data.rows.packed_source import PackedSource
    from paceline.task.data.sources.cache import Say
    from paceline.task.data.sources.shards.opened import TokenSet
    from paceline.task.data.sources.tables.store import TextTable

NO_VALIDATION_PART = (
    "none of it is held out: the data set has no validation part (a pair of train and validation, or"
    " task.evaluate.sets)"
)
UNEVEN = 2.0  # times more or less than was asked for, from which on it is told what is held out


@dataclass(frozen=True)
class DataFacts:
    """Size and kind of the data. `samples` are those of the training split; `bytes` is the text of both splits, 0 if
    the data are no text. `documents` counts both splits of a text, and the samples of other data.

    `notes` say what a user would want to know and might not expect, one sentence each. `card` says where the data are
    from and how they were made, as far as that is on record.
    """

    samples: int
    items_per_sample: int
    unit: str
    vocab: int | None
    bytes: int
    documents: int
    description: str
    fingerprint: str
    validation_samples: int = 0
    notes: tuple[str, ...] = ()
    card: dict[str, Any] = field(default_factory=dict)
    end: int | None = None  # samples after which a mixture has none left
    shown: tuple[str, ...] = ()  # a table's columns and first rows as the model sees them; that nothing is held out
    longest: int = 0  # tokens of the longest sample, where samples are filled up to the longest beside them


def data_facts(data: object, say: Say | None = None) -> DataFacts:
    """Return the facts of a DataSpec (or of data given as objects); text is tokenised into the cache if it is not yet.

    Raises the errors of `open_sources`.
    """
    if isinstance(data, DataSpec) and data.mix:
        return _mixture_facts(data, say)
    if isinstance(data, DataSpec) and is_text(data.source):
        from paceline.task.data.sources.cache import open_corpus

        return _text_facts(data, open_corpus(data, say))
    if isinstance(data, DataSpec) and (kind := kind_of_source(data.source))[0] in TOKEN_KINDS:
        from paceline.task.data.sources.shards.opened import open_token_set

        return _token_facts(data, open_token_set(data, *kind))
    if isinstance(data, DataSpec) and kind_of_source(data.source)[0] == "table":
        from paceline.task.data.sources.tables.store import open_table

        return _table_facts(data, open_table(data, say))
    train, validation = open_sources(data, seed=0)
    documents = train.samples + (validation.samples if validation else 0)
    if isinstance(data, DataSpec) and data.source == "digits":
        description = f"{documents:,} handwritten digits"
    elif (described := getattr(train, "described", None)) is not None:
        description = str(described)
    else:
        name = data.source if isinstance(data, DataSpec) else _name_of(train)
        description = f"{plural(train.samples, 'sample')} of {name}"
    shown = (NO_VALIDATION_PART,) if validation is None and is_own(data) else ()
    skipped = getattr(getattr(train, "listing", None), "skipped", ())
    notes = (f"files: {', '.join(map(str, skipped))}",) if skipped else ()
    facts = _facts(train, validation, 0, documents, description, notes)
    longest = int(getattr(train, "longest", 0))
    return dataclasses.replace(facts, shown=shown, longest=longest)


def is_own(data: object) -> bool:
    """Return whether the data are a data set of the user's own, given as an object or named by its import path."""
    if not isinstance(data, DataSpec) or not isinstance(data.source, str):
        return True
    return not scheme_of(data.source)[0] and is_import_path(data.source)


def _token_facts(data: DataSpec, tokens: TokenSet) -> DataFacts:
    train, validation = tokens.sources(data)
    short = validation is None and tokens.validation.tokens
    notes = _packed_notes(train)
    facts = _facts(train, validation, tokens.text_bytes, tokens.documents, tokens.what, notes, tokens.card)
    shown = (_nothing_held_out(data, tokens.validation.tokens, tokens.documents),) if short else ()
    return dataclasses.replace(facts, shown=shown)


def _packed_notes(train: Source) -> tuple[str, ...]:
    """Return what is to be said of packed rows; nothing of others."""
    from paceline.task.data.rows.packed_source import PackedSource

    return (_packed_note(train),) if isinstance(train, PackedSource) else ()


def _packed_note(train: PackedSource) -> str:
    return f"documents are packed into rows of {train.items_per_sample:,} tokens; {train.waste:.2%} stays empty"


def _nothing_held_out(data: DataSpec, tokens: int, documents: int) -> str:
    """Return why none of the data is held out, and what to do: printed with the data, not among notes."""
    if documents == 1:
        return "none of it is held out: the text is one document (task.evaluate.sets names other data)"
    needed = data.seq_len + 1
    return f"none of it is held out: a sample needs {needed:,} tokens, {tokens:,} are apart (validation_fraction)"


def _uneven_note(data: DataSpec, corpus: Corpus) -> str:
    """Return what is held out, and by which rule, where that is far from the share that was asked for."""
    held, asked = corpus.validation, data.validation_fraction
    share = held.tokens / max(1, held.tokens + corpus.train.tokens)
    if asked / UNEVEN <= share <= asked * UNEVEN:
        return ""
    return (
        f"held out: {held.documents:,} of {corpus.documents:,} documents, which are {share:.0%} of all tokens, where"
        f" validation_fraction asks for {asked:.0%}: documents are held out whole, those whose text has the least hash"
    )


def _mixture_facts(data: DataSpec, say: Say | None) -> DataFacts:
    """Return the facts of all sources of a mixture together."""
    parts = [data_facts(part, say) for part in data.parts()]
    train, validation = open_sources(data, seed=0)
    whole = sum(each.weight for each in data.mix)
    shares = ", ".join(f"{each.label} {each.weight / whole:.0%}" for each in data.mix)
    notes = [f"{each.label}: {note}" for each, part in zip(data.mix, parts, strict=True) for note in part.notes]
    facts = _facts(
        train,
        validation,
        sum(part.bytes for part in parts),
        sum(part.documents for part in parts),
        f"a mixture of {shares}",
        tuple(notes),
        {each.label: part.card for each, part in zip(data.mix, parts, strict=True) if part.card},
    )
    longest = getattr(train, "longest", 0)
    return dataclasses.replace(facts, end=getattr(order_of(train), "end", None), longest=longest)


def _text_facts(data: DataSpec, corpus: Corpus) -> DataFacts:
    train, validation = corpus_sources(corpus, data)
    notes = []
    if validation is not None and (note := _uneven_note(data, corpus)):
        notes.append(note)
    notes += _packed_notes(train)
    if data.tokenizer == "bpe" and corpus.vocab < data.vocab:
        notes.append(f"the text offers merges for {corpus.vocab:,} tokens, fewer than vocab = {data.vocab:,}")
    notes += _skipped_notes(corpus)
    description = f"{format_data(corpus.bytes)} of {corpus.what}"
    facts = _facts(train, validation, corpus.bytes, corpus.documents, description, tuple(notes))
    shown = _left_out(corpus, "documents")
    if validation is None and data.validation_fraction:
        shown.append(_nothing_held_out(data, corpus.validation.tokens, corpus.documents))
    return dataclasses.replace(facts, shown=tuple(shown))


def _table_facts(data: DataSpec, table: TextTable) -> DataFacts:
    from paceline.task.data.sources.tables.in_words import shown_lines, table_card, table_description, table_notes

    corpus = table.corpus
    train, validation = sources_of_table(table, data)
    notes = [*_skipped_notes(corpus), *table_notes(table, data, train)]
    notes += _packed_notes(train)
    described = table_description(table)
    facts = _facts(train, validation, corpus.bytes, corpus.documents, described, tuple(notes), table_card(table))
    shown = [*shown_lines(table, data), *_left_out(corpus, "rows")]
    if validation is None and data.validation_fraction:
        shown.append("none of it is held out: the table has too few rows (raise validation_fraction)")
    return dataclasses.replace(facts, shown=tuple(shown), longest=getattr(train, "longest", 0))


def _left_out(corpus: Corpus, what: str) -> list[str]:
    """Return how many documents or rows are damaged and left out: told with the data at every start."""
    left, first = corpus.left_out, corpus.left_out_first
    return [f"{left:,} damaged {what} are left out, the first: {first}"] if left else []


def _skipped_notes(corpus: Corpus) -> list[str]:
    return [f"files: {', '.join(map(str, corpus.skipped))}"] if corpus.skipped else []


def _facts(
    train: Source,
    validation: Source | None,
    size: int,
    documents: int,
    description: str,
    notes: tuple[str, ...] = (),
    card: dict[str, object] | None = None,
) -> DataFacts:
    return DataFacts(
        samples=train.samples,
        items_per_sample=train.items_per_sample,
        unit=train.unit,
        vocab=train.vocab,
        bytes=size,
        documents=documents,
        description=description,
        fingerprint=train.fingerprint,
        validation_samples=validation.samples if validation else 0,
        notes=notes,
        card=card or {},
    )


def _name_of(source: Source) -> str:
    return type(getattr(source, "dataset", source)).__name__
