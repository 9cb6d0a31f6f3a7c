"""Listing and reading documents, and what is said about every kind of bad input."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.spec.task import DataSpec
from paceline.task.data.sources import documents as module
from paceline.task.data.sources.documents import LONE_FILE_PIECE_BYTES, Document, read_documents
from paceline.task.data.sources.files import list_files
from paceline.task.data.sources.held_out import document_hash, split_limit, split_value
from paceline.task.data.sources.reading import unpacked


def read(source: Path | str, **options: Any) -> list[Document]:
    data = DataSpec(source=str(source), **options)
    return list(read_documents(data, list_files(data)))


def texts(source: Path | str, **options: Any) -> list[str]:
    return [document.text.decode() for document in read(source, **options)]


def refusal(source: Path | str, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(source, **options)
    assert caught.value.what and caught.value.because and caught.value.try_
    return caught.value


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# ---- what is read ----


def test_the_standard_library_is_listed_without_installed_packages() -> None:
    listing = list_files(DataSpec())
    names = [file.name for file in listing.files]
    assert names == sorted(names) and len(names) == len(set(names)) > 300
    assert {"ast.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
    assert listing.what == "Python source"


def test_the_standard_library_can_be_narrowed() -> None:
    got = read("stdlib", include=("json/*.py",))
    assert [document.origin for document in got] == sorted(document.origin for document in got)
    folder = Path(sysconfig.get_path("stdlib"))
    assert {document.origin: document.text for document in got}["json/decoder.py"] == (
        folder / "json/decoder.py"
    ).read_bytes()


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a" / "z.md", "z")
    write(tmp_path / "a.py", "a")
    write(tmp_path / ".hidden.txt", "no")
    write(tmp_path / "__pycache__" / "x.py", "no")
    write(tmp_path / "picture.png", b"\x89PNG")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "c.jsonl", '{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    assert texts(tmp_path) == ["a", "z", "b", "one", "two", "b"]
    assert texts(tmp_path, include=("*.py", "a/*")) == ["a", "z"]


def test_a_lone_text_file_is_cut_into_documents_at_its_lines(tmp_path: Path) -> None:
    lines = [f"line {number} é\n" for number in range(10_000)]
    file = write(tmp_path / "book.txt", "".join(lines))
    got = read(file)
    assert len(got) > 5
    assert "".join(document.text.decode() for document in got) == "".join(lines)
    assert all(document.text.endswith(b"\n") and len(document.text) <= LONE_FILE_PIECE_BYTES for document in got)
    assert got[1].origin == f"book.txt at byte {len(got[0].text):,}"


@settings(max_examples=40, deadline=None)
@given(text=st.text(min_size=1, max_size=400), piece=st.integers(8, 64))
def test_pieces_join_to_the_file_wherever_they_are_cut(
    text: str, piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = write(tmp_path_factory.getbasetemp() / "cut.txt", text)
    whole = file.read_bytes()
    entry = list_files(DataSpec(source=str(file))).files[0]
    pieces = [document.text for document in module._read_text(entry, piece, module.Damaged(False))]
    assert b"".join(pieces) == whole.removeprefix(b"\xef\xbb\xbf")
    assert all(part.decode() is not None and len(part) <= piece for part in pieces)


def test_jsonl_plain_and_packed(tmp_path: Path) -> None:
    lines = "\ufeff" + "".join(json.dumps({"id": n, "body": f"text {n} ü"}) + "\n" for n in range(5))
    plain = write(tmp_path / "a.jsonl", lines)
    packed = write(tmp_path / "b.jsonl.gz", gzip.compress(lines.encode()))
    assert texts(plain, text_field="body") == texts(packed, text_field="body") == [f"text {n} ü" for n in range(5)]
    assert read(plain, text_field="body")[3].origin == "a.jsonl line 4"


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [f"row {number}" for number in range(3000)]
    parquet.write_table(arrow.table({"n": list(range(3000)), "text": rows}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == rows


def test_max_bytes_cuts_the_last_document_between_characters(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "12345")
    write(tmp_path / "b.txt", "éé")
    assert texts(tmp_path, max_bytes=8) == ["12345", "é"]
    assert texts(tmp_path, max_bytes=6) == ["12345"]
    assert texts(tmp_path, max_bytes=5) == ["12345"]
    assert texts(tmp_path, max_bytes=100) == ["12345", "éé"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello")) == ["hello"]


# ---- what is refused ----


def test_a_missing_path_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "books.txt", "x")
    assert "did you mean 'books.txt'?" in str(refusal(tmp_path / "book.txt"))
    assert "the data source is empty" in str(refusal(""))
    assert "there is no folder" in str(refusal(tmp_path / "no" / "book.txt"))
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'stdlib'?" in str(refusal("stdlb"))


def test_a_folder_without_documents(tmp_path: Path) -> None:
    assert "holds no files" in str(refusal(tmp_path))
    write(tmp_path / "a.png", "x")
    assert "a.png" in str(refusal(tmp_path)) and "known kind" in str(refusal(tmp_path))
    assert "include" in str(refusal(tmp_path, include=("*.cfg",)))
    assert "matches include" in str(refusal("stdlib", include=("*.nothing",)))


def test_undecodable_bytes_name_the_offset(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", b"x" * 20_000 + b"\xe9 caf\xe9")
    message = str(refusal(file))
    assert str(file) in message and "byte 20,000 is 0xe9" in message and "iconv" in message
    marked = str(refusal(write(tmp_path / "c.txt", "möbel".encode("utf-16"))))
    assert "mark of UTF-16" in marked and "iconv -f UTF-16 -t UTF-8" in marked
    for encoding in ("utf-16-le", "utf-16-be"):  # valid UTF-8, and learnt as such
        assert "without its mark" in str(refusal(write(tmp_path / "d.txt", "a small table".encode(encoding))))
    assert "line 2" in str(refusal(write(tmp_path / "b.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n')))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "a"', "line 2 is not JSON"),
        ('["a"]', "line 2 is not an object"),
        ('{"txt": "a"}', "did you mean 'txt'?"),
        ("{}", "the record is empty"),
        ('{"text": 3}', "it is a number"),
        ('{"text": null, "body": "b"}', "text_field = one of: body"),
        ('{"text": "\\ud800"}', "surrogate"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_lines_are_named(line: str, expected: str, tmp_path: Path) -> None:
    message = str(refusal(write(tmp_path / "a.jsonl", f'{{"text": "fine"}}\n{line}\n')))
    assert expected in message and str(tmp_path / "a.jsonl") in message and "line 2" in message


@pytest.mark.parametrize("damage", ["not gzip", "cut", "flipped"])
def test_broken_gzip(damage: str, tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"text": "hello"}\n' * 1000))
    if damage == "cut":
        packed = packed[:-20]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    content = b"plain" if damage == "not gzip" else bytes(packed)
    assert "a.jsonl.gz" in str(refusal(write(tmp_path / "a.jsonl.gz", content)))


def test_a_field_within_a_column_and_a_column_of_bytes_hold_documents(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"text": f"row {number}", "score": number / 10} for number in range(8)]
    parquet.write_table(
        arrow.table({"meta": rows, "raw": [row["text"].encode() for row in rows]}), tmp_path / "a.parquet"
    )
    write(tmp_path / "a.jsonl", "\n".join(json.dumps({"meta": row}) for row in rows))
    for name in ("a.parquet", "a.jsonl"):
        wanted = texts(tmp_path / name, text_field="meta.text", score_field="meta.score", score_min=0.5)
        assert wanted == ["row 5", "row 6", "row 7"]
    assert texts(tmp_path / "a.parquet", text_field="raw") == [row["text"] for row in rows]
    told = str(refusal(tmp_path / "a.parquet", text_field="meta.txt"))
    assert "the file has meta.text, meta.score, raw" in told and "did you mean 'meta.text'?" in told
    assert "text_field = one of: meta.text" in str(refusal(tmp_path / "a.jsonl", text_field="meta"))
    parquet.write_table(arrow.table({"meta": [{"text": "a"}, None]}), tmp_path / "b.parquet")
    assert "row 1" in str(refusal(tmp_path / "b.parquet", text_field="meta.text"))
    parquet.write_table(arrow.table({"raw": [b"good", b"\xff"]}), tmp_path / "c.parquet")
    assert "no UTF-8 text" in str(refusal(tmp_path / "c.parquet", text_field="raw"))


def test_bad_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    assert "not a readable Parquet file" in str(refusal(write(tmp_path / "a.parquet", b"PAR1 nonsense PAR1")))
    good = tmp_path / "b.parquet"
    parquet.write_table(arrow.table({"txt": ["a"], "n": [1]}), good)
    assert "did you mean 'txt'?" in str(refusal(good))
    assert "it holds int64" in str(refusal(good, text_field="n"))
    parquet.write_table(arrow.table({"text": ["a", None]}), good)
    assert "row 1" in str(refusal(good)) and "null" in str(refusal(good))
    whole = good.read_bytes()
    write(good, whole[: len(whole) // 2])
    assert "b.parquet" in str(refusal(good))


def test_unreadable_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By hand, since root may read everything.
    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    file = write(tmp_path / "a.txt", "x")
    with monkeypatch.context() as patch:
        patch.setattr(unpacked, "open", denied, raising=False)
        assert f"{file} cannot be read" in str(refusal(file)) and "Permission denied" in str(refusal(file))
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", denied)
        assert f"'{tmp_path}' cannot be listed" in str(refusal(tmp_path))


def test_a_file_that_vanishes_after_listing_is_named(tmp_path: Path) -> None:
    data = DataSpec(source=str(write(tmp_path / "a.txt", "x")))
    listing = list_files(data)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt cannot be read"):
        list(read_documents(data, listing))


# ---- how documents are split ----


def values(count: int) -> list[int]:
    return [split_value(document_hash(f"document {number}".encode())) for number in range(count)]


def test_the_split_takes_the_fraction_and_keeps_it_when_documents_are_added() -> None:
    few, more = values(5000), values(20_000)
    for fraction in (0.02, 0.1, 0.5):
        limit = split_limit(few, fraction)
        assert limit == split_limit(more, fraction)
        share = sum(value < limit for value in more) / len(more)
        assert abs(share - fraction) < 5 * (fraction * (1 - fraction) / len(more)) ** 0.5


def test_a_small_corpus_still_holds_one_out() -> None:
    few = values(3)
    limit = split_limit(few, 1e-9)
    assert [value < limit for value in few].count(True) == 1
    assert split_limit(few, 0.0) == 0
    assert not any(value < split_limit(few[:1], 1e-9) for value in few[:1])


@pytest.mark.parametrize("form", ["file", "stream", "hf"])
def test_arrow_files_are_read_as_pyarrow_writes_them(tmp_path: Path, form: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    texts = [f"text {number}" for number in range(2500)]
    table = arrow.table({"id": list(range(2500)), "text": texts})
    path = tmp_path / ("data-00000-of-00001.arrow" if form == "hf" else "a.arrow")
    kind = arrow.ipc.new_file if form == "file" else arrow.ipc.new_stream  # save_to_disk writes streams
    with kind(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=700)
    spec = DataSpec(source=f"hf:{tmp_path}" if form == "hf" else str(tmp_path))
    read = [document.text.decode() for document in read_documents(spec, list_files(spec))]
    assert read == texts
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match="not a readable Arrow file"):
        list(read_documents(spec, list_files(spec)))


def write_stream(path: Path, texts: list[str]) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"text": texts})
    with arrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def test_a_folder_that_was_saved_twice_is_what_the_second_save_wrote(tmp_path: Path) -> None:
    """`save_to_disk` leaves the further files of a save in more pieces where they are."""
    for number in range(3):
        write_stream(tmp_path / f"data-0000{number}-of-00003.arrow", ["old"])
    write_stream(tmp_path / "data-00000-of-00001.arrow", ["new"])
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    spec = DataSpec(source=f"hf:{tmp_path}")
    assert [document.text for document in read_documents(spec, list_files(spec))] == [b"new"]
    (tmp_path / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="lacks data-00000-of-00001"):
        list_files(spec)
    (tmp_path / "state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DataError, match="is a selection of the rows"):
        list_files(spec)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside.arrow", "data/../../outside.arrow"])
def test_a_saved_folder_names_no_file_outside_of_it(tmp_path: Path, name: str) -> None:
    """Whoever copies a folder of somebody else's has its state.json too."""
    (tmp_path / "saved" / "data").mkdir(parents=True)
    write_stream(tmp_path / "outside.arrow", ["secret"])
    (tmp_path / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="outside of the folder"):
        list_files(DataSpec(source=f"hf:{tmp_path / 'saved'}"))


