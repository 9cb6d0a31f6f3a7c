"""Tables as strangers have them: each is read as it was meant, or its error says what to do. One line for each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.spec.load import load_spec
from paceline.spec.task import DataSpec
from paceline.task.data.source import open_sources
from paceline.task.data.sources.documents import read_documents
from paceline.task.data.sources.files import list_files
from paceline.task.data.sources.tables import json_rows
from paceline.task.data.sources.tables.in_words import first_rows, seen_lines
from paceline.task.data.sources.tables.listing import list_table
from paceline.task.data.sources.tables.store import TextTable, open_table
from paceline.task.settled import settle

Settle = Callable[..., TextTable]

ROWS = [("the invoice is wrong", "billing"), ("I cannot log in", "technical"), ("two\nlines", "billing"),
        ("möbel", "technical")]  # fmt: skip


def csv_of(head: str, rows: list[tuple[str, ...]] | None = None, delimiter: str = ",") -> str:
    quoted = [delimiter.join(f'"{cell}"' for cell in row) for row in rows or ROWS]
    return "\n".join([*([head] if head else []), *quoted, ""])


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "\n".join(map(json.dumps, rows))


LABELLED = [{"text": text, "label": label} for text, label in ROWS]
SHARE = [{"id": at, "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": label}]}
         for at, (text, label) in enumerate(ROWS)]  # fmt: skip
PARTS = [{"messages": [{"role": "user", "content": [{"type": "text", "text": text}]},
                       {"role": "assistant", "content": label}]} for text, label in ROWS]  # fmt: skip
ALPACA = [{"instruction": text, "input": "" if at else "in English", "output": label}
          for at, (text, label) in enumerate(ROWS)]  # fmt: skip
TOOLS = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]}]
FIRST = "the invoice is wrong"
TALK = f"user: {FIRST}\nassistant: billing\n"


@pytest.fixture
def settled(tmp_path: Path) -> Settle:
    """Settle data that are written to a file, or to several of a folder, and open the table that they are."""

    def of(name: str, content: Any, **options: Any) -> TextTable:
        for path, each in (content if isinstance(content, dict) else {name: content}).items():
            file = tmp_path / name / path if isinstance(content, dict) else tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(each.encode() if isinstance(each, str) else each)
        spec = load_spec(None, [f"task.data.source={tmp_path / name}"])
        assert isinstance(spec.task.data, DataSpec)
        given = {"seq_len": 128, "validation_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **options}
        data = settle(replace(spec, task=replace(spec.task, data=replace(spec.task.data, **given)))).spec.task.data
        assert isinstance(data, DataSpec)
        if not data.source.startswith("table:"):
            open_sources(data, 7)
            pytest.fail("read as documents")
        return open_table(data)

    return of


@pytest.mark.parametrize(("name", "content"), [
    ("utf16.csv", csv_of("text,label").encode("utf-16")),
    ("commas.tsv", csv_of("text,label")),
    ("packed.csv.gz", gzip.compress(csv_of("text;label", delimiter=";").encode())),
    ("blank-lines-first.csv", "\n \n" + csv_of(" text , label ")),
    ("excel.csv", "sep=;\n" + csv_of("text;label", delimiter=";")),
    ("spreadsheet-rows.csv", csv_of("text,label,", [(*row, "") for row in ROWS]) + ",,\n"),
    ("numbered.csv", csv_of(",Tweet,Label", [(str(at), *row) for at, row in enumerate(ROWS)])),
    ("sentiment.csv", csv_of("review,sentiment")),
    ("remarks.csv", "# exported by the shop, in 2026\n#\n\n" + csv_of("text,label")),
    ("remark-of-two.csv", "# exported, by hand\n" + csv_of("text,label")),
    ("remark.tsv", "# exported by the shop\n" + csv_of("text\tlabel", delimiter="\t")),
    ("marked-header.csv", "# numpy's way\n" + csv_of("# text,label")),
    ("array.json", json.dumps(LABELLED)),
    ("pretty.json", "\n" + json.dumps(LABELLED, indent=2) + "\n"),
    ("lines.json", lines_of(LABELLED)),
    ("array.json.gz", gzip.compress(json.dumps(LABELLED).encode())),
    ("beside-others", {"train.csv": csv_of("text,label"), "README.md": "# Mine", "test.csv": csv_of("text,label")}),
    ("of-folders", {"train/a.csv": csv_of("text,label"), "test/a.csv": csv_of("text,label")}),
    ("of-json", {"train.json": json.dumps(LABELLED), "dataset_info.json": "{}"}),
    ("blanks.csv", csv_of("Review Text,Gold-Label")),
    ("lines-and-json", {"a.jsonl": lines_of(LABELLED), "config.json": "{}", "LICENSE.txt": "Mine"}),
])  # fmt: skip
def test_texts_with_labels_are_read_as_they_were_meant(settled: Settle, name: str, content: Any) -> None:
    table = settled(name, content)
    assert table.columns.kind == "labelled" and table.labels is not None
    assert table.labels.classes == ("billing", "technical")
    assert table.label_array("train").tolist() == [0, 1, 0, 1]
    data = DataSpec("", seq_len=128)
    assert [row.text for row in first_rows(table, data, 4)] == [text for text, _ in ROWS]


@pytest.mark.parametrize(("name", "content", "first"), [
    ("share.json", json.dumps(SHARE), TALK),
    ("share.jsonl", lines_of(SHARE), TALK),
    ("parts.jsonl", lines_of(PARTS), TALK),
    ("alpaca.json", json.dumps(ALPACA), f"user: {FIRST}\n\nin English\nassistant: billing\n"),
    ("alpaca.jsonl", lines_of(ALPACA), f"user: {FIRST}\n\nin English\nassistant: billing\n"),
    ("response.jsonl", lines_of([{"prompt": text, "response": label} for text, label in ROWS]), TALK),
    ("answers.csv", csv_of("question,answer"), TALK),
])  # fmt: skip
def test_conversations_are_read_in_whatever_way_they_were_written(
    settled: Settle, name: str, content: str, first: str
) -> None:
    table = settled(name, content)
    row = first_rows(table, DataSpec("", seq_len=128))[0]
    assert row.text == first
    assert row.learnt == repr("billing\n")


@pytest.mark.parametrize(("name", "content", "because", "hint"), [
    ("nohead.csv", csv_of(""), "these look like a row", "such as text,label"),
    ("print.csv", csv_of("", [("column 3 is narrow", "yes"), *ROWS]), "these look like a row", "such as text,label"),
    ("caret.csv", csv_of("text^label", delimiter="^"), "the columns text^label", "told apart by one of"),
    ("between.csv", csv_of("text,label") + "# the rest is of May\n", "the header names 2", "above the header alone"),
    ("latin.csv", csv_of("text,label").encode("latin-1"), "'utf-8' codec", "iconv -f LATIN1"),
    ("commas.csv", csv_of("text;score", [(f"t{at}", f"0,{at}") for at in range(30)], ";"), "different",
     "decimal point"),
    ("nan.csv", csv_of("text,label", [*ROWS, ("a", "NaN")]), "'NaN', which stands for no value", "skip"),
    ("copies.csv", csv_of("text,label", [("a", "x"), ("a", "y")]), "all of one text", "validation_fraction = 0"),
    ("differ", {"a.csv": csv_of("text,label"), "b.csv": csv_of("body,kind")}, "it has body, kind", "same columns"),
    ("one.json", '{"data": [{"text": "a"}], "version": 1}', "in its field 'data'", "jq -c"),
    ("columns.json", '{"text": ["a"], "label": ["b"]}', "they are text, label", 'orient="records"'),
    ("config.json", '{"a": 1}', "its fields are a", "text: before the path"),
    ("number.json", "17", "neither [ nor {", "text: before the path"),
    ("cut.json", json.dumps(LABELLED)[:-1], "not closed", "again"),
    ("broken.json", '[{"text": "a", "label": "b"}, {"text": ]', "Expecting value", "again"),
    ("entries.json", '[{"text": "a", "label": "b"}, 3]', "it is 3", "array of objects"),
    ("array.jsonl", json.dumps(LABELLED), "it is a list", "name it .json"),
    ("pairs.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}', "text_field", "preference_pairs"),
    ("tools.jsonl", lines_of(TOOLS), "it is {}", "arguments"),
    ("odd.csv", csv_of("Ticket Nr.;Issue Text;is Urgent?", [("1", "a b", "0")], ";"), "is Urgent?",
     'text_field = "Issue Text"'),
    ("image.jsonl", lines_of([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}]), "image_url",
     "skip"),
    ("book.xlsx", "PK", "a spreadsheet", "save it as CSV"),
    ("rows.csv.zip", "PK", ".zip is not", "unzip"),
])  # fmt: skip
def test_what_cannot_be_read_says_what_to_do(settled: Settle, name: str, content: Any, because: str, hint: str) -> None:
    with pytest.raises(PacelineError) as caught:
        fraction = {"validation_fraction": 0.2} if name == "copies.csv" else {}
        table = settled(name, content, **fraction)
        pytest.fail(f"read as {seen_lines(table)}")
    assert because in caught.value.because, caught.value
    assert hint in caught.value.try_, caught.value


def test_several_labels_in_a_field_may_be_none_and_are_not_taken_for_one(settled: Settle) -> None:
    """A row without a tag ended the reading, and "late, urgent" was a class of its own without a word."""
    rows = [("a", "late|urgent"), ("b", ""), ("c", "urgent"), ("d", "late")]
    table = settled("tags.csv", csv_of("text,tags", rows), label_field="tags", labels="multi_label")
    assert table.labels is not None and table.labels.classes == ("late", "urgent")
    assert table.label_array("train").tolist() == [[1, 1], [0, 0], [0, 1], [1, 0]]
    rows = [(text, label.replace("|", ", ")) for text, label in rows]
    with pytest.raises(PacelineError, match=r"no label in 'tags' has a '\|'") as caught:
        settled("commas.csv", csv_of("text;tags", rows, ";"), label_field="tags", labels="multi_label")
    assert "'late| urgent'" in caught.value.try_
    places = [("a", "Lyon/ France"), ("b", "Rome/ Italy"), ("c", "Lyon/ France")]
    table = settled("places.csv", csv_of("text;tags", places, ";"), label_field="tags", labels="multi_label")
    assert table.labels is not None and table.labels.classes == ("Lyon/ France", "Rome/ Italy")


def test_a_column_of_0_and_1_for_each_class_is_several_labels(settled: Settle) -> None:
    """In the columns' order, whatever rows there are: a class that no row has is one of them."""
    rows = [("a", "1", "0", "1"), ("b", "0", "0", "0"), ("c", "0", "0", "1"), ("d", "1", "0", "0")]
    head, fields = "id,text,toxic,threat,insult", ("toxic", "threat", "insult")
    table = settled("jigsaw.csv", csv_of(head, [(str(at), *row) for at, row in enumerate(rows)]), label_fields=fields)
    assert table.labels is not None and table.labels.kind == "multi_label" and table.labels.classes == fields
    assert table.label_array("train").tolist() == [[int(cell) for cell in row[1:]] for row in rows]
    assert any("'threat'" in told for told in table.told)
    kinds = {"text": "a", "toxic": True, "threat": 0, "insult": 1.0}
    table = settled("kinds.jsonl", lines_of([kinds, kinds | {"insult": "false"}]), label_fields=fields)
    assert table.label_array("train").tolist() == [[1, 0, 1], [1, 0, 0]]
    for name, given, told in (("half", [0.5], "neither 0 nor 1"), ("none", [None], "empty label"),
                              ("list", [[1]], "neither 0 nor 1"), ("two", [2], "neither 0 nor 1")):  # fmt: skip
        with pytest.raises(PacelineError, match=told):
            settled(f"{name}.jsonl", lines_of([kinds, kinds | {"insult": given[0]}]), label_fields=fields)
    table = settled("alone.jsonl", lines_of([kinds, kinds | {"toxic": 0}]), label_fields=("toxic", "threat"))
    assert table.label_array("train").tolist() == [[1, 0], [0, 0]], "rows of one class alone tell it from none"
    for options, told in (({"label_fields": ("toxic", "thret")}, "'thret'"),
                          ({"label_fields": fields, "label_field": "toxic"}, "for each class"),
                          ({"label_fields": fields, "labels": "regression"}, "for each class"),
                          ({"label_fields": ("toxic", "toxic")}, "for each class")):  # fmt: skip
        with pytest.raises(PacelineError, match=told):
            settled("again.jsonl", lines_of([kinds, kinds]), **options)


