"""Paceline's readers, through the stream of batches that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.run.loop.loader import BatchStream, bytes_of
from paceline.spec.plan import Plan
from paceline.spec.task import DataSpec
from paceline.task.data.depth import DepthRule
from paceline.task.data.order.mixture import MixShare, MixtureOrder
from paceline.task.data.order.of_source import GlobalOrder
from paceline.task.data.order.windowed import WindowedOrder
from paceline.task.data.read_ahead import ReadAhead
from paceline.task.data.rows.mixed import InOrder, MixedSource
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.source import open_sources
from paceline.task.data.sources.tokens import TokenSplit
from readers import ROWS, SEED, SEQ_LEN, VOCAB, Batches

MOST_BYTES = 256 * 2**20  # of batches ahead: a run's default
BLOCK, WINDOW = 2048, 16  # of the order of two levels


def stream_of(source: Any, rows: int = ROWS) -> BatchStream:
    """Return the stream of a source's batches on one device."""
    return BatchStream(source, SEED, Plan(micro_batch=rows, batch_samples=rows), 0, torch.device("cpu"))


def split_of(folder: Path) -> TokenSplit:
    """Return the tokens of the corpus, and where its documents end."""
    tokens = (folder / "tokens" / "train.tokens").stat().st_size // 2
    documents = (folder / "tokens" / "train.offsets").stat().st_size // 8 - 1
    return TokenSplit(str(folder / "tokens"), "train", "<u2", tokens, documents, "0" * 32)


def _read(source: Any) -> Batches:
    stream, position = stream_of(source), 0
    while True:
        yield stream.at(position).micro_batches[0].data
        position += ROWS


def _read_ahead(source: Any) -> Batches:
    """Read in a thread, however short reads are: more batches ahead, and several each time that it is woken."""
    stream, rule = stream_of(source), DepthRule(MOST_BYTES, on_device=True, bytes_of=bytes_of, short_read=0.0)
    return _ahead(ReadAhead(stream.at, lambda: None, rule, begin_reads=stream.gathered))


def _read_while_busy(source: Any) -> Batches:
    """Read each batch once the step before is begun: what DepthRule chooses beside a device for reads this short."""
    return _ahead(ReadAhead(stream_of(source).at))


def _ahead(ahead: ReadAhead[Any]) -> Batches:
    step = begun = 1
    while True:
        batch = ahead.take((step - 1) * ROWS, step)
        step += 1
        begun = max(begun, step)
        while begun < step + max(1, ahead.depth):
            ahead.begin((begun - 1) * ROWS, begun)
            begun += 1
        ahead.read_begun()
        yield batch.micro_batches[0].data


def windows(folder: Path) -> Batches:
    """Windows in the global order."""
    return _read(TokenSource(split_of(folder), VOCAB, SEQ_LEN))


def windows_ahead(folder: Path) -> Batches:
    """The same, read ahead by a thread, which no run does with reads this short."""
    return _read_ahead(TokenSource(split_of(folder), VOCAB, SEQ_LEN))


def windows_while_busy(folder: Path) -> Batches:
    """The same, each batch read once the step before is begun."""
    return _read_while_busy(TokenSource(split_of(folder), VOCAB, SEQ_LEN))


def windows_of_blocks(folder: Path) -> Batches:
    """Windows in the order of two levels."""
    source = TokenSource(split_of(folder), VOCAB, SEQ_LEN)
    return _read(InOrder(source, WindowedOrder(source.samples, BLOCK, WINDOW)))


def packed(folder: Path) -> Batches:
    """Rows of whole documents."""
    return _read(PackedSource(split_of(folder), VOCAB, SEQ_LEN))


def packed_apart(folder: Path) -> Batches:
    """The same, with the number of each token's document."""
    return _read(PackedSource(split_of(folder), VOCAB, SEQ_LEN, cross_documents=False))


def mixed(folder: Path) -> Batches:
    """Windows of three sources with weights of their own."""
    sources = [TokenSource(split_of(folder), VOCAB, SEQ_LEN) for _ in range(3)]
    shares = [MixShare(source.samples, weight) for source, weight in zip(sources, (3.0, 1.0, 0.5), strict=True)]
    order = MixtureOrder(shares, [GlobalOrder(source.samples) for source in sources])
    return _read(MixedSource(sources, ["a", "b", "c"], order))


def of_shards(folder: str, **options: Any) -> Any:
    """Return the source of the same tokens in a folder of token shards."""
    return open_sources(DataSpec(folder, seq_len=SEQ_LEN, validation_fraction=0.0, **options), SEED)[0]


def shards(folder: Path) -> Batches:
    """Windows of token shards, whose checksums are held at the first touch."""
    return _read(of_shards(str(folder / "shards")))


def shards_ahead(folder: Path) -> Batches:
    """The same, each batch read once the step before is begun."""
    return _read_while_busy(of_shards(str(folder / "shards")))
