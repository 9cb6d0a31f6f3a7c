"""Token shards: read against a reader of the documented layout; damage found where it is; many files as one array."""

from __future__ import annotations

import json
import pickle
import random
import struct
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests_shared import plan_of

from paceline.errors import DataError
from paceline.run.loop.loader import BatchStream
from paceline.spec.layout import Layout
from paceline.spec.task import DataSpec
from paceline.task.data.facts import data_facts
from paceline.task.data.rows.mixed import MixedSource
from paceline.task.data.rows.packed_source import PackedSource
from paceline.task.data.source import open_sources
from paceline.task.data.sources.shards import tokens_in_files
from paceline.task.data.sources.shards.folder import ShardIndex, write_index
from paceline.task.data.sources.shards.layout import BLOCK_BYTES, ShardWriter
from paceline.task.data.sources.shards.source import ShardSource
from paceline.task.data.sources.shards.tokens_in_files import Checksums
from paceline.task.data.sources.tokenizer import ByteTokenizer
from paceline.task.data.storage.notices import left_out_of
from paceline.task.data.unigram import unigram_loss

END = ByteTokenizer.end_of_document


def read_by_the_page(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return a shard's tokens and document ends, read as docs/reference/token-shards.md says and by no code of ours."""
    assert content[:8] == b"PACETOK1"
    token_bytes, block_bytes = struct.unpack_from("<II", content, 8)
    tokens, documents, ends_at, checksums_at = struct.unpack_from("<QQQQ", content, 16)
    ends_crc, checksums_crc, zero, header_crc = struct.unpack_from("<IIII", content, 48)
    assert zero == 0 and zlib.crc32(content[:60]) == header_crc
    stored = content[64 : 64 + tokens * token_bytes]
    assert ends_at % 8 == 0 and checksums_at == ends_at + 8 * documents
    assert zlib.crc32(content[ends_at:checksums_at]) == ends_crc and zlib.crc32(content[checksums_at:]) == checksums_crc
    for number, at in enumerate(range(0, len(stored), block_bytes)):
        assert struct.unpack_from("<I", content, checksums_at + 4 * number)[0] == zlib.crc32(
            stored[at : at + block_bytes]
        )
    return np.frombuffer(stored, f"<u{token_bytes}"), np.frombuffer(content, "<u8", documents, ends_at)


def write_folder(folder: Path, documents: list[list[np.ndarray]], vocab: int = 257) -> DataSpec:
    """Write a folder with one shard for each list of documents, the last of them for validation."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    written = []
    for number, each in enumerate(documents):
        with ShardWriter(folder / f"{number}.shard", 2 if vocab <= 2**16 else 4, END) as writer:
            for document in each:
                writer.add([document])
        written.append(writer.result())
    splits = {"train": tuple(written[:-1]), "validation": tuple(written[-1:])}
    write_index(folder, ShardIndex("bytes", vocab, END, splits, {"bytes": 5}))
    return DataSpec(str(folder), seq_len=32, cache_dir=str(folder / ".cache"))


def documents_of(seed: int, count: int, longest: int = 60) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, generator.integers(0, longest)) for _ in range(count)]


def joined(documents: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part for each in documents for part in (each, [END])])


@pytest.mark.parametrize("vocab", [257, 100_000])
def test_a_shard_is_as_its_page_says(tmp_path: Path, vocab: int) -> None:
    documents = documents_of(1, 2500)  # more than one block of checksums
    write_folder(tmp_path, [documents, documents[:3]], vocab)
    tokens, ends = read_by_the_page((tmp_path / "0.shard").read_bytes())
    assert np.array_equal(tokens, joined(documents))
    assert np.array_equal(ends, np.cumsum([len(each) + 1 for each in documents]))
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize("at_once", [1, 10**6], ids=["file by file", "row by row"])
def test_windows_run_through_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(tokens_in_files, "MANY_RUNS", at_once)
    parts = [documents_of(seed, count) for seed, count in ((1, 40), (2, 1), (3, 0), (4, 25), (5, 30))]
    spec = write_folder(tmp_path, parts)
    train, validation = open_sources(spec, 7)
    assert isinstance(train, ShardSource) and isinstance(validation, ShardSource)
    whole = torch.from_numpy(np.concatenate([joined(part) for part in parts[:-1] if part]).astype(np.int64))
    assert train.samples == (len(whole) - 1) // 32
    ids = np.random.default_rng(1).permutation(train.samples)
    batch = train.read(ids)
    for row, sample in enumerate(ids.tolist()):
        assert torch.equal(batch["tokens"][row], whole[sample * 32 : sample * 32 + 32])
        assert torch.equal(batch["labels"][row], whole[sample * 32 + 1 : sample * 32 + 33])
    assert torch.equal(pickle.loads(pickle.dumps(train)).read(ids)["tokens"], batch["tokens"])
    assert train.read(ids[:0])["tokens"].shape == (0, 32)
    with pytest.raises(IndexError):
        train.read(np.array([train.samples]))
    apart = open_sources(DataSpec(spec.source, seq_len=32, cross_documents=False), 7)[0].read(ids[:5])["documents"]
    ends = np.cumsum([len(each) + 1 for part in parts[:-1] for each in part])
    for row, sample in enumerate(ids[:5].tolist()):
        places = np.arange(sample * 32, sample * 32 + 32)
        assert apart[row].tolist() == [int((ends - 1 <= place).sum()) for place in places]
    facts = data_facts(spec)
    assert (facts.samples, facts.vocab, facts.card["bytes"], facts.bytes) == (train.samples, 257, 5, 5)
    assert facts.documents == sum(map(len, parts)) and "tokens in" in facts.description
    assert 0 < unigram_loss(train, validation) < 6


def test_tokens_of_one_shard_or_many_are_one_content(tmp_path: Path) -> None:
    documents = documents_of(1, 50)
    one = write_folder(tmp_path / "one", [documents, documents[:9]])
    many = write_folder(tmp_path / "many", [documents[:20], documents[20:], documents[:9]])
    sources = [open_sources(spec, 7)[0] for spec in (one, many)]
    ids = np.arange(sources[0].samples)
    assert torch.equal(sources[0].read(ids)["tokens"], sources[1].read(ids)["tokens"])
    assert np.array_equal(sources[0].split.open()[5:700], sources[1].split.open()[5:700])
    assert np.array_equal(sources[0].split.offsets(), sources[1].split.offsets())


def test_damage_is_told_with_its_place_and_checksum(tmp_path: Path) -> None:
    documents = documents_of(1, 5000)
    spec = write_folder(tmp_path, [documents, documents[:9]])
    path = tmp_path / "0.shard"
    content = bytearray(path.read_bytes())
    content[64 + 70_000] ^= 1  # in the second block of tokens
    path.write_bytes(content)
    train, _ = open_sources(spec, 7)
    bad = 35_000 // 32
    assert train.read(np.arange(10))["tokens"].shape == (10, 32), "samples elsewhere are read"
    found = zlib.crc32(bytes(content[64 + 65_536 : 64 + 131_072]))
    with pytest.raises(DataError, match=rf"0.shard is damaged\n.*65,600 to 131,136 .*CRC-32 {found:08x}"):
        train.read(np.array([bad]))
    skipping, _ = open_sources(DataSpec(spec.source, seq_len=32, on_bad="skip"), 7)
    ids = np.array([3, bad, 7])
    batch = skipping.read(ids)
    assert (batch["labels"][1] == -100).all() and (batch["tokens"][1] == 0).all()
    assert torch.equal(batch["labels"][[0, 2]], train.read(ids[[0, 2]])["labels"])
    (because,) = left_out_of(skipping, ids).elements()
    assert "65,600" in because and not skipping.notices.take(), "what is read is not yet trained on"
    mixed = MixedSource([train, skipping], ["whole", "damaged"])
    assert left_out_of(mixed, np.array([bad, train.samples + bad])).total() == 1, "of the second source"
    again = open_sources(DataSpec(spec.source, seq_len=32, on_bad="skip"), 7)[0]
    alone = torch.cat([again.read(ids[row : row + 1])["labels"] for row in range(3)])
    assert torch.equal(alone, batch["labels"]), "what is left out does not depend on the batch"


class Whole:
    """A split as one array, read by no code of shards."""

    def __init__(self, documents: list[np.ndarray], digest: str) -> None:
        self.name, self.digest, self.folder = "train", digest, ""
        self._tokens, self._ends = joined(documents), np.cumsum([len(each) + 1 for each in documents])
        self.tokens, self.documents = len(self._tokens), len(documents)

    def open(self) -> np.ndarray:
        return self._tokens

    def offsets(self) -> np.ndarray:
        return np.concatenate([[0], self._ends])

    def windows(self, seq_len: int) -> int:
        return (self.tokens - 1) // seq_len


@pytest.mark.parametrize("at_once", [1, 10**6], ids=["file by file", "row by row"])
@pytest.mark.parametrize("cross_documents", [True, False])
def test_packed_rows_of_many_shards_are_those_of_one_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cross_documents: bool, at_once: int
) -> None:
    monkeypatch.setattr(tokens_in_files, "MANY_RUNS", at_once)
    parts = [documents_of(seed, count) for seed, count in ((1, 900), (2, 1), (3, 700), (5, 30))]
    spec = write_folder(tmp_path, parts)
    options = {"seq_len": 64, "rows": "packed", "cross_documents": cross_documents, "cache_dir": spec.cache_dir}
    train, _ = open_sources(DataSpec(spec.source, **options), 7)
    wanted = PackedSource(
        Whole([each for part in parts[:-1] for each in part], train.split.digest), 257, 64, cross_documents
    )
    ids = np.random.default_rng(1).permutation(train.samples)
    found, expected = train.read(ids), wanted.read(ids)
    assert train.samples == wanted.samples and set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    content = bytearray((tmp_path / "0.shard").read_bytes())
    content[100] ^= 1  # all of the first shard is one block of checksums, but for the end of it
    (tmp_path / "0.shard").write_bytes(content)
    with pytest.raises(DataError, match=r"0.shard is damaged"):
        open_sources(DataSpec(spec.source, **options), 7)[0].read(ids)
    left = open_sources(DataSpec(spec.source, on_bad="skip", **options), 7)[0].read(ids)
    blank = (left["labels"] == -100).all(dim=1)
    assert 0 < int(blank.sum()) < len(ids) and set(left) == set(found)
    assert torch.equal(left["tokens"][~blank], found["tokens"][~blank]), "the other rows are as they were"


@pytest.mark.parametrize("name", ["../1.shard", "/etc/passwd", "x/../../1.shard", "", "..\\1.shard"])
def test_an_index_names_no_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    """Prepared data are copied from others, and their index with them."""
    (tmp_path / "data").mkdir()
    spec = write_folder(tmp_path / "data", [documents_of(1, 20), documents_of(2, 9)])
    open_sources(spec, 7)
    told = json.loads((tmp_path / "data" / "shards.json").read_text())
    told["splits"]["train"][0]["file"] = name
    (tmp_path / "data" / "shards.json").write_text(json.dumps(told))
    with pytest.raises(DataError, match="outside of the folder"):
        open_sources(spec, 7)


@pytest.mark.parametrize("place", [3, 20, -2, -9])
def test_damage_outside_of_tokens_is_found_when_the_shard_is_opened(tmp_path: Path, place: int) -> None:
    documents = documents_of(1, 20)
    spec = write_folder(tmp_path, [documents, documents[:9]])
    content = bytearray((tmp_path / "0.shard").read_bytes())
    content[place] ^= 1
    (tmp_path / "0.shard").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged|not a token shard"):
        open_sources(DataSpec(spec.source, seq_len=32, cross_documents=False), 7)
    (tmp_path / "0.shard").write_bytes(bytes(content)[:-5])
    with pytest.raises(DataError, match=r"cut short|damaged|not a token shard"):
        open_sources(spec, 7)


def test_a_folder_whose_index_or_shard_is_another_one_is_refused(tmp_path: Path) -> None:
    documents = documents_of(1, 40)
    spec = write_folder(tmp_path / "a", [documents, documents[:9]])
    other = write_folder(tmp_path / "b", [documents[:30], documents[:9]])
    shard = Path(spec.source) / "0.shard"
    good = shard.read_bytes()
    shard.write_bytes((Path(other.source) / "0.shard").read_bytes())
    with pytest.raises(DataError, match="another shard"):
        open_sources(spec, 7)
    shard.write_bytes(good)
    index = Path(spec.source) / "shards.json"
    index.write_text(index.read_text().replace('"vocab": 257', '"vocab": 258'))
    with pytest.raises(DataError, match="damaged"):
        open_sources(spec, 7)
    shard.unlink()
    index.write_text(index.read_text().replace('"vocab": 258', '"vocab": 257'))
    with pytest.raises(DataError, match="is not there"):
        open_sources(spec, 7)


def write_megatron(prefix: Path, sequences: list[list[int]], documents: list[int], code: int = 8) -> None:
    """Write PREFIX.bin and PREFIX.idx by the layout that Megatron-LM publishes. `documents` index sequences."""
    kind = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code]
    tokens = [np.array(each, dtype=kind).tobytes() for each in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(tokens))
    pointers = np.cumsum([0, *map(len, tokens)])[:-1]
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
        + struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents))
        + np.array([len(each) for each in sequences], dtype=np.int32).tobytes()
        + pointers.astype(np.int64).tobytes() + np.array(documents, dtype=np.int64).tobytes()
    )  # fmt: skip


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_megatrons_documents_may_be_of_no_or_of_several_sequences(tmp_path: Path, code: int) -> None:
    """A document without sequences had been taken for the rest of the file."""
    sequences = [[1, 2, 3, 9], [4, 5, 9], [], [6, 7, 8, 9]]
    for documents in ([0, 0, 1, 4], [0, 1, 1, 3, 4], [0, 2, 4, 4], [0, 0, 0, 4]):
        write_megatron(tmp_path / "text", sequences, documents, code)
        given: dict[str, Any] = {"arguments": {"vocab": 100}, "seq_len": 4, "validation_fraction": 0.0}
        windows, _ = open_sources(DataSpec(str(tmp_path / "text"), cross_documents=False, **given), 7)
        joined = [[token for each in sequences[first:last] for token in each] for first, last in pairwise(documents)]
        assert windows.split.offsets().tolist() == np.cumsum([0, *map(len, joined)]).tolist()
        packed, _ = open_sources(DataSpec(str(tmp_path / "text"), rows="packed", **given), 7)
        labels = packed.read(np.arange(packed.samples))["labels"].flatten()
        tokens = [token for each in joined for token in each]
        assert sorted(labels[labels >= 0].tolist()) == sorted(tokens[1:]), "every token but the first is learnt once"


def test_megatrons_documents_without_ends_are_not_told_apart(tmp_path: Path) -> None:
    """The last token of each stood in the document after it, and was to foretell that one's first."""
    write_megatron(tmp_path / "text", [[1, 2, 3], [4, 5, 6, 7], [], [8, 7]], [0, 1, 2, 3, 4])
    spec = DataSpec(str(tmp_path / "text"), arguments={"vocab": 100}, seq_len=4, validation_fraction=0.0)
    assert open_sources(spec, 7)[0].samples == 2
    for changes in ({"cross_documents": False}, {"rows": "packed"}):
        with pytest.raises(DataError, match="do not end with an end-of-document token"):
            open_sources(replace(spec, **changes), 7)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [2, 3, 4, 5])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_numbers_below_zero_are_no_tokens(tmp_path: Path, code: int, place: int) -> None:
    """-100 would have been a label that does not count."""
    for number in (-1, -100):
        tokens = [1, 2, 3, 4, 5]
        tokens[place] = number
        write_megatron(tmp_path / "text", [tokens], [0, 1], code)
        spec = DataSpec(str(tmp_path / "text"), arguments={"vocab": 100}, seq_len=4, validation_fraction=0.0)
        with pytest.raises(DataError, match=f"token {number}"):
            open_sources(spec, 7)[0].read(np.array([0]))


