"""The manifest of a tokenised corpus: what its folder holds, and how to see that it is intact."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.spec.model_folder import TOKENIZER
from paceline.task.data.sources.listing import Skipped
from paceline.task.data.sources.tokenizer import Tokenizer, from_json
from paceline.task.data.sources.tokens import SPLITS, TokenSplit, dtype_for, file_digest, offsets_name, tokens_name

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus on disk. `bytes` counts the documents' text; `what` names it for people.

    `left_out` counts documents that could not be read, and `left_out_first` says what was wrong with the first.
    """

    folder: str
    key: str
    tokenizer: str
    vocab: int
    end_of_document: int
    documents: int
    bytes: int
    train: TokenSplit
    validation: TokenSplit
    what: str = "text"
    left_out: int = 0
    left_out_first: str = ""
    skipped: tuple[Skipped, ...] = ()  # files of a folder that are not read

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer that wrote the tokens."""
        return from_json((Path(self.folder) / TOKENIZER).read_text(encoding="utf-8"), self.tokenizer)


def write_manifest(
    folder: Path,
    key: str,
    tokenizer: Tokenizer,
    documents: int,
    size: int,
    splits: Sequence[TokenSplit],
    others: Sequence[str] = (),
) -> None:
    """Write the tokenizer and, after everything else is on the disk, the manifest. Raises OSError.

    `others` are further files of the folder that belong to it.
    """
    _write(folder / TOKENIZER, tokenizer.to_json())
    names = [TOKENIZER, *others, *(name(split) for split in SPLITS for name in (tokens_name, offsets_name))]
    known = {tokens_name(split.name): split.digest for split in splits}  # hashed while they were written
    files = {}
    for name in names:
        found = (folder / name).stat()
        digest = known.get(name) or file_digest(folder / name)
        files[name] = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "digest": digest}
    manifest = {
        "key": key,
        "tokenizer": tokenizer.name,
        "vocab": tokenizer.vocab,
        "end_of_document": tokenizer.end_of_document,
        "documents": documents,
        "bytes": size,
        "splits": {split.name: {"tokens": split.tokens, "documents": split.documents} for split in splits},
        "files": files,
    }
    _write(folder / MANIFEST, json.dumps(manifest, indent=1))


def load_corpus(folder: Path) -> Corpus | None:
    """Return the corpus in `folder`, or None where there is none, or one that is not as it was written.

    A file whose size and time are as recorded is taken as intact; one with another time (copied, or touched by
    something) is read and compared by its hash.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        splits = {name: _split(folder, name, manifest) for name in SPLITS}
        corpus = Corpus(
            folder=str(folder),
            key=str(manifest["key"]),
            tokenizer=str(manifest["tokenizer"]),
            vocab=int(manifest["vocab"]),
            end_of_document=int(manifest["end_of_document"]),
            documents=int(manifest["documents"]),
            bytes=int(manifest["bytes"]),
            train=splits["train"],
            validation=splits["validation"],
        )
        intact = all(_intact(folder / name, record) for name, record in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return corpus if intact else None


def _split(folder: Path, name: str, manifest: dict[str, Any]) -> TokenSplit:
    counts, digest = manifest["splits"][name], manifest["files"][tokens_name(name)]["digest"]
    tokens, documents = int(counts["tokens"]), int(counts["documents"])
    dtype = dtype_for(int(manifest["vocab"]))
    return TokenSplit(str(folder), name, dtype, tokens, documents, str(digest))


def _intact(path: Path, record: dict[str, Any]) -> bool:
    found = path.stat()
    if found.st_size != record["bytes"]:
        return False
    if found.st_mtime_ns == record["mtime_ns"]:
        return True
    if file_digest(path) != record["digest"]:
        return False
    with contextlib.suppress(PermissionError):  # a cache that others own is hashed each time
        os.utime(path, ns=(found.st_atime_ns, int(record["mtime_ns"])))  # so that it is hashed only once
    return True


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
