"""Rows of tables: each way in which a CSV, JSONL or Parquet file can be odd has one clear answer."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import DataError
from paceline.spec.task import DataSpec
from paceline.task.data.facts import data_facts
from paceline.task.data.source import open_sources
from paceline.task.data.sources.tables.labels import ordered_classes
from paceline.task.data.sources.tables.store import TextTable, open_table

Write = Callable[..., DataSpec]

ODD = ["plain", "with, a comma", 'with "quotes"', "two\nlines", "", " spaces ", "ünïcode 漢", "ends in a line\r\n"]


@pytest.fixture
def spec_of(tmp_path: Path) -> Write:
    def of(name: str, content: bytes | str, **options: Any) -> DataSpec:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        given = {"seq_len": 64, "validation_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **options}
        return DataSpec(f"table:{path}", **given)

    return of


def texts_of(table: TextTable, split: str = "train") -> list[str]:
    """Return the texts of a split, as its tokens have them."""
    part = table.corpus.train if split == "train" else table.corpus.validation
    tokens, offsets = part.open(), part.offsets()
    decode = table.corpus.open_tokenizer().decode
    return [decode(tokens[start:stop]) for start, stop in itertools.pairwise(offsets.tolist())]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz", "semicolon.csv"])
def test_what_a_parser_of_csv_wrote_is_read_back(spec_of: Write, tmp_path: Path, name: str, mark: bytes) -> None:
    delimiter = "\t" if "tsv" in name else ";" if "semicolon" in name else ","
    with (tmp_path / "written").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter)
        writer.writerow(["text", "label"])
        writer.writerows([text, "ab"[at % 2]] for at, text in enumerate(ODD))
    content = mark + (tmp_path / "written").read_bytes()
    table = open_table(spec_of(name, gzip.compress(content) if name.endswith("gz") else content))
    assert texts_of(table) == ODD
    assert table.labels is not None and table.labels.classes == ("a", "b")
    assert table.label_array("train").tolist() == [0, 1] * 4


@pytest.mark.parametrize(("name", "content", "said"), [
    ("twice.csv", "text,label,text\na,b,c\n", "two columns 'text'"),
    ("empty.csv", "", "no header"),
    ("head.csv", "text,label\n", "holds no rows"),
    ("one.csv", "text,label\na,x\nb,x\n", "of one class only"),
    ("hole.csv", "text,label\na,x\nb,\nc,y\n", "row 2 has an empty label"),
    ("wide.csv", "text,label\na,x\nb,y,z\n", "row 2 has 3 fields"),
    ("open.csv", 'text,label\n"a,x\nb,y\n', "row 1 cannot be read"),
    ("latin.csv", "text,label\nä,x\nb,y\n".encode("latin-1"), "cannot be read"),
    ("nolabel.csv", "first,second\na,b\n", "which column holds its text is not clear"),
    ("many.csv", "text,label\n" + "".join(f"t{at},name {at}\n" for at in range(50)), "hardly repeat"),
    ("mixed.jsonl", '{"text": "a", "label": ["x"]}\n{"text": "b", "label": "y"}\n', "lists and single values"),
    ("object.jsonl", '{"text": "a", "label": {"x": 1}}\n{"text": "b", "label": "y"}\n', "line 1 has no label"),
    ("null.jsonl", '{"text": null, "label": "x"}\n{"text": "b", "label": "y"}\n', "line 1 has no text"),
    ("nan.jsonl", '{"text": "a", "label": NaN}\n{"text": "b", "label": 1.5}\n', "line 1 has no label"),
])  # fmt: skip
def test_each_defect_has_an_answer_that_names_it(spec_of: Write, name: str, content: str, said: str) -> None:
    with pytest.raises(DataError) as raised:
        open_table(spec_of(name, content))
    assert said in f"{raised.value.what} {raised.value.because}"
    assert raised.value.try_
    if name in ("hole.csv", "null.jsonl"):  # a row that may be left out says how
        assert 'on_bad = "skip"' in raised.value.try_


def test_sources_with_targets_are_told_of_their_objective(spec_of: Write) -> None:
    rows = "source,target\n" + "".join(f"ein Satz {at},a sentence {at}\n" for at in range(50))
    with pytest.raises(DataError, match="hardly repeat") as raised:
        open_table(spec_of("pairs.csv", rows, text_field="source"))
    assert raised.value.try_ is not None and 'objective = "seq2seq"' in raised.value.try_


def test_what_is_left_out_is_counted_and_named(spec_of: Write) -> None:
    rows = "text,label\na,x\nb,\nc,y\nd,y,z\ne,x\n"
    table = open_table(spec_of("hole.csv", rows, on_bad="skip"))
    assert texts_of(table) == ["a", "c", "e"]
    assert table.corpus.left_out == 2 and "row 2 has an empty label" in table.corpus.left_out_first
    again = open_table(spec_of("hole.csv", rows, on_bad="skip"))  # from the cache
    assert again.corpus.left_out == 2
    facts = data_facts(spec_of("hole.csv", rows, on_bad="skip"))
    assert any("2 damaged rows" in line for line in facts.shown), "said at every start, and not where one has to look"


@pytest.mark.parametrize(("labels", "kind", "classes"), [
    (["1", "0", "10", "2"], "classification", ("0", "1", "2", "10")),
    (["1.0", "2.0", "1", "2"], "classification", ("1", "2")),
    (["b", "a", "B", "10"], "classification", ("10", "B", "a", "b")),
    (["0.5", "1", "-2", "1e3"], "regression", ()),
    (["true", "false", "true", "true"], "classification", ("false", "true")),
])  # fmt: skip
def test_labels_are_what_their_values_are(
    spec_of: Write, labels: list[str], kind: str, classes: tuple[str, ...]
) -> None:
    table = open_table(spec_of("a.csv", "text,label\n" + "".join(f"t,{label}\n" for label in labels)))
    assert table.labels is not None and (table.labels.kind, table.labels.classes) == (kind, classes)
    if kind == "regression":
        assert table.label_array("train").tolist() == [float(label) for label in labels]


def test_many_whole_numbers_are_numbers_and_either_can_be_asked_for(spec_of: Write) -> None:
    content = "text,label\n" + "".join(f"t{at},{at}\n" for at in range(60))
    found = [open_table(spec_of("a.csv", content, labels=labels)).labels for labels in ("auto", "classification")]
    assert found[0] is not None and found[0].kind == "regression"
    assert found[1] is not None and found[1].kind == "classification" and len(found[1].classes) == 60
    with pytest.raises(DataError, match="no numbers"):
        open_table(spec_of("b.csv", "text,label\na,x\nb,y\n", labels="regression"))


def test_several_labels_of_a_row_are_a_list_or_split_at_a_bar(spec_of: Write) -> None:
    rows = [["x", "y"], [], ["z"], ["y", "z"]]
    jsonl = "".join(json.dumps({"text": "t", "labels": row}) + "\n" for row in rows)
    bars = "text,labels\nt,x|y\nt,z\nt,y | z\n"
    listed, barred = [[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 1]], [[1, 1, 0], [0, 0, 1], [0, 1, 1]]
    written = spec_of("b.csv", bars, labels="multi_label")
    for data, wanted in ((spec_of("a.jsonl", jsonl), listed), (written, barred)):
        table = open_table(data)
        assert table.labels is not None and (table.labels.kind, table.labels.classes) == (
            "multi_label",
            ("x", "y", "z"),
        )
        assert table.label_array("train").tolist() == wanted
        batch = open_sources(data, 7)[0].read(np.arange(2))
        assert batch["labels"].tolist() == [[float(one) for one in row] for row in wanted[:2]]


def test_the_order_of_classes_does_not_follow_the_rows() -> None:
    assert ordered_classes(["b", "a", "c"]) == ordered_classes(["c", "b", "a"]) == ("a", "b", "c")
    assert ordered_classes(["10", "9"]) == ("9", "10")


def test_files_that_are_called_after_splits_are_the_splits(spec_of: Write, tmp_path: Path) -> None:
    spec_of("set/train.csv", "text,label\na,x\nb,y\n")
    spec_of("set/test.csv", "text,label\nnever,x\n")
    spec_of("set/validation.csv", "text,label\nheld,y\n")
    data = DataSpec(f"table:{tmp_path / 'set'}", seq_len=8, cache_dir=str(tmp_path / "cache"))
    table = open_table(data)
    assert texts_of(table) == ["a", "b"] and texts_of(table, "validation") == ["held"]
    facts = data_facts(data)
    assert any("called after a validation" in note for note in facts.notes)
    assert any("1 not read for a test (test.csv)" in note for note in facts.notes)


def test_a_class_that_training_never_sees_is_refused_or_told(spec_of: Write, tmp_path: Path) -> None:
    spec_of("set/train.csv", "text,label\na,sport\nb,news\n")
    spec_of("set/validation.csv", "text,label\nheld,sports\n")
    with pytest.raises(DataError) as raised:
        open_table(DataSpec(f"table:{tmp_path / 'set'}", cache_dir=str(tmp_path / "cache")))
    assert "validation.csv, row 1 is of the class 'sports'" in raised.value.what
    assert "news, sport" in raised.value.because and "'sport'" in raised.value.try_
    # Held out by a hash, its only row: known by its name, and told to be beyond learning.
    for number in range(40):
        rows = "".join(f"text {at},{'ab'[at % 2]}\n" for at in range(8)) + f"rare {number},c\n"
        table = open_table(spec_of(f"{number}.csv", "text,label\n" + rows, validation_fraction=0.3))
        assert table.labels is not None and table.labels.classes == ("a", "b", "c")
        held = texts_of(table, "validation")
        assert any("of the class 'c'" in told for told in table.told) is (f"rare {number}" in held)
        if f"rare {number}" in held:
            return
    pytest.fail("the rare row was never held out")


def test_copies_of_a_text_share_a_split_whatever_their_labels(spec_of: Write) -> None:
    rows = "".join(f"text {at % 10},{'ab'[at % 3 == 0]}\n" for at in range(60))
    table = open_table(spec_of("a.csv", "text,label\n" + rows, validation_fraction=0.3))
    assert table.corpus.validation.documents
    assert not set(texts_of(table)) & set(texts_of(table, "validation"))


def test_parquet_and_arrow_with_the_names_of_their_classes(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    named = {"info": {"features": {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}}}
    schema = arrow.schema([("text", arrow.string()), ("label", arrow.int64())], {b"huggingface": json.dumps(named)})
    rows = arrow.table({"text": ["a", "b", "c"], "label": [1, 0, 1]}, schema=schema)
    parquet.write_table(rows, tmp_path / "a.parquet")
    with arrow.ipc.new_file(str(tmp_path / "a.arrow"), schema) as sink:
        sink.write_table(rows)
    for name in ("a.parquet", "a.arrow"):
        table = open_table(DataSpec(f"table:{tmp_path / name}", validation_fraction=0.0, cache_dir=str(tmp_path / "c")))
        assert table.labels is not None and table.labels.classes == ("neg", "pos")
        assert table.label_array("train").tolist() == [1, 0, 1]


@pytest.mark.parametrize("feature", [
    {"feature": {"names": ["neg", "pos", "mixed"], "_type": "ClassLabel"}, "_type": "List"},
    [{"names": ["neg", "pos", "mixed"], "_type": "ClassLabel"}],
])  # fmt: skip
def test_lists_of_classes_that_have_names_are_those_classes(tmp_path: Path, feature: Any) -> None:
    """Each row was twice as wide as there are classes, so every row but the first had labels of others."""
    arrow = pytest.importorskip("pyarrow")
    named = {b"huggingface": json.dumps({"info": {"features": {"labels": feature}}})}
    schema = arrow.schema([("text", arrow.string()), ("labels", arrow.list_(arrow.int64()))], named)
    rows = arrow.table({"text": ["a", "b", "c"], "labels": [[1], [0, 2], [2]]}, schema=schema)
    pytest.importorskip("pyarrow.parquet").write_table(rows, tmp_path / "a.parquet")
    table = open_table(DataSpec(f"table:{tmp_path / 'a.parquet'}", validation_fraction=0.0, cache_dir=str(tmp_path)))
    assert table.labels is not None and table.labels.classes == ("neg", "pos", "mixed")
    assert table.label_array("train").tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 1]]


def test_what_of_a_folder_is_not_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "inside").mkdir(parents=True)
    (folder / "a.txt").write_text("a text to read, and one more")
    (folder / "table.csv").write_text("text,label\na,x\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "gone.txt").symlink_to(folder / "nothing")
    (folder / "more").symlink_to(folder / "inside")
    os.mkfifo(folder / "pipe.txt")
    facts = data_facts(DataSpec(str(folder), seq_len=8, cache_dir=str(tmp_path / "cache")))
    told = next(note for note in facts.notes if note.startswith("files: "))
    assert "2 not read: of another kind (picture.png, ...)" in told  # a CSV beside prose is no prose
    for what in ("a link to nothing (gone.txt)", "a named pipe (pipe.txt)", "a link to a folder (more)"):
        assert f"1 not read: {what}" in told
    with pytest.raises(DataError, match="is a table, and no text"):
        data_facts(DataSpec(f"text:{folder / 'table.csv'}", cache_dir=str(tmp_path / "cache")))


def test_what_of_a_folder_of_images_is_not_read_is_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(tmp_path / "images" / name / "a.png")
    (tmp_path / "images" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "images" / "dog" / "gone.png").symlink_to(tmp_path / "nothing.png")
    facts = data_facts(DataSpec(f"images:{tmp_path / 'images'}", image_size=8, validation_fraction=0.0))
    assert facts.samples == 2
    assert any("(cat/notes.txt)" in note and "a link to nothing (dog/gone.png)" in note for note in facts.notes)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_are_selected_by_the_scores_that_stand_beside_them(spec_of: Write, kind: str) -> None:
    rows: list[dict[str, object]] = [{"text": f"text {at}", "label": "ab"[at % 2], "grade": at / 8} for at in range(9)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "csv":
        content = "text,label,grade\n" + "".join(f"{','.join(map(str, row.values()))}\n" for row in rows)
    wanted = {"score_field": "grade", "score_min": 0.25, "score_max": 0.75}
    assert len(texts_of(open_table(spec_of(f"a.{kind}", content)))) == 9
    assert texts_of(open_table(spec_of(f"a.{kind}", content, **wanted))) == [f"text {at}" for at in range(2, 6)]
    with pytest.raises(DataError, match="has no number in 'mark'"):
        open_table(spec_of(f"a.{kind}", content, **(wanted | {"score_field": "mark"})))


def test_of_each_row_as_many_tokens_are_read_as_are_asked_for(spec_of: Write) -> None:
    rows: list[dict[str, object]] = [{"prompt": "say: ", "completion": "x" * size} for size in (1, 3, 9)]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    whole, cut = (open_table(spec_of("a.jsonl", content, document_tokens=most)) for most in (0, 8))
    assert [len(text) for text in texts_of(whole)] == [6, 8, 14]
    assert texts_of(cut) == [text[:8] for text in texts_of(whole)]
    ends = cut.counted_array("train")[cut.corpus.train.offsets()[1:] - 1]
    assert ends.tolist() == [1, 1, 0], "of a row that is cut the end is not learnt"
