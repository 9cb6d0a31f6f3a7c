"""Windows and packed rows of documents of any lengths: those of one file, of shards, in runs and by place are the same.

The reference lays one token after the other. Documents are empty, of one token, as long as a row and one more or less,
or one that is longer than all others together; tokens are those at the edges of 16 bits.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.spec.data.labels import IGNORED
from paceline.spec.task import DataSpec
from paceline.task.data.rows import packed_source
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.packing import pack, pieces_of
from paceline.task.data.rows.rows_from import RowsAcross
from paceline.task.data.rows.windows import TokenSource, _documents
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards.folder import ShardIndex, write_index
from paceline.task.data.sources.shards.layout import ShardWriter
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.data.sources.tokens import TokenSplit, TokenWriter

VOCAB, END = 2**16, 2**16 - 1  # the largest vocabulary of 16 bits, whose last token ends documents


def lengths_for(seq_len: int) -> st.SearchStrategy[list[int]]:
    """Return lengths of documents: extremes, and giants among them."""
    near = st.sampled_from([0, 0, 1, 2, seq_len - 2, seq_len - 1, seq_len, seq_len + 1, 2 * seq_len - 1, 9 * seq_len])
    return st.lists(near.map(lambda length: max(0, length)) | st.integers(0, 3 * seq_len), min_size=1, max_size=30)


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    tokens = (np.arange(sum(lengths)) * 40_503 + 65_530) % END  # 65,530, ... and 0 are among them
    return np.split(tokens.astype("<u2"), np.cumsum(lengths)[:-1])


def as_split(folder: Path, documents: list[np.ndarray]) -> TokenSplit:
    with TokenWriter(folder, "train", VOCAB, END) as writer:
        writer.add(documents)
    return writer.result()


def as_shards(folder: Path, documents: list[np.ndarray], cuts: list[int], **options: Any) -> Any:
    """Return the source of the same documents in shards that end after `cuts` documents."""
    written, bounds = [], sorted({0, len(documents), *(cut % (len(documents) + 1) for cut in cuts)})
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        with ShardWriter(folder / f"{number}.shard", 2, END) as shard:
            shard.add(documents[first:last])
        written.append(shard.result())
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    write_index(folder, ShardIndex("bytes", VOCAB, END, {"train": tuple(written), "validation": ()}, {}))
    return open_sources(DataSpec(str(folder), validation_fraction=0.0, cache_dir=str(folder), **options), 7)[0]


def laid_by_hand(flat: np.ndarray, offsets: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
    """Return all packed rows, token after token."""
    rows = pack(*pieces_of(offsets, seq_len), seq_len)
    count = len(rows.firsts) - 1
    tokens, labels = np.zeros((count, seq_len), dtype=np.int64), np.full((count, seq_len), IGNORED, dtype=np.int64)
    for row in range(count):
        at = 0
        for piece in range(rows.firsts[row], rows.firsts[row + 1]):
            for place in range(rows.starts[piece], rows.starts[piece] + rows.lengths[piece]):
                tokens[row, at], labels[row, at] = flat[place], flat[place + 1]
                at += 1
    return {"tokens": tokens, "labels": labels}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_packed_rows_are_those_laid_by_hand(data: st.DataObject) -> None:
    seq_len = data.draw(st.sampled_from([1, 2, 3, 8, 17]))
    documents = documents_of(data.draw(lengths_for(seq_len)))
    cuts, is_long, cross = data.draw(st.lists(st.integers(0, 30), max_size=4)), data.draw(st.booleans()), data.draw(
        st.booleans()
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_source, "LONG_TOKENS", 0 if is_long else 10**6)
        split = as_split(Path(name), documents)
        options: dict[str, Any] = {"rows": "packed", "cross_documents": cross}
        if split.tokens < 2:
            with pytest.raises(DataError, match="do not make a single sample"):
                PackedSource(split, VOCAB, seq_len)
            return
        (Path(name) / "shards").mkdir()
        sources = [PackedSource(split, VOCAB, seq_len, cross),
                   as_shards(Path(name) / "shards", documents, cuts, seq_len=seq_len, **options)]  # fmt: skip
        wanted = laid_by_hand(np.asarray(split.open()), np.asarray(split.offsets()), seq_len)
        counted = wanted["labels"][wanted["labels"] != IGNORED]
        assert np.array_equal(np.sort(counted), np.sort(np.asarray(split.open())[1:])), "each token is a label once"
        ids = np.array(data.draw(st.lists(st.integers(0, sources[0].samples - 1), max_size=20)), dtype=np.int64)
        found = [source.read(ids) for source in sources]
        for batch in found:
            assert all(np.array_equal(batch[each].numpy(), wanted[each][ids]) for each in wanted)
        if not cross:
            assert np.array_equal(found[0]["documents"].numpy(), found[1]["documents"].numpy())
            filled = wanted["labels"][ids] != IGNORED
            assert np.array_equal(found[0]["documents"].numpy() > 0, filled), "0 is what fills a row, and nothing else"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_windows_of_shards_are_those_of_one_file(data: st.DataObject) -> None:
    seq_len = data.draw(st.sampled_from([1, 2, 3, 8, 17]))
    documents = documents_of(data.draw(lengths_for(seq_len)))
    cuts, cross = data.draw(st.lists(st.integers(0, 30), max_size=4)), data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as name:
        split = as_split(Path(name), documents)
        if split.windows(seq_len) < 1:
            with pytest.raises(DataError, match="do not make a single sample"):
                TokenSource(split, VOCAB, seq_len)
            return
        (Path(name) / "shards").mkdir()
        one = TokenSource(split, VOCAB, seq_len, cross)
        other = as_shards(Path(name) / "shards", documents, cuts, seq_len=seq_len, cross_documents=cross)
        flat, ids = np.asarray(split.open()).astype(np.int64), np.arange(one.samples)
        ids = np.array(data.draw(st.lists(st.sampled_from(ids.tolist()), max_size=20)), dtype=np.int64)
        for source in (one, other):
            batch = source.read(ids)
            for row, sample in enumerate(ids.tolist()):
                start = sample * seq_len
                assert np.array_equal(batch["tokens"][row].numpy(), flat[start : start + seq_len])
                assert np.array_equal(batch["labels"][row].numpy(), flat[start + 1 : start + 1 + seq_len])
            for wrong in ([one.samples], [-1]):
                with pytest.raises((IndexError, AssertionError)):
                    source.read(np.array(wrong))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.integers(1, 9), st.data())
def test_documents_of_windows_are_counted_as_by_looking_up_each_token(
    lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    begins = np.cumsum(np.array(lengths) + 1) - 1  # the mark at a document's end opens the next one
    windows = int(begins[-1]) // seq_len
    ids = np.array(data.draw(st.lists(st.integers(0, windows - 1), max_size=6)) if windows else [], dtype=np.int64)
    places = ids[:, None] * seq_len + np.arange(seq_len)
    found = _documents(begins, ids, seq_len)
    assert np.array_equal(found, np.searchsorted(begins, places, side="right")) and found.dtype == np.int32


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), length=st.integers(1, 9), data=st.data())
def test_rows_of_arrays_anywhere_in_memory_are_theirs(lengths: list[int], length: int, data: st.DataObject) -> None:
    arrays = [np.arange(100 * number, 100 * number + size, dtype=np.uint16) for number, size in enumerate(lengths)]
    places = [(number, at) for number, size in enumerate(lengths) for at in range(size - length + 1)]
    chosen = data.draw(st.lists(st.sampled_from(places), max_size=20)) if places else []
    rows = RowsAcross(arrays)
    numbers, starts = (np.array([place[part] for place in chosen], dtype=np.int64) for part in range(2))
    found = rows.rows(numbers, starts, length)
    wanted = [arrays[number][at : at + length] for number, at in chosen]
    assert found.shape == (len(chosen), length) and found.tolist() == [each.tolist() for each in wanted]
    for at in (-1, lengths[0] - length + 1):
        with pytest.raises(AssertionError, match="lies in its array"):
            rows.rows(np.array([0]), np.array([at]), length)
    with pytest.raises(ValueError, match="not of one type"):
        RowsAcross([*arrays, np.zeros(3, dtype=np.uint32)])