def test_codes_with_zeros_before_them_are_names(settled: Settle) -> None:
    """ "007" and "7" were one class, and the exported classes had lost their zeros."""
    rows = [("a", "007"), ("b", "7"), ("c", "012"), ("d", "007")]
    table = settled("codes.csv", csv_of("text,label", rows))
    assert table.labels is not None and table.labels.classes == ("007", "012", "7")
    assert table.label_array("train").tolist() == [0, 2, 1, 0]
    table = settled("numbers.csv", csv_of("text,label", [("a", "10"), ("b", "9"), ("c", "0")]))
    assert table.labels is not None and table.labels.classes == ("0", "9", "10")


def test_lists_of_0_and_1_say_of_every_class_whether_a_row_has_it(settled: Settle) -> None:
    """They were taken for lists of the class numbers 0 and 1, without a word."""
    for name, rows in (
        ("three", [[1, 0, 1], [0, 0, 1], [1.0, 1.0, 1.0], [0, 0, 0]]),
        ("two", [[1, 0], [0, 1], [0, 1]]),
    ):
        table = settled(f"{name}.jsonl", lines_of([{"text": str(at), "labels": row} for at, row in enumerate(rows)]))
        assert table.labels is not None and table.labels.classes == tuple(map(str, range(len(rows[0]))))
        assert table.label_array("train").tolist() == rows
        assert "one for each of" in table.labels.because
    rows = [[1, 0], [0], [1, 0], [0]]  # of several lengths they are class numbers
    table = settled("numbers.jsonl", lines_of([{"text": str(at), "labels": row} for at, row in enumerate(rows)]))
    assert table.label_array("train").tolist() == [[1, 1], [1, 0], [1, 1], [1, 0]]
    files = {f"{split}.jsonl": lines_of([{"text": str(at), "labels": row} for at, row in enumerate(rows)])
             for split, rows in (("train", [[1, 0], [0, 1]]), ("validation", [[1, 0, 0]]))}  # fmt: skip
    with pytest.raises(PacelineError, match="has 3 labels"):
        settled("uneven", files)
    files["validation.jsonl"] = lines_of([{"text": "c", "labels": [0, 2]}])
    with pytest.raises(PacelineError, match="has the label 2"):  # it was a label of 2, in evaluations alone
        settled("other", files)
    with pytest.raises(PacelineError, match="lists of fractions"):
        settled("soft.jsonl", lines_of([{"text": "a", "labels": [0.2, 0.8]}, {"text": "b", "labels": [0.5, 0.5]}]))