def test_a_part_of_a_data_set_of_the_hub_is_no_more_than_that_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of split = "train[:2]" the package names the files of the whole, until it has written the part."""
    write_stream(tmp_path / "whole.arrow", ["one", "two", "three"])
    write_stream(tmp_path / "part.arrow", ["one", "two"])

    class Loaded:
        def __init__(self, name: str, rows: int) -> None:
            self.cache_files, self.rows = [{"filename": str(tmp_path / name)}], rows

        def __len__(self) -> int:
            return self.rows

        def flatten_indices(self) -> Loaded:
            return Loaded("part.arrow", self.rows)

    class Streamed:
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("it has no end")

    (tmp_path / "cut.arrow").write_bytes((tmp_path / "whole.arrow").read_bytes()[:300])
    loaded: list[object] = [Loaded("whole.arrow", 3), Loaded("whole.arrow", 2), Loaded("whole.arrow", 1),
                            Loaded("cut.arrow", 1), Loaded("none.arrow", 1), Streamed(), {"train": Streamed()},
                            {"train": Loaded("whole.arrow", 3)}]  # fmt: skip
    stand_in = types.SimpleNamespace(load_dataset=lambda name, **arguments: loaded.pop(0))
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    spec = DataSpec(source="hf:somebody/texts")
    for expected in ([b"one", b"two", b"three"], [b"one", b"two"]):
        assert [document.text for document in read_documents(spec, list_files(spec))] == expected
    with pytest.raises(DataError, match=r"(?s)it has 1 rows, and its files have 2"):
        list_files(spec)
    for name in ("cut", "none"):
        with pytest.raises(DataError, match=rf"{name}\.arrow cannot be read"):
            list_files(spec)
    for _ in range(2):
        with pytest.raises(DataError, match="leave streaming out"):
            list_files(spec)
    with pytest.raises(DataError, match="has several splits"):
        list_files(spec)


def test_a_folder_of_splits_asks_which_is_meant(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)has the splits train.*hf:.*/train"):
        list_files(DataSpec(source=f"hf:{tmp_path}"))


def test_damaged_documents_are_left_out_and_counted_where_they_may_be(tmp_path: Path) -> None:
    lines = ['{"text": "one"}', '{"text": 2}', '{"text"', '{"text": "four"}']
    write(tmp_path / "a.jsonl", "\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"good until \xff here")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"text" * 9)[:-6])
    spec = DataSpec(source=str(tmp_path), on_bad="skip")
    damaged = module.Damaged(True)
    assert [each.text for each in read_documents(spec, list_files(spec), damaged)] == [b"one", b"four"]
    assert damaged.count == 4 and "line 2" in damaged.first
    with pytest.raises(DataError, match="line 2"):
        list(read_documents(DataSpec(source=str(tmp_path)), list_files(spec)))


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=9), max_size=20),
    cut=st.integers(0, 400),
)
def test_the_lines_of_all_parts_are_the_lines_of_the_file(
    lines: list[str], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in lines)
    path = write(tmp_path_factory.getbasetemp() / "cut.jsonl", content)
    entry, size = list_files(DataSpec(source=str(path))).files[0], path.stat().st_size
    bounds = [0, min(cut, size), size]
    spec, damaged = DataSpec(source=str(path)), module.Damaged(False)
    read = [
        document.text.decode()
        for start, stop in itertools.pairwise(bounds)
        for document in (module.read_lines(entry, start, stop, spec, damaged) if stop > start else ())
    ]
    assert read == lines


def test_an_empty_folder_is_not_answered_with_patterns(tmp_path: Path) -> None:
    assert "include" not in refusal(tmp_path).try_
    write(tmp_path / "x.unknown", "a")
    assert "include" in refusal(tmp_path).try_


@pytest.mark.parametrize("field", ["text", "tokens"])
def test_labels_of_words_are_answered_with_what_reads_them(tmp_path: Path, field: str) -> None:
    """A list of words is no text to be joined, and its tags are no labels of it."""
    path = write(tmp_path / "ner.jsonl", '{"tokens": ["Anna", "sings"], "ner_tags": [1, 0]}')
    assert "a data set of your own with a collate" in refusal(path, text_field=field).try_
    path = write(tmp_path / "uneven.jsonl", '{"tokens": ["Anna", "sings"], "more": [1]}')
    assert "collate" not in refusal(path, text_field=field).try_
