"""Packed rows: every token is a label once, no document is mixed with another, and hardly a place stays empty."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.spec.data.labels import IGNORED
from paceline.spec.task import DataSpec, ModelSpec
from paceline.task.data.facts import data_facts
from paceline.task.data.rows import packed_source
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.packing import best_fit, evened, pack, pieces_of
from paceline.task.data.source import open_sources
from paceline.task.data.sources.tokens import TokenWriter
from paceline.task.models.build import build_model
from paceline.task.objective import next_token

VOCAB = 400


def packed(folder: Path, lengths: list[int], seq_len: int, cross: bool = False) -> PackedSource:
    """Return the rows of documents of these lengths, whose tokens tell their place in the text."""
    folder.mkdir(exist_ok=True)
    with TokenWriter(folder, "train", VOCAB, VOCAB - 1) as writer:
        at = 0
        for length in lengths:
            writer.add([np.arange(at, at + length)])
            at += length
    return PackedSource(writer.result(), VOCAB, seq_len, cross)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 64))
def test_best_fit_keeps_every_piece_once_and_no_row_overflows(lengths: list[int], more: int) -> None:
    capacity = max(lengths) + more - 1
    rows = best_fit(np.array(lengths), capacity)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in rows)
    # Two rows that would both fit into one are never left.
    loads = sorted(sum(lengths[index] for index in row) for row in rows)
    assert len(loads) < 2 or loads[0] + loads[1] > capacity


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(1, 64))
def test_evened_rows_hold_the_same_pieces_and_none_is_emptier_than_the_emptiest_was(
    lengths: list[int], more: int
) -> None:
    capacity, sizes = max(lengths) + more - 1, np.array(lengths)
    before = best_fit(sizes, capacity)
    rows = evened(list(before), sizes, capacity)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths))) and len(rows) == len(before)
    fills, then = ([int(sizes[row].sum()) for row in found] for found in (rows, before))
    assert max(fills) <= capacity and min(fills) >= min(then)


@pytest.mark.parametrize(("small", "most"), [(2900, 1.03), (3200, 1.01)])
def test_ranks_have_as_many_tokens_where_small_pieces_come_to_an_end(small: int, most: float) -> None:
    """Most pieces are longer than half a row: best fit leaves some of them alone in theirs."""
    random = np.random.default_rng(2)
    lengths = np.concatenate([random.integers(60, 100, 900), random.integers(1, 12, small)])

    def skew(rows: list[np.ndarray]) -> float:
        fills = random.permutation([int(lengths[row].sum()) for row in rows])
        by_rank = fills[: len(fills) // 64 * 64].reshape(-1, 8, 8).sum(2)
        return float((by_rank.max(1) / by_rank.mean(1)).max())

    rows = best_fit(lengths, 100)
    assert min(int(lengths[row].sum()) for row in rows) < 70, "some are nearly alone"
    assert max(skew(rows) for _ in range(20)) > most > max(skew(evened(list(rows), lengths, 100)) for _ in range(20))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=2, max_size=60), st.integers(2, 40))
def test_pieces_cover_a_text_once_and_end_with_documents(sizes: list[int], seq_len: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(np.array(sizes) + 1)])
    starts, lengths = pieces_of(offsets, seq_len)
    covered = np.concatenate([np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
    assert np.array_equal(np.sort(covered), np.arange(offsets[-1] - 1))
    document = np.searchsorted(offsets[1:-1] - 1, np.arange(offsets[-1] - 1), side="right")
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        assert 1 <= length <= seq_len and len(set(document[start : start + length].tolist())) == 1
    rows = pack(starts, lengths, seq_len)
    assert sorted(rows.starts.tolist()) == sorted(starts.tolist()) and rows.firsts[-1] == len(starts)


@pytest.mark.parametrize("is_long", [False, True], ids=["place by place", "piece by piece"])
def test_every_token_is_a_label_once_after_the_token_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    monkeypatch.setattr(packed_source, "LONG_TOKENS", 0 if is_long else 1000)
    source = packed(tmp_path, [5, 1, 30, 3, 8, 8, 17, 2, 64], 16)
    batch = source.read(np.arange(source.samples))
    real = batch["labels"] != IGNORED
    assert int(real.sum()) == source.split.tokens - 1
    text = torch.from_numpy(source.split.open().astype(np.int64))
    assert torch.equal(torch.sort(batch["labels"][real]).values, torch.sort(text[1:]).values)
    following = {(int(a), int(b)) for a, b in itertools.pairwise(text)}
    pairs = zip(batch["tokens"][real].tolist(), batch["labels"][real].tolist(), strict=True)
    assert set(pairs) <= following
    assert (batch["documents"][real] > 0).all() and (batch["documents"][~real] == 0).all()
    again = pickle.loads(pickle.dumps(source)).read(np.array([1, 0]))
    assert torch.equal(again["tokens"], batch["tokens"][[1, 0]])
    assert "documents" not in packed(tmp_path / "crossed", [5, 6], 16, cross=True).read(np.array([0]))


@pytest.mark.parametrize("seq_len", [512, 2048])
def test_waste_on_the_built_in_corpus(seq_len: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "packed-corpus"
    data = DataSpec(seq_len=seq_len, rows="packed", max_bytes=2_000_000, cache_dir=str(folder), cross_documents=False)
    train, _ = open_sources(data, 7)
    assert isinstance(train, PackedSource) and train.waste < 0.01
    loads = np.add.reduceat(train.rows.lengths, train.rows.firsts[:-1])
    by_rank = loads[: len(loads) // 64 * 64].reshape(-1, 8, 8).sum(2)  # a global batch of 64 over 8 ranks
    skew = by_rank.max(1) / by_rank.mean(1)
    assert np.median(skew) <= 1.01
    assert any("stays empty" in note for note in data_facts(data).notes)


def test_gradients_do_not_depend_on_the_micro_batches(tmp_path: Path) -> None:
    source = packed(tmp_path, [5, 1, 30, 3, 8, 8, 17, 2, 20, 40], 16)
    model = build_model(ModelSpec(name="llama-1m", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32), VOCAB, 16, 7)
    model = model.double()
    ids = np.arange(source.samples)

    def gradients(parts: list[np.ndarray]) -> list[torch.Tensor]:
        model.zero_grad()
        weight = 0.0
        for part in parts:
            loss, count = next_token(model, source.read(part))
            loss.backward()
            weight += float(count)
        return [p.grad / weight for p in _trained(model) if p.grad is not None]

    whole = gradients([ids])
    for size in (1, 3):
        for one, other in zip(whole, gradients(np.array_split(ids, -(-len(ids) // size))), strict=True):
            assert float((one - other).norm()) <= 1e-10 * float(one.norm())


def test_a_document_is_computed_as_if_it_were_alone(tmp_path: Path) -> None:
    source = packed(tmp_path, [5, 1, 30, 3, 8, 8], 16)
    model = build_model(ModelSpec(name="llama-1m", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32), VOCAB, 16, 7)
    model = model.double()
    together, weight = next_token(model, source.read(np.arange(source.samples)))
    text = torch.from_numpy(source.split.open().astype(np.int64))
    alone = 0.0
    for start, length in zip(source.rows.starts.tolist(), source.rows.lengths.tolist(), strict=True):
        piece = {"tokens": text[None, start : start + length], "labels": text[None, start + 1 : start + length + 1]}
        alone += float(next_token(model, piece)[0].detach())
    assert float(together.detach()) == pytest.approx(alone, rel=1e-10)
    assert float(weight) == source.split.tokens - 1


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_rows_are_packed_once_and_never_taken_from_a_file_that_is_not_whole(tmp_path: Path) -> None:
    first = packed(tmp_path, [5, 1, 30, 3, 8, 8, 17, 2, 64], 16)
    [kept] = tmp_path.glob("train.rows-16-*")
    before = kept.stat().st_mtime_ns
    again = PackedSource(first.split, VOCAB, 16, False)
    assert not again.rows.starts.flags.writeable and kept.stat().st_mtime_ns == before
    for one, other in zip(vars(first.rows).values(), vars(again.rows).values(), strict=True):
        assert np.array_equal(one, other)
    kept.write_bytes(kept.read_bytes()[:-16])
    healed = PackedSource(first.split, VOCAB, 16, False)
    assert np.array_equal(healed.rows.starts, first.rows.starts) and kept.stat().st_size % 8 == 0
    assert not PackedSource(first.split, VOCAB, 16, False).rows.starts.flags.writeable
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.offsets", kept.name, "train.tokens"]


@pytest.mark.parametrize("cross", [True, False])
def test_rows_of_long_documents_are_laid_alike_in_both_ways(tmp_path: Path, cross: bool) -> None:
    """Most rows are one piece of a document then, some are several, and some are not full."""
    source = packed(tmp_path, np.random.default_rng(3).geometric(1 / 400, 300).tolist(), 160, cross)
    assert source._is_long
    for ids in (np.arange(source.samples), np.random.default_rng(4).integers(0, source.samples, 37), np.arange(0)):
        whole, by_place = source._laid_whole(ids), source._laid_by_place(ids)
        one, other = (source.batch(found, 0, len(ids)) for found in (whole, by_place))
        assert set(one) == set(other) == {"tokens", "labels", *([] if cross else ["documents"])}
        for name in one:
            assert torch.equal(one[name], other[name])
            assert one[name].dtype == other[name].dtype == (torch.int32 if name == "documents" else torch.int64)


@pytest.mark.parametrize("cross", [True, False])
def test_a_row_is_the_same_whatever_is_read_with_it(tmp_path: Path, cross: bool) -> None:
    """The numbers of a row's documents too: they count within the row."""
    source = packed(tmp_path, np.random.default_rng(5).geometric(1 / 30, 90).tolist(), 64, cross)
    together = source.read(np.arange(source.samples))
    for sample in range(source.samples):
        alone = source.read(np.array([sample]))
        assert all(torch.equal(alone[name][0], together[name][sample]) for name in together)