@pytest.mark.parametrize("code", [4, 8])
def test_megatrons_files_are_read_by_their_layout(tmp_path: Path, code: int) -> None:
    generator = random.Random(1)
    sequences = [[*(generator.randrange(500) for _ in range(generator.randrange(40))), 499] for _ in range(50)]
    documents = [0, *range(1, 51, 1)][:51]
    write_megatron(tmp_path / "text", sequences, documents, code)
    spec = DataSpec(str(tmp_path / "text"), arguments={"vocab": 500}, seq_len=16, validation_fraction=0.1,
                    cross_documents=False)  # fmt: skip
    train, held_out = open_sources(spec, 7)
    whole = [token for each in sequences[:45] for token in each]
    batch = train.read(np.arange(train.samples))
    assert batch["tokens"].flatten().tolist() == whole[: train.samples * 16]
    rest = [token for each in sequences[45:] for token in each]
    assert held_out is not None and held_out.read(np.array([0]))["tokens"][0].tolist() == rest[:16]
    assert train.split.offsets().tolist() == np.cumsum([0, *map(len, sequences[:45])]).tolist()
    for name in (f"{tmp_path}/text.idx", f"{tmp_path}/text.bin", f"megatron:{tmp_path}/text"):
        assert open_sources(DataSpec(name, arguments={"vocab": 500}, seq_len=16), 7)[0].vocab == 500
    with pytest.raises(DataError, match=r"token \d+ is in the train data"):
        open_sources(DataSpec(spec.source, arguments={"vocab": 100}, seq_len=16), 7)[0].read(np.arange(9))
    with pytest.raises(DataError, match=r"vocabulary of .* is not known"):
        open_sources(DataSpec(spec.source, seq_len=16), 7)
    (tmp_path / "text.bin").write_bytes(b"12")
    with pytest.raises(DataError, match="does not belong to its index"):
        open_sources(spec, 7)
    (tmp_path / "text.idx").write_bytes(b"something else entirely")
    with pytest.raises(DataError, match="no index of Megatron's"):
        open_sources(spec, 7)


def test_a_first_batch_looks_at_its_own_blocks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands before a first batch does not grow with the tokens: of 4 MB it checks the blocks of its rows."""
    checked: list[int] = []
    check = Checksums._check
    monkeypatch.setattr(Checksums, "_check", lambda self, block: (checked.append(block), check(self, block)))
    long = np.random.default_rng(1).integers(0, 256, 2_000_000)
    data = write_folder(tmp_path, [[long], [long[:99]]])
    source = open_sources(data, 7)[0]
    assert not checked, "nothing of the tokens is read as they are opened"
    stream = BatchStream(source, 7, plan_of(Layout(), batch=8, micro_batch=4), 0, torch.device("cpu"))
    batch = stream.at(0)
    assert [micro.data["tokens"].shape for micro in batch.micro_batches] == [(4, 32), (4, 32)]
    assert 1 <= len(checked) <= 2 * 8 < 4_000_000 // BLOCK_BYTES
