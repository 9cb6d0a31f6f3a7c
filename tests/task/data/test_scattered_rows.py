"""Rows at scattered places of a large file on a disk: they are read, and not the megabytes that follow each of them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.run.loop.loader import BatchStream
from paceline.spec.plan import Plan
from paceline.task.data.order.bucketed import BucketedOrder
from paceline.task.data.order.mixture import MixShare, MixtureOrder
from paceline.task.data.order.of_source import FiledOrder, GlobalOrder
from paceline.task.data.order.windowed import WindowedOrder
from paceline.task.data.rows.mixed import InOrder, MixedSource
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.tokens import TokenSplit, TokenWriter
from paceline.task.data.storage import paging

VOCAB, SEQ_LEN, ROWS, SEED = 2**16, 1024, 4, 3


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> TokenSplit:
    """Return 16 MB of tokens in documents of one and a half rows."""
    folder = tmp_path_factory.mktemp("corpus")
    with TokenWriter(folder, "train", VOCAB, VOCAB - 1) as writer:
        for first in range(0, 5500, 100):
            writer.add([np.arange(n, n + 3 * SEQ_LEN // 2) % (VOCAB - 1) for n in range(first, first + 100)])
    return writer.result()


def resident_pages(split: TokenSplit) -> int:
    """Return how many pages of the split's tokens the system holds in memory."""
    with Path(split.folder, "train.tokens").open("rb") as stream:
        with mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            array = np.frombuffer(mapped, dtype=np.uint8)
            found = np.zeros(-(-len(mapped) // mmap.PAGESIZE), dtype=np.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            assert not libc.mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(mapped)),
                                    ctypes.c_void_p(found.ctypes.data))  # fmt: skip
            del array
        return int((found & 1).sum())


def go_cold(split: TokenSplit) -> None:
    """Have the system drop the tokens, or skip the test where it does not."""
    with Path(split.folder, "train.tokens").open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(split):
        pytest.skip("this file system keeps what it was told to drop")


def stream_of(source: Any) -> BatchStream:
    return BatchStream(source, SEED, Plan(micro_batch=ROWS, batch_samples=ROWS), 0, torch.device("cpu"))


def opened(kind: str, split: TokenSplit) -> Any:
    source: Any = (PackedSource if "packed" in kind else TokenSource)(split, VOCAB, SEQ_LEN)
    if kind == "short packed":
        source._is_long = False
    if kind == "bucketed":
        return InOrder(source, BucketedOrder(np.arange(source.samples) % 7, 4, 64))
    if kind == "mixed":
        shares = [MixShare(source.samples, 1.0)] * 2
        orders = [GlobalOrder(source.samples)] * 2
        return MixedSource([source, opened("plain", split)], ["a", "b"], MixtureOrder(shares, orders))
    return source


@pytest.mark.parametrize("kind", ["plain", "packed", "short packed", "bucketed", "mixed"])
def test_a_batch_of_a_cold_large_file_reads_its_own_pages_alone(
    split: TokenSplit, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches are those of a source that knows nothing of it."""
    wanted = [stream_of(opened(kind, split)).at(step * ROWS).micro_batches[0].data for step in range(6)]
    monkeypatch.setattr(paging, "LARGE_BYTES", 0)
    source = opened(kind, split)
    stream = stream_of(source)
    go_cold(split)
    for step in range(6):
        found = stream.at(step * ROWS).micro_batches[0].data
        assert all(torch.equal(found[name], wanted[step][name]) for name in found)
        if not step:  # a row is 2 KiB, and of packed ones each piece may lie on pages of its own
            assert 0 < resident_pages(split) <= 4 * ROWS * 2


def test_rows_in_memory_are_not_asked_for_again(split: TokenSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "LARGE_BYTES", 0)
    monkeypatch.setattr(paging, "COLD_SECONDS", 1e9)
    source = opened("plain", split)
    source.reads_scattered()
    asked = list[int]()
    expect = paging.ScatteredRows.expect
    monkeypatch.setattr(paging.ScatteredRows, "expect", lambda self, *spans: asked.append(1) or expect(self, *spans))
    for _ in range(3):
        source.read(np.arange(4))
    assert len(asked) == 1, "what came as fast as memory does is in memory"
    monkeypatch.setattr(paging, "COLD_SECONDS", 0.0)
    for _ in range(3):
        source.read(np.arange(4))
    assert len(asked) == 3, "whatever takes longer is asked for ahead, from the next time on"


def test_small_files_and_orders_of_neighbours_are_read_as_the_system_does(
    split: TokenSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = opened("plain", split)
    stream_of(plain)
    assert plain._scattered is None, "16 MB are in memory after some steps"
    monkeypatch.setattr(paging, "LARGE_BYTES", 0)
    for order in (FiledOrder(plain.samples), WindowedOrder(plain.samples, 8, 4)):
        source = opened("plain", split)
        stream_of(InOrder(source, order))
        assert source._scattered is None
    stream_of(InOrder(plain, GlobalOrder(plain.samples)))
    assert plain._scattered is not None
