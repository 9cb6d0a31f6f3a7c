"""Rows of several steps that are gathered at once: every batch is the one that a read by itself gives."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DamagedData, DataError
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.task import DataSpec
from paceline.task.data import rows_together
from paceline.task.data.order.many_steps import StepIds
from paceline.task.data.order.mixture import MixShare, MixtureOrder
from paceline.task.data.order.of_source import GlobalOrder, ids_at
from paceline.task.data.rows.mixed import MixedSource
from paceline.task.data.rows.packed import STARTS, SaysStarts
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.rows_together import RowsTogether
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards.folder import ShardIndex, write_index
from paceline.task.data.sources.shards.layout import ShardWriter
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.data.sources.tokens import TokenSplit, TokenWriter

VOCAB, SEQ_LEN, SEED = 512, 24, 5
ALONE = ("windows", "windows apart", "packed", "packed apart", "packed apart, long", "shards", "packed shards")
KINDS = (*ALONE, *(f"mixed {kind}" for kind in ALONE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the same documents as a corpus and as three shards."""
    found, random = tmp_path_factory.mktemp("corpus"), np.random.default_rng(1)
    documents = [random.integers(0, VOCAB - 1, length) for length in random.geometric(1 / 20, 200)]
    with TokenWriter(found, "train", VOCAB, VOCAB - 1) as writer:
        writer.add(documents)
    shards = found / "shards"
    shards.mkdir()
    written = []
    for number, first in enumerate((0, 70, 140)):
        with ShardWriter(shards / f"{number}.shard", 2, VOCAB - 1) as shard:
            shard.add(documents[first : first + 70])
        written.append(shard.result())
    (shards / "tokenizer.json").write_text(ByteTokenizer().to_json())
    write_index(shards, ShardIndex("bytes", VOCAB, VOCAB - 1, {"train": tuple(written), "validation": ()}, {}))
    return found


def opened(kind: str, folder: Path) -> Any:
    """Return a source of a kind; of a mixture the second source is no shards, and packs its rows in the other way."""
    if "mixed" in kind:
        sources = [
            opened(kind.replace("mixed ", ""), folder),
            opened(kind.replace("mixed ", "").replace("shards", ""), folder),
        ]
        sources[1]._is_long = True
        shares = [MixShare(each.samples, weight) for each, weight in zip(sources, (2.0, 1.0), strict=True)]
        return MixedSource(sources, ["a", "b"], MixtureOrder(shares, [GlobalOrder(each.samples) for each in sources]))
    if "shards" in kind:
        rows = "packed" if "packed" in kind else "windows"
        return open_sources(DataSpec(str(folder / "shards"), seq_len=SEQ_LEN, rows=rows, validation_fraction=0.0), 1)[0]
    ends = np.fromfile(folder / "train.offsets", dtype="<i8")
    split = TokenSplit(str(folder), "train", "<u2", int(ends[-1]), len(ends) - 1, "0" * 32)
    source: Any = (PackedSource if "packed" in kind else TokenSource)(split, VOCAB, SEQ_LEN, "apart" not in kind)
    if "long" in kind:
        source._is_long = True  # how rows of long pieces are laid
    return source


