"""Files of documents as strangers have them: each is read as it was meant, or its error says what to do."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, DamagedData, DataError
from paceline.spec.load import load_spec
from paceline.spec.task import DataSpec
from paceline.task.data.prepare.corpus_parts import documents_of, parts_of
from paceline.task.data.sources.cache import open_corpus
from paceline.task.data.sources.documents import Damaged, read_documents
from paceline.task.data.sources.files import list_files
from paceline.task.data.sources.tables.store import open_table

TEXTS = ["alpha beta", "second möbel", "third", "fourth, and last"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def texts_of(source: Path, on_bad: str = "stop") -> list[str]:
    data = DataSpec(str(source), on_bad=on_bad)
    return [document.text.decode() for document in read_documents(data, list_files(data))]


def zstd(content: bytes) -> bytes:
    return bytes(pytest.importorskip("pyarrow").Codec("zstd").compress(content))


PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACKED)
def test_packed_files_are_unpacked_on_the_way(tmp_path: Path, suffix: str) -> None:
    pack, path = PACKED[suffix], tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(LINES[:50]) + pack(LINES[50:]))  # of two streams, as parallel packers write them
    assert texts_of(path) == texts_of(tmp_path) == TEXTS
    for content in (pack(LINES)[:-10], b"\x07" + LINES):
        path.write_bytes(content)
        with pytest.raises(DamagedData, match="cannot be unpacked"):
            texts_of(path)


def test_a_packed_file_is_no_part_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.bz2"
    path.write_bytes(bz2.compress(LINES))
    listing = list_files(DataSpec(str(path)))
    (part,) = parts_of(listing, 10)
    assert [each.text.decode() for each in documents_of(DataSpec(str(path)), listing, part, Damaged(False))] == TEXTS


@pytest.mark.parametrize(("content", "expected"), [
    (b"\xef\xbb\xbf" + LINES, TEXTS),
    (LINES.replace(b"\n", b"\r\n"), TEXTS),
    (b"\n \n" + LINES.replace(b"\n", b"\n\n"), TEXTS),
    (LINES[:-1], TEXTS),
    (b'{"text": "a\\ud83d\\ude00b"}', ["a\U0001f600b"]),
    (json.dumps({"text": "x" * 3_000_000}).encode(), ["x" * 3_000_000]),
])  # fmt: skip
def test_lines_of_json_in_whatever_way_they_end(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    assert texts_of(path) == expected


@pytest.mark.parametrize(("line", "because"), [
    (b'{"text": "a\\ud800b"}', "half of a surrogate pair"),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "4300 digits"),
    (b'{"text": NaN}', "a number"),
    ('{"text": "é"}'.encode("latin-1"), "0xe9"),
    (b"\x00" * 20, "Expecting value"),
])  # fmt: skip
def test_a_bad_line_is_an_error_or_is_left_out(tmp_path: Path, line: bytes, because: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n" + LINES)
    with pytest.raises(DamagedData, match="line 1") as caught:
        texts_of(path)
    assert because in str(caught.value)
    assert texts_of(path, "skip") == TEXTS


@pytest.mark.parametrize("line", [
    {"text": "a\ud800b", "label": "x"}, {"text": "ab", "label": "\ud800"},
    {"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]},
])  # fmt: skip
def test_half_a_surrogate_pair_in_a_row_of_a_table_is_told(tmp_path: Path, line: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DamagedData, match=r"line 1.*not valid Unicode"):
        open_table(DataSpec(f"table:{path}", cache_dir=str(tmp_path / "cache")))


def parquet_of(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_texts_of_parquet_in_every_type_of_string_and_beside_whatever_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    strings = [pa.array(TEXTS, pa.string()), pa.array(TEXTS, pa.large_string()), pa.array(TEXTS, pa.string_view())]
    strings.append(pa.array([text.encode() for text in TEXTS], pa.binary()))
    strings += [strings[at].dictionary_encode() for at in (0, 1, 3)]
    beside = {"meta": [{"text": "x", "list": [[1], []]}] * 4, "when": pa.array([1] * 4, pa.timestamp("ns"))}
    for text in strings:
        assert texts_of(parquet_of(tmp_path / "a.parquet", {**beside, "text": text})) == TEXTS
    uneven = parquet_of(tmp_path / "b.parquet", {"text": TEXTS * 500}, row_group_size=3)
    assert texts_of(uneven) == TEXTS * 500


@pytest.mark.parametrize(("column", "because"), [
    ([["a"], ["b"]], "list<"), ([{"a": "b"}] * 2, "struct<"), (["a", None], "null"),
])  # fmt: skip
def test_a_column_of_parquet_that_is_no_text_is_told(tmp_path: Path, column: list[Any], because: str) -> None:
    with pytest.raises(DamagedData) as caught:
        texts_of(parquet_of(tmp_path / "a.parquet", {"text": column}))
    assert because in caught.value.because
    assert not re.search(r"one of: text(,|$)", caught.value.try_)


def test_bytes_of_parquet_that_are_no_text_are_told_by_their_row(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import numpy as np

    ends = pa.py_buffer(np.array([0, 3, 6], "<i4").tobytes())
    bad = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"ab\xffxyz")])
    path = parquet_of(tmp_path / "a.parquet", {"text": bad})
    with pytest.raises(DamagedData, match=r"row 0(.|\n)*0xff"):
        texts_of(path)
    assert texts_of(path, "skip") == ["xyz"]


def test_a_column_that_is_not_read_may_hold_what_python_cannot(tmp_path: Path) -> None:
    """A time in nanoseconds, as pandas writes them, ended the reading of a table."""
    pa = pytest.importorskip("pyarrow")
    odd = {"when": pa.array([1, 2, 3, 4], pa.timestamp("ns")), "there": pa.array([0] * 4, pa.timestamp("us", "X/Y")),
           "text": TEXTS, "label": [0, 1, 0, 1]}  # fmt: skip
    path = parquet_of(tmp_path / "a.parquet", odd)
    data = DataSpec(f"table:{path}", cache_dir=str(tmp_path / "cache"), validation_fraction=0.0)
    assert open_table(data).label_array("train").tolist() == [0, 1, 0, 1]


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(TEXTS), pa.array(TEXTS)], names=["text", "text"]), path)
    with pytest.raises(DamagedData, match="2 columns 'text'"):
        texts_of(path)


def test_files_called_after_splits_are_those_splits(tmp_path: Path) -> None:
    """Documents of a file called after a test were trained on."""
    for name, text in (("train-0", "train"), ("train-1", "more"), ("validation-0", "held"), ("test-0", "tested")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    data = DataSpec(str(tmp_path), cache_dir=str(tmp_path / ".cache"), tokenizer="bytes")
    corpus = open_corpus(data)
    assert bytes(corpus.train.open().astype("u1")) == b"train\x00more\x00"
    assert bytes(corpus.validation.open().astype("u1")) == b"held\x00"
    assert [str(each) for each in corpus.skipped] == ["1 not read for a test (test-0.jsonl)"]
    (tmp_path / "validation-0.jsonl").unlink()
    corpus = open_corpus(data)  # now a part of those for training is held out
    assert {corpus.train.documents, corpus.validation.documents} == {1}
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "other"}))
    assert sorted(texts_of(tmp_path)) == ["more", "other", "tested", "train"], "not all are called after splits"


def test_what_datasets_keeps_of_a_map_is_no_more_data(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    for name in ("data-00000-of-00002", "data-00001-of-00002", "cache-1b2c"):
        table = pa.table({"text": [name]})
        with pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "state.json").write_text("{}")
    for source in (tmp_path, f"hf:{tmp_path}"):
        data = DataSpec(str(source))
        assert [file.name[:10] for file in list_files(data).files] == ["data-00000", "data-00001"]


def test_links_in_a_circle_pipes_and_names_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "up").symlink_to("..")
    (tmp_path / "self").symlink_to("self")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "a.txt").rename(tmp_path / os.fsdecode(b"\xff.txt"))
    assert texts_of(tmp_path) == ["text"]
    assert sorted(each.why for each in list_files(DataSpec(str(tmp_path))).skipped) == [
        "not read: a link to a folder", "not read: a link to nothing", "not read: a named pipe"
    ]  # fmt: skip
    with pytest.raises(DataError, match="named pipe"):  # which nobody may ever write to
        texts_of(tmp_path / "pipe.txt")
    corpus = open_corpus(DataSpec(str(tmp_path), cache_dir=str(tmp_path / ".cache"), tokenizer="bytes"))
    assert corpus.documents == 1


def test_a_table_that_is_packed_is_not_held_against_tokens_of_a_sequence() -> None:
    for name in ("a.csv.zst", "a.tsv.xz", "a.csv"):
        assert load_spec(None, [f"task.data.source={name}", "task.global_batch=3 tokens"])
    with pytest.raises(ConfigError):
        load_spec(None, ["task.data.source=a.txt.zst", "task.global_batch=3 tokens"])
