"""Reading TOML: every key has its line, and everything that is not a TOML file is refused with a reason."""

from pathlib import Path

import pytest

from paceline.config.document import key_lines, parse_document, read_document
from paceline.errors import ConfigError

TRICKY = '''# a comment with [brackets] and = signs
top = "a # b = c"
[table]  # note
plain = 1
"quoted.key" = 'x = [1'
dotted . inner = true
list = [ "]",  # comment ]
  2, [3],
]
long = """
fake = 1
[fake]
\\""" still inside ""\\"
"""
after_long = { a = 1, b = "}" }
raw = \'\'\'
x = 1 # "
\'\'\'
last = 3.5
[table.'sub.table']
key = -1'''


def test_every_key_has_its_line() -> None:
    lines = {".".join(key): line for key, line in key_lines(TRICKY).items()}
    assert lines == {
        "top": 2, "table": 3, "table.plain": 4, "table.quoted.key": 5, "table.dotted.inner": 6, "table.list": 7,
        "table.long": 10, "table.after_long": 15, "table.raw": 16, "table.last": 19, "table.sub.table": 20,
        "table.sub.table.key": 21,
    }  # fmt: skip


def test_tables_of_a_list_are_told_apart_by_their_numbers() -> None:
    lines = key_lines("[[a]]\nx = 1\n[a.deep]\ny = 2\n[[a]]\nx = 3\n[[a.b]]\nz = 4\n[[a.b]]\nz = 5\n")
    assert lines == {
        ("a",): 1, ("a", "1"): 1, ("a", "1", "x"): 2, ("a", "1", "deep"): 3, ("a", "1", "deep", "y"): 4, ("a", "2"): 5,
        ("a", "2", "x"): 6, ("a", "2", "b"): 7, ("a", "2", "b", "1"): 7, ("a", "2", "b", "1", "z"): 8,
        ("a", "2", "b", "2"): 9, ("a", "2", "b", "2", "z"): 10,
    }  # fmt: skip


def test_a_key_inside_an_inline_table_stands_on_its_line() -> None:
    document = parse_document(TRICKY, "x.toml")
    assert document.where(("table", "after_long", "a")) == "x.toml:15"
    assert document.where(("nowhere",)) == "x.toml"


def test_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"\xef\xbb\xbf[a]\r\nb = 1\r\n")
    assert read_document(file).where(("a", "b")) == f"{file}:2"
    assert read_document(file).values == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [("a = 1\na = 2\n", 2, "a key stands there twice"), ("[a]\n[b]\n[a]\n", 3, "the table [a] stands there twice"),
     ("[a.b]\n[a.b]\n", 2, "[a.b] stands there twice"),
     ("a = fast\n", 1, "Invalid value"),
     ("a = 1\nb\n", 2, "Expected '='"), ("a = [1,\n", 2, ""), ("a = " + "9" * 5000, 1, "digits"), ('a = "x\n', 1, "")],
)  # fmt: skip
def test_toml_errors_name_the_line(text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "x.toml")
    assert caught.value.what.startswith(f"x.toml:{line}: ") and says in caught.value.because


def test_text_without_quotes_is_explained() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document("stop = 300 steps\n", "x.toml")
    assert 'stop = "300 steps"' in caught.value.try_


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_document("a = " + "[" * 100_000, "x.toml")


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"a\0b")
    (tmp_path / "latin.toml").write_bytes(b"a = 1\nb = '\xe9'")
    (tmp_path / "huge.toml").write_bytes(b"#" * (1 << 21))
    cases = {
        "binary.toml": "binary",
        "latin.toml": "0xe9",
        "huge.toml": "larger",
        ".": "",
        "latn.toml": "",
        "a\0b": "null",
    }
    for name, reason in cases.items():
        with pytest.raises(ConfigError) as caught:
            read_document(tmp_path / name)
        assert reason in caught.value.because, name
    with pytest.raises(ConfigError, match=r"latin.toml'\?"):
        read_document(tmp_path / "latn.toml")
    with pytest.raises(ConfigError, match=r"latin.toml:2"):
        read_document(tmp_path / "latin.toml")


def test_a_link_to_nothing_is_named_as_such(tmp_path: Path) -> None:
    """The error asked "did you mean 'x.toml'?", of x.toml itself."""
    (tmp_path / "x.toml").symlink_to("gone.toml")
    with pytest.raises(ConfigError, match=r"it is a link to gone\.toml, which is not there"):
        read_document(tmp_path / "x.toml")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("rows.csv", "text,label\na,b\n", "task.data.source=rows.csv"),
        ("train.py", "import paceline\n", "python train.py"),
        ("spec.yaml", "task:\n  name: x\n", "[tables]"),
    ],
)
def test_a_file_of_another_kind_is_told_as_what_it_is(name: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match="is not a spec file") as caught:
        parse_document(text, name)
    assert told in caught.value.try_