def parquet_of(**columns: list[Any]) -> bytes:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = arrow.BufferOutputStream()
    parquet.write_table(arrow.table(columns), content)
    return bytes(content.getvalue().to_pybytes())


@pytest.mark.parametrize(("text", "because", "hint"), [
    ([b"\xff\xfe" + text.encode() for text, _ in ROWS], "byte 0 is 0xff, so it is no UTF-8 text", "strings in UTF-8"),
    ([{"body": text, "n": 1} for text, _ in ROWS], "fields of its own: body, n", 'text_field = "text.body"'),
])  # fmt: skip
def test_a_parquet_column_that_is_no_text_says_how_it_becomes_one(
    settled: Settle, text: list[Any], because: str, hint: str
) -> None:
    with pytest.raises(PacelineError) as caught:
        settled("odd.parquet", parquet_of(text=text, label=[label for _, label in ROWS]))
    assert because in caught.value.because and hint in caught.value.try_, caught.value


WITHIN = [{"meta": {"text": text, "about": {"kind": label}}, "n": at} for at, (text, label) in enumerate(ROWS)]


@pytest.mark.parametrize(("name", "content", "options"), [
    ("within.jsonl", lambda: lines_of(WITHIN), {"text_field": "meta.text", "label_field": "meta.about.kind"}),
    ("within.json", lambda: json.dumps(WITHIN), {"text_field": "meta.text", "label_field": "meta.about.kind"}),
    ("within.parquet", lambda: parquet_of(**{key: [row[key] for row in WITHIN] for key in WITHIN[0]}),
     {"text_field": "meta.text", "label_field": "meta.about.kind"}),
    ("bytes.parquet", lambda: parquet_of(text=[text.encode() for text, _ in ROWS],
                                         label=[label.encode() for _, label in ROWS]), {}),
    ("dotted.jsonl", lambda: lines_of([{"a.text": text, "a": {"text": "no"}, "label": label} for text, label in ROWS]),
     {"text_field": "a.text"}),
])  # fmt: skip
def test_fields_within_columns_and_bytes_are_texts_and_labels(
    settled: Settle, name: str, content: Callable[[], Any], options: dict[str, str]
) -> None:
    table = settled(name, content(), **options)
    assert table.labels is not None and table.label_array("train").tolist() == [0, 1, 0, 1]
    assert [row.text for row in first_rows(table, DataSpec("", seq_len=128), 4)] == [text for text, _ in ROWS]


