"""The token cache: each corpus is tokenised once, whoever asks first.

    CACHE/corpora/KEY/   train.tokens train.offsets validation.tokens validation.offsets tokenizer.json manifest.json
    CACHE/index/SIGNATURE.json   which KEY the files had when their paths, sizes and times were these
    CACHE/locks/SIGNATURE.lock   held by the one process that builds

KEY is a hash of the documents' bytes, the tokenizer and the split, so equal data are kept once and changed data
never match. The index only saves reading the documents again. A corpus is built in a folder beside and renamed into
place when it is complete: no reader sees half of one, whatever dies. Locks only save work; without them (some
network file systems) two builders both finish and one result stays.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import DataError
from paceline.spec.model_folder import TOKENIZER
from paceline.spec.task import DataSpec
from paceline.task.data.sources.cache_folders import (
    build_folder,
    hash_of,
    index_path,
    lock_of,
    write_atomically,
    written_to,
)
from paceline.task.data.sources.documents import Damaged, in_lists, read_documents
from paceline.task.data.sources.files import list_files
from paceline.task.data.sources.held_out import document_hash, split_limit, split_value
from paceline.task.data.sources.listing import CorpusFiles
from paceline.task.data.sources.manifest import Corpus, load_corpus, write_manifest
from paceline.task.data.sources.tokenizer import (
    LEARNT,
    ByteTokenizer,
    Tokenizer,
    is_own,
    load_tokenizer,
    opened,
    train_bpe,
)
from paceline.task.data.sources.tokens import SPLITS, TokenWriter
from paceline.units import format_data, plural

FORMAT = 1  # raise it when the same documents would give other files

Say = Callable[[str], None]


def open_corpus(data: DataSpec, say: Say | None = None) -> Corpus:
    """Return the tokenised corpus of `data`, from the cache, or built into it first.

    `say` is called with a line of progress when there is work to do. Raises DataError for documents that cannot be
    read, StorageError for a cache that cannot be written.
    """
    listing = list_files(data)
    root = cache_root(data)
    signature = signature_of(data, listing)
    corpus = _find(root, signature)
    if corpus is None:
        with written_to(root), lock_of(root, signature) as alone:
            corpus = _find(root, signature) or _build(data, listing, root, signature, alone, say)
    return replace(corpus, what=listing.what, skipped=listing.skipped)


def known_corpus(data: DataSpec, key: str) -> Corpus | None:
    """Return the corpus of that key from the cache of `data`, or None. No document is looked for."""
    return load_corpus(cache_root(data) / "corpora" / key)


def cache_root(data: DataSpec) -> Path:
    """Return the cache's folder: `data.cache_dir`, or `paceline` in the user's cache folder."""
    if data.cache_dir:
        return Path(data.cache_dir).expanduser()
    user = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification says to ignore a relative path.
    return (Path(user) if user.startswith("/") else Path.home() / ".cache") / "paceline"


@dataclass(frozen=True)
class _Survey:
    """What the first reading of the documents finds: their hash and number, and where to split."""

    content: str
    documents: int
    bytes: int
    limit: int
    damaged: Damaged


def _survey(data: DataSpec, listing: CorpusFiles) -> _Survey:
    digest = hashlib.blake2b(digest_size=16)
    documents = size = 0
    damaged, named = Damaged(data.on_bad == "skip"), set[bool]()

    def values() -> Iterator[int]:
        nonlocal documents, size
        for document in read_documents(data, listing, damaged):
            content = document_hash(document.text)
            digest.update(content)
            if document.held_out is not None:
                digest.update(bytes([document.held_out]))
                named.add(document.held_out)
            documents, size = documents + 1, size + len(document.text)
            if document.held_out is None:
                yield split_value(content)

    limit = split_limit(values(), data.validation_fraction)
    if not documents:
        raise DataError(
            f"'{data.source}' holds no text",
            f"{plural(len(listing.files), 'file')} read, and no text found"
            + (f"; {damaged.count:,} documents were left out, the first: {damaged.first}" if damaged.count else ""),
            "name other data",
        )
    if named == {True}:
        raise DataError(
            f"'{data.source}' holds no text to train on", "all of it is in files that are called after a validation",
            "name those files themselves, or rename them",
        )  # fmt: skip
    return _Survey(digest.hexdigest(), documents, size, limit, damaged)


def _build(data: DataSpec, listing: CorpusFiles, root: Path, signature: str, alone: bool, say: Say | None) -> Corpus:
    """Return the corpus, tokenising it unless the documents' bytes are found to be known already."""
    survey = _survey(data, listing)
    limit = [data.document_tokens] if data.document_tokens else []
    key = hash_of([FORMAT, survey.content, document_identity(data), data.validation_fraction, *limit])
    final = root / "corpora" / key
    corpus = load_corpus(final)
    if corpus is None:
        if say:
            how = f"{data.tokenizer} {data.vocab:,}" if data.tokenizer == "bpe" else data.tokenizer
            say(f"tokenising {format_data(survey.bytes)} of {listing.what} ({how}) into {final}")
        write = functools.partial(_write_corpus, data, listing, survey, key)
        corpus = build_folder(final, signature, alone, write, load_corpus)
    left_out, first = survey.damaged.count, survey.damaged.first
    index = {"key": key, **({"left_out": left_out, "left_out_first": first} if left_out else {})}
    write_atomically(index_path(root, signature), json.dumps(index))
    return replace(corpus, left_out=left_out, left_out_first=first)


