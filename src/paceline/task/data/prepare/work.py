"""What a worker does with a part of the corpus: hashes of documents, or token shards. Each part leaves a receipt."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.durable import publish, write_text
from paceline.spec.model_folder import TOKENIZER
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.corpus_parts import CorpusPart, documents_of
from paceline.task.data.prepare.earlier import EarlierShards
from paceline.task.data.sources.documents import Damaged, in_lists
from paceline.task.data.sources.held_out import document_hash
from paceline.task.data.sources.listing import CorpusFiles
from paceline.task.data.sources.shards.layout import ShardWriter, WrittenShard
from paceline.task.data.sources.tokenizer import from_json, opened
from paceline.task.data.sources.tokens import SPLITS, dtype_for

WORK = ".work"  # the folder of what is not finished, inside of the folder that is written


@dataclass(frozen=True)
class PrepareJob:
    """What all workers of a preparation are told. `first` is the number of the first shard.

    `listing` has the kind of the corpus and none of its files, which come with the parts.
    """

    data: DataSpec
    listing: CorpusFiles
    files: int
    folder: str
    limit: int
    dedup: bool
    first: int = 0

    @property
    def work(self) -> Path:
        """The folder of what is not finished."""
        return Path(self.folder) / WORK


@dataclass(frozen=True)
class Receipt:
    """What a part has become. `bytes` counts the text that was kept, `left_out` what could not be read."""

    number: int
    shards: dict[str, WrittenShard]
    documents: int
    bytes: int
    duplicates: int
    left_out: int
    left_out_first: str


def begin_worker() -> None:
    """Keep a worker to one core: there are as many of them as cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def survey(job: PrepareJob, part: CorpusPart) -> None:
    """Write the hashes of a part's documents, unless they are there: HASHES.npy, [documents, 16] bytes."""
    path = hashes_path(job.work, part.number)
    if path.exists():
        return
    damaged = Damaged(job.data.on_bad == "skip")
    found = b"".join(document_hash(each.text) for each in documents_of(job.data, job.listing, part, damaged))
    save(path, np.frombuffer(found, dtype=np.uint8).reshape(-1, 16))


def tokenise(job: PrepareJob, part: CorpusPart) -> Receipt:
    """Write a part's token shards, unless they are there, and return the receipt."""
    path = job.work / f"{part.number:06}.json"
    if path.exists():
        return read_receipt(path)
    tokenizer = from_json((job.work / TOKENIZER).read_text(encoding="utf-8"), "prepared")
    keep: npt.NDArray[Any] | None = np.load(keep_path(job.work, part.number)) if job.dedup else None
    damaged, earlier = Damaged(job.data.on_bad == "skip"), EarlierShards(job.work)
    token_bytes = np.dtype(dtype_for(tokenizer.vocab)).itemsize
    names = {split: Path(job.folder) / f"{split}-{job.first + part.number:06}.shard" for split in SPLITS}
    writers = {split: ShardWriter(names[split], token_bytes, tokenizer.end_of_document) for split in SPLITS}
    documents, size, most = 0, 0, job.data.document_tokens
    with writers["train"], writers["validation"]:
        for batch in in_lists(documents_of(job.data, job.listing, part, damaged)):
            kept = batch if keep is None else [each for at, each in enumerate(batch, documents) if keep[at]]
            encoded = [opened(tokenizer, ids)[: most or None] for ids in tokenizer.encode([each.text for each in kept])]
            new = [(each, ids) for each, ids in zip(kept, encoded, strict=True) if not earlier.have(ids)]
            documents, size = documents + len(batch), size + sum(len(each.text) for each, _ in new)
            for split, wanted in (("train", False), ("validation", True)):
                writers[split].add([ids for each, ids in new if each.is_held_out(job.limit) is wanted])
    shards = {split: writer.result() for split, writer in writers.items()}
    for split, shard in list(shards.items()):
        if not shard.documents:
            names[split].unlink()
            del shards[split]
    kept_documents = sum(shard.documents for shard in shards.values())
    receipt = Receipt(part.number, shards, kept_documents, size, documents - kept_documents, damaged.count,
                      damaged.first)  # fmt: skip
    write_text(path, json.dumps(asdict(receipt)))
    return receipt


def read_receipt(path: Path) -> Receipt:
    """Return a receipt that was written before."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["shards"] = {split: WrittenShard(**shard) for split, shard in content["shards"].items()}
    return Receipt(**content)


def hashes_path(work: Path, number: int) -> Path:
    """Return where the hashes of a part's documents are."""
    return work / f"{number:06}.hashes.npy"


def keep_path(work: Path, number: int) -> Path:
    """Return the file that says which of a part's documents are kept."""
    return work / f"{number:06}.keep.npy"


def save(path: Path, values: npt.NDArray[Any]) -> None:
    """Write an array, whole or not at all."""
    beside = path.with_name(f".{path.name}.part")
    with beside.open("wb") as stream:
        np.save(stream, values)
    publish(beside, path)