def test_conversations_may_stand_within_a_column(settled: Settle) -> None:
    talks = [{"data": {"talk": row["messages"]}} for row in PARTS]
    table = settled("within.jsonl", lines_of(talks), messages_field="data.talk")
    assert first_rows(table, DataSpec("", seq_len=128))[0].text == TALK


def test_a_column_that_is_not_read_is_told(settled: Settle) -> None:
    (line, *_) = seen_lines(settled("more.csv", csv_of("text,label,shop", [(*row, "a") for row in ROWS])))
    assert "not read: shop" in line
    (line, *_) = seen_lines(settled("other.csv", csv_of("text,shop")))
    assert 'label_field = "shop" takes it for the labels' in line
    (line, *_) = seen_lines(settled("dated.csv", csv_of("text,date,shop", [(*row, "a") for row in ROWS])))
    assert "not read: date, shop (label_field says which" in line, "and not the first of them, which is a date"


def test_numbers_with_a_decimal_comma_are_told_how_to_be_written(settled: Settle) -> None:
    prices = csv_of("text;price", [(text, "85,50") for text, _ in ROWS], ";")
    with pytest.raises(PacelineError, match="no numbers") as raised:
        settled("german.csv", prices, label_field="price", labels="regression")
    assert raised.value.try_ == "numbers with a decimal point: 85.50"