def _write_corpus(data: DataSpec, listing: CorpusFiles, survey: _Survey, key: str, folder: Path) -> None:
    """Tokenise all documents into `folder`; the manifest comes last."""

    def training_texts() -> Iterator[bytes]:
        for document in read_documents(data, listing):
            if not document.is_held_out(survey.limit):
                yield document.text

    tokenizer: Tokenizer
    if data.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif data.tokenizer == "bpe":
        tokenizer = train_bpe(training_texts(), data.vocab)
    else:
        tokenizer = load_tokenizer(data.tokenizer)
    digest = hashlib.blake2b(digest_size=16)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(TokenWriter(folder, split, tokenizer.vocab, tokenizer.end_of_document))
            for split in SPLITS
        ]
        for batch in in_lists(read_documents(data, listing)):
            for document in batch:
                digest.update(document_hash(document.text))
                if document.held_out is not None:
                    digest.update(bytes([document.held_out]))
            encoded = [opened(tokenizer, ids)[: data.document_tokens or None]
                       for ids in tokenizer.encode([document.text for document in batch])]  # fmt: skip
            held_out = [document.is_held_out(survey.limit) for document in batch]
            for writer, wanted in zip(writers, (False, True), strict=True):
                writer.add([ids for ids, held in zip(encoded, held_out, strict=True) if held is wanted])
    if digest.hexdigest() != survey.content:
        raise DataError(
            f"'{data.source}' changed while it was read",
            "its second reading gave other documents than its first",
            "wait until nothing writes to it",
        )
    write_manifest(folder, key, tokenizer, survey.documents, survey.bytes, [writer.result() for writer in writers])


def tokenizer_identity(data: DataSpec) -> str:
    """Return what, with the documents, decides the tokens."""
    if data.tokenizer == "bytes":
        return ByteTokenizer.identity
    if data.tokenizer != "bpe":
        own = LEARNT if is_own(data.tokenizer) else ""  # a labelled text ends otherwise
        return own + load_tokenizer(data.tokenizer).identity
    try:
        from importlib.metadata import version

        return f"bpe-{data.vocab}-{version('tokenizers')}"  # another version may learn other merges
    except ImportError:
        return f"bpe-{data.vocab}"  # training will say which package is missing


def document_identity(data: DataSpec) -> str:
    """Return what, with the documents, decides the tokens of texts that begin as their tokenizer has them begin."""
    opening = () if is_own(data.tokenizer) else load_tokenizer(data.tokenizer).opening
    return tokenizer_identity(data) + (f"-opened-{opening}" if opening else "")


def signature_of(data: DataSpec, listing: CorpusFiles) -> str:
    """Return a hash of everything that decides the corpus, taking a file's size and time for its content."""
    tokenizer: list[object] = [data.tokenizer, data.vocab if data.tokenizer == "bpe" else 0]
    path = Path(data.tokenizer.removeprefix(LEARNT)).expanduser()
    path = path / TOKENIZER if path.is_dir() else path
    if data.tokenizer not in ("bytes", "bpe") and path.is_file():
        tokenizer += [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
    files = [file.decides() for file in listing.files]
    given = [FORMAT, listing.kind, tokenizer, data.validation_fraction, data.max_bytes, data.text_field, files]
    if (data.document_tokens, data.score_min, data.score_max) != (0, None, None):
        given.append([data.document_tokens, data.score_field, data.score_min, data.score_max])
    if data.on_bad == "skip":
        given.append("skip")
    if not is_own(data.tokenizer):
        given.append("opened")  # earlier releases had no opening
    return hash_of(given)


def _find(root: Path, signature: str) -> Corpus | None:
    """Return the corpus that the index names for the signature, or None if it must be built (again)."""
    try:
        index = json.loads(index_path(root, signature).read_text())
        key, left_out = str(index["key"]), int(index.get("left_out", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    corpus = load_corpus(root / "corpora" / key)
    first = str(index.get("left_out_first", ""))
    return replace(corpus, left_out=left_out, left_out_first=first) if corpus and left_out else corpus
