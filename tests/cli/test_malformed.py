"""Whatever is wrong with a spec file or a command line: exit code 2, a reason and a way out, and no traceback."""

import contextlib
import io
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cli.main import VERBS, main
from paceline.config.shape import Option
from paceline.errors import ConfigError, ConfigErrors
from paceline.spec.load import dump_toml, load_spec, parse_spec, table

SPEC = load_spec(Path(__file__).parents[2] / "examples" / "stdlib-code.toml")
LINES = dump_toml(SPEC).splitlines()
OPTIONS = list(table().options())
SWEEP = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))

WRONG = {
    "text": ["1", "1.5", "true", "[]", "1979-05-27"],
    "texts": ["1", '"x"', "[1]", "true"],
    "whole": ['"x"', "1.5", "true", "-1", "99999999999999999999", "[]", "nan", "0x" + "f" * 5000],
    "number": ['"x"', "nan", "inf", "-1", "-inf", "true", "[1]", "1" + "0" * 400],
    "flag": ["1", '"true"', "0", "[]"],
    "amount": ["300", '"steps"', '"300"',
               '"300 stpes"', '"-3 steps"', '"0 steps"', '"1e400 steps"', '"3 Q steps"', "true"],
    "duration": ["3600", '"h"', '"2 years"', '"-1 h"', '"1e308 d"', "false"],
    "bytes": ['"24"', '"24 GG"', '"x"', "-1", "1.5", '"1e308 GB"', "true"],
    "tables": ["1", '"x"', "[1]", "{ match = 1 }", "true"],
    "free": ["1", '"x"', "[1]", "{ when = 12:00:00 }", "{ a = nan }", "{ a = 99999999999999999999 }"],
}  # fmt: skip


def outcome(words: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


def assert_refused(words: list[str]) -> None:
    code, out, err = outcome(words)
    assert code == 2, (words, out, err)
    assert err.startswith("error: ") and "Traceback" not in err
    assert "\n  because  " in err or "\n  try      " in err
    assert not out


def assert_file_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.toml"
        file.write_bytes(content)
        assert_refused(["plan", str(file), "--provenance"])


def misspelt(draw: st.DrawFn, word: str, known: list[str]) -> str:
    """Return the word with one letter dropped, doubled or swapped with the next, such that it is no known word."""
    at = draw(st.integers(0, len(word) - 1))
    wrong = draw(st.sampled_from([
        word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[:at] + word[at:][1::-1] + word[at + 2 :],
    ]))  # fmt: skip
    return wrong if wrong and wrong not in known else word + "_"


def wrong_values(option: Option) -> list[str]:
    """Return what an option refuses: a number that may be any, such as the lowest score, may be below zero."""
    is_any = option.kind == "number" and option.minimum is None and option.above is None
    return [value for value in WRONG[option.kind] if not (is_any and value == "-1")]


@st.composite
def wrong_line(draw: st.DrawFn) -> str:
    """A valid spec with one line made wrong: its key misspelt, or its value of a wrong type, range, choice or unit."""
    key, option = draw(st.sampled_from(OPTIONS))
    table_name, name = ".".join(key[:-1]), key[-1]
    if draw(st.booleans()):
        known = [other[-1] for other, _ in OPTIONS] + [part for other, _ in OPTIONS for part in other]
        broken = f"{misspelt(draw, name, known)} = 1"
    else:
        choices = [f'"{value}"' for value in ("nonsense", "") if option.choices and value not in option.choices]
        broken = f"{name} = {draw(st.sampled_from(wrong_values(option) + choices))}"
    return f"[{table_name}]\n{broken}\n"


@SWEEP
@given(wrong_line())
def test_a_wrong_line_names_its_line_and_the_key(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(text, "x.toml")
    key = text.splitlines()[1].partition(" ")[0]
    assert "x.toml:2: " in caught.value.what and key in caught.value.what
    assert caught.value.because and caught.value.try_
    assert_file_refused(text.encode())


@SWEEP
@given(st.integers(0, len(LINES) - 1), st.sampled_from(["repeat", "quote", "cut", "open", "junk", "equals"]), st.data())
def test_broken_toml(at: int, damage: str, data: st.DataObject) -> None:
    line = LINES[at]
    broken = {
        "repeat": [line or "= 1", line or "= 2"], "quote": [line + '"'], "cut": [line.partition("=")[0] or "cut", "="],
        "open": [line, "x = [1, "], "junk": [line, data.draw(st.sampled_from(["@@@", "x == 1", "x = 'a", "[[", "{}"]))],
        "equals": [line, "= 3"],
    }[damage]  # fmt: skip
    text = "\n".join([*LINES[:at], *broken, *LINES[at + 1 :]])
    with contextlib.suppress(tomllib.TOMLDecodeError):  # most damage breaks the syntax; the rest is an unknown key
        tomllib.loads(text)
        assert damage in ("cut", "quote", "junk", "open")
    assert_file_refused(text.encode())


@SWEEP
@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_never_crash(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.toml"
        file.write_bytes(content)
        code, _, err = outcome(["plan", str(file), "--provenance"])
    assert code in (0, 2) and "Traceback" not in err  # 0: white space and comments are a valid, empty spec


@st.composite
def wrong_override(draw: st.DrawFn) -> str:
    key, option = draw(st.sampled_from(OPTIONS))
    dotted = ".".join(key)
    return draw(st.sampled_from([
        dotted, "=1", f"{dotted}=", f".{dotted}=1", f"{dotted}.=1", f"{dotted}x=1", f"x{dotted}=1", "task=1",
        *(f"{dotted}={value}" for value in unquoted_wrong(option)),
    ]))  # fmt: skip


def unquoted_wrong(option: Option) -> list[str]:
    """Wrong values on the command line, where numbers and flags may be meant as text, and a text as a list of one."""
    if option.kind == "text":
        return ["nonsense"] if option.choices else ["[1]", "{ a = 1 }"]
    return [value for value in wrong_values(option) if option.kind != "texts" or not value.startswith('"')]


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.deep) for part in (1, 2))])
def test_every_wrong_value_of_every_option_is_refused(part: int) -> None:
    """In a file's line, one of three for each option, and deep the others: which ones the sweeps draw is chance."""
    for at, (key, option) in enumerate(OPTIONS):
        for value in wrong_values(option)[(part + at) % 3 :: 3]:
            with pytest.raises(ConfigError):
                parse_spec(f"[{'.'.join(key[:-1])}]\n{key[-1]} = {value}\n", "x.toml")