def read_apart(source: Any, ids: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the rows read one by one, each by its own source."""
    rows = []
    for number in ids.tolist():
        own = source
        for part in getattr(source, "sources", ()):
            own = part
            if number < part.samples:
                break
            number -= part.samples
        rows.append(own.read(np.array([number])))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def test_where_documents_begin_is_said_of_gathered_rows_too(folder: Path) -> None:
    source = SaysStarts(opened("packed apart", folder))
    stream = BatchStream(source, SEED, Plan(micro_batch=3, batch_samples=3), 0, torch.device("cpu"))
    for step in range(9):
        (part,) = stream.at(3 * step).micro_batches
        assert torch.equal(part.data[STARTS], source.read(part.ids)[STARTS])


jumps = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 9)), min_size=1, max_size=6)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(jumps=jumps, batch=st.integers(1, 20), rank=st.integers(0, 2), ranks=st.integers(3, 4), micro=st.integers(1, 5))
def test_batches_are_those_of_reads_by_themselves(
    kind: str, jumps: list[tuple[int, int]], batch: int, rank: int, ranks: int, micro: int, folder: Path
) -> None:
    """Wherever the stream is asked to go on, on any rank, in any micro-batches."""
    source = opened(kind, folder)
    passes = accumulation_for(batch, ranks, micro, ())
    plan = Plan(Layout(dp_replicate=ranks), micro_batch=micro, accumulation=passes, batch_samples=batch)
    stream, alone = BatchStream(source, SEED, plan, rank, torch.device("cpu")), opened(kind, folder)
    for position, steps in jumps:
        for step in range(steps):
            for part in stream.at(position + step * batch).micro_batches:
                if part.counts:
                    wanted = read_apart(alone, part.ids)
                    assert set(part.data) == set(wanted)
                    assert all(torch.equal(part.data[name], wanted[name]) for name in wanted)
                    assert all(part.data[name].is_contiguous() for name in wanted)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(jumps=jumps, batch=st.integers(1, 20), rank=st.integers(0, 2), ranks=st.integers(1, 3), micro=st.integers(1, 5))
def test_batches_of_gathered_steps_are_those_of_reads_by_themselves(
    kind: str, jumps: list[tuple[int, int]], batch: int, rank: int, ranks: int, micro: int, folder: Path
) -> None:
    """Steps in a row, steps that come again, and those of the gathering after, in whatever order they are finished."""
    rank, passes = min(rank, ranks - 1), accumulation_for(batch, ranks, micro, ())
    plan = Plan(Layout(dp_replicate=ranks), micro_batch=micro, accumulation=passes, batch_samples=batch)
    streams = [BatchStream(opened(kind, folder), SEED, plan, rank, torch.device("cpu")) for _ in range(2)]
    calls = [((at + step) * batch, at + step + 1) for at, steps in jumps for step in range(steps)]
    for _ in range(2):  # the second time some are at hand already
        found = streams[0].gathered(calls)
        for finish, call in reversed(list(zip(found or [], calls, strict=found is not None))):
            own, wanted = finish(), streams[1].on_host(*call)
            assert (own.step, own.position, own.samples) == (wanted.step, wanted.position, wanted.samples)
            for one, other in zip(own.micro_batches, wanted.micro_batches, strict=True):
                assert (one.position, one.step, one.counts) == (other.position, other.step, other.counts)
                assert np.array_equal(one.ids, other.ids) and np.array_equal(one.places, other.places)
                assert one.data.keys() == other.data.keys()
                assert all(torch.equal(one.data[name], other.data[name]) for name in one.data)
                assert all(one.data[name].is_contiguous() for name in one.data)
    for step in range(6):  # in a row rows are gathered
        streams[0].on_host(step * batch)
    assert streams[0].gathered([((6 + step) * batch, 7 + step) for step in range(3)]) is not None


def test_few_rows_are_gathered_once_for_several_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And many are read by themselves: no more than so many tokens are gathered ahead."""
    source, asked = opened("windows", folder), list[int]()
    gather = TokenSource.gather

    def counted(self: TokenSource, ids: np.ndarray) -> Any:
        asked.append(len(ids))
        return gather(self, ids)

    monkeypatch.setattr(TokenSource, "gather", counted)
    monkeypatch.setattr(rows_together, "MOST_ITEMS", 32 * SEQ_LEN)
    stream = BatchStream(source, SEED, Plan(micro_batch=4, batch_samples=4), 0, torch.device("cpu"))
    for step in range(40):
        stream.at(4 * step)
    assert sum(asked) <= 4 * 40 + 32 and max(asked) <= 32
    assert len(asked) < 40 / 4
    asked.clear()
    stream = BatchStream(source, SEED, Plan(micro_batch=20, batch_samples=20), 0, torch.device("cpu"))
    for step in range(8):
        stream.at(20 * step)
    assert asked == [20] * 8


class Sizes:
    """Batches of 8 samples, and of 9 from a position on: of two ranks the first one has four rows of both."""

    def at(self, step: int, position: int) -> int:
        """Return the samples of the batch at a position."""
        return 8 if position < 8 * 21 else 9

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return how many rows a rank passes at once."""
        return micro_batch


@pytest.mark.parametrize("kind", ["windows", "packed", "mixed windows"])
def test_a_batch_that_grows_by_less_than_a_row_of_each_rank_has_its_own_rows(kind: str, folder: Path) -> None:
    """What had been worked out for the smaller batches was taken for rows of the larger ones, as many of a rank's."""
    source, sizes, position, plan = opened(kind, folder), Sizes(), 0, Plan(
        Layout(dp_replicate=2), micro_batch=4, accumulation=1, batch_samples=8
    )  # fmt: skip
    streams = [BatchStream(source, SEED, plan, rank, torch.device("cpu"), sizes) for rank in range(2)]
    for step in range(1, 60):
        read = [stream.at(position, step) for stream in streams]
        counted = [micro for batch in read for micro in batch.micro_batches if micro.counts]
        wanted = ids_at(source, SEED, np.arange(position, position + sizes.at(step, position)))
        assert np.array_equal(np.concatenate([micro.ids for micro in counted]), wanted), f"step {step}"
        assert torch.equal(torch.cat([micro.data["tokens"] for micro in counted]), source.read(wanted)["tokens"])
        position += len(wanted)


def test_what_is_wrong_with_a_row_is_said_by_its_own_step(folder: Path, tmp_path: Path) -> None:
    """Steps before it are given, though their rows were asked for together with the damaged one."""
    shutil.copytree(folder / "shards", tmp_path / "shards")
    shard = tmp_path / "shards" / "2.shard"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    shard.write_bytes(content)
    data = DataSpec(str(tmp_path / "shards"), seq_len=SEQ_LEN, validation_fraction=0.0)
    source, told = open_sources(data, 1)[0], list[int]()
    rows = RowsTogether(source, StepIds(source, SEED))
    for step in range(40):
        try:
            found = rows.at(step, np.array([0]), 1)
            assert found.positions.tolist() == [step]
            assert np.array_equal(found.ids, ids_at(source, SEED, found.positions))
            if found.gathered is None:
                source.read(found.ids)
        except DamagedData:
            told.append(step)
    alone = []
    for step in range(40):
        try:
            open_sources(data, 1)[0].read(ids_at(source, SEED, np.array([step])))
        except DataError:
            alone.append(step)
    assert told == alone and 0 < len(told) < 40