def test_a_table_is_called_by_its_own_name(tmp_path: Path) -> None:
    """Whatever words are in it: of documents a folder is told as "text in" its name."""
    folder = tmp_path / "text in French, text of letters"
    folder.mkdir()
    (folder / "a.csv").write_text(csv_of("text,label"))
    assert list_table(DataSpec(f"table:{folder}")).what == folder.name
    assert list_files(DataSpec(str(folder), include=("*.csv",))).what == f"text in {folder.name}"


def test_documents_with_a_score_beside_them_stay_documents(tmp_path: Path) -> None:
    path = tmp_path / "scored.jsonl"
    path.write_text(lines_of([{"text": "a", "score": 0.5, "topic": "x"}]))
    data = settle(load_spec(None, [f"task.data.source={path}"])).spec.task.data
    assert isinstance(data, DataSpec) and data.source == str(path)


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_an_array_is_read_alike_in_pieces_of_any_length(
    settled: Settle, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(json_rows, "PIECE_CHARACTERS", piece)
    table = settled("pieces.json", json.dumps(LABELLED, indent=1))
    assert [row.text for row in first_rows(table, DataSpec("", seq_len=128), 9)] == [text for text, _ in ROWS]


def test_json_is_learnt_as_a_text_only_where_that_is_asked_for(tmp_path: Path) -> None:
    """`paceline data prepare` reads documents of a source as it stands; it took JSON for prose."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(LABELLED))

    def documents(source: object, **options: Any) -> int:
        data = DataSpec(str(source), **options)
        return len(list(read_documents(data, list_files(data))))

    with pytest.raises(PacelineError, match="is a table, and no text"):
        documents(path)
    assert documents(f"text:{path}") == documents(tmp_path, include=("*.json",)) == 1