@SWEEP
@given(wrong_override())
def test_wrong_overrides(override: str) -> None:
    assert_refused(["plan", "--provenance", "--set", override])


@st.composite
def wrong_command(draw: st.DrawFn) -> list[str]:
    verb = draw(st.sampled_from(sorted(VERBS)))
    path = ["x"] if verb == "report" else []
    wrong = draw(st.sampled_from(["verb", "option", "argument", "value", "missing", "spec", "first"]))
    if wrong == "verb":
        return [misspelt(draw, verb, [*VERBS, "help"])]
    if wrong == "option":
        option = draw(st.sampled_from(["--json", "--set", "--explain", "--steps", "--devices", "--help"]))
        known = ["json", "set", "explain", "steps", "devices", "help"]
        return [verb, *path, "--" + misspelt(draw, option[2:], known)]
    if wrong == "argument":
        return [verb, "a.toml", "b.toml", *path] if verb != "backtest" else [verb]  # which takes any number of files
    if wrong == "value":
        return draw(st.sampled_from([
            ["train", "--steps", "-1"], ["train", "--steps", "1.5"], ["train", "--steps", "9" * 5000],
            ["probe", "--devices", "x"], ["verify", "--dtype", ""],
            ["probe", "--devices", "0"], ["probe", "--kind", "tpu"], ["verify", "--dtype", "fp33"],
            ["verify", "--steps", ""], ["plan", "--json=1"], ["train", "--no-verify=1"], ["train", "--run-dir", "a\0b"],
        ]))  # fmt: skip
    if wrong == "missing":
        return draw(st.sampled_from([["plan", "--set"], ["train", "--steps"], ["train", "--run-dir"], ["report"]]))
    if wrong == "first":
        return [draw(st.sampled_from(["--set", "--jsn", "-v", "-", "--", "--plan", "-5", "--=", "--help=1"])), verb]
    return [
        draw(st.sampled_from(["plan", "train", "verify"])),
        draw(st.sampled_from(["/", ".", "nope.toml", "a\0b", "x" * 5000])),
    ]


@SWEEP
@given(wrong_command())
def test_wrong_command_lines(words: list[str]) -> None:
    assert_refused(words)


@SWEEP
@given(st.lists(st.text(max_size=12), max_size=4))
def test_any_words_end_with_a_message(words: list[str]) -> None:
    code, _, err = outcome(words)
    assert code in (0, 2) and "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [["pln"], ["plan", "--explian"], ["plan", "nope.toml"], ["plan", "--set", "task.optimizer.lrr=1"],
     ["plan", "--set"], ["train", "--steps", "x"],
     ["plan", "--set", b"task.name=\xff".decode(errors="surrogateescape")]],
)  # fmt: skip
def test_in_real_processes(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout and done.stderr.startswith("error: ")
    assert "\n  because  " in done.stderr and "Traceback" not in done.stderr


def test_what_stands_in_a_list_of_tables_is_named_by_its_number() -> None:
    with pytest.raises(ConfigError, match=r"x.toml:2: run.faults.each.2 = 1 is not a table") as caught:
        parse_spec('[run.faults]\neach = [{ kind = "kill", step = 3 }, 1]\n', "x.toml")
    assert caught.value.try_ == "[[run.faults.each]]"


LISTS = """
[[task.optimizer.groups]]
match = ["*.bias"]

[[task.optimizer.groups]]
pattern = "x"
lr_scale = -1.0
[run.faults]
each = [{ kind = "kill" }, { kind = "kil" }]
"""


def test_what_is_wrong_in_a_table_of_a_list_is_told_with_its_line_and_its_number() -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse_spec(LISTS, "x.toml")
    assert [error.what for error in caught.value.errors] == [
        "x.toml:6: unknown key 'task.optimizer.groups.2.pattern'",
        "x.toml:7: task.optimizer.groups.2.lr_scale = -1.0 is out of range",
        'x.toml:9: run.faults.each.2.kind = "kil" is not a choice',
    ]
