"""Lines for a terminal are folded between words, below their first word; those for files and pipes stay whole."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import struct
import termios
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, cast

import pytest

from paceline.cli.main import main
from paceline.said import OwnWarning, folded, is_shown, say_line, say_own_warnings

END = "end of what was printed"
PLAN = (
    "         1.22 s/step ±16% · 0.56 GiB/device · 6m 06s · 2.03 Wh · price unknown   (best of 281 that fit: --explain)"
)


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, int]]:
    """Yield a terminal of so many columns, and the descriptor that reads what was printed on it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(slave, "w", encoding="utf-8") as stream:  # noqa: PTH123 (a descriptor)
        yield stream, master
    os.close(master)


def printed(stream: TextIO, master: int) -> list[str]:
    """Return the lines that a terminal has got by now, whenever the kernel hands them on."""
    print(END, file=stream, flush=True)
    found = b""
    while not found.endswith(f"{END}\r\n".encode()):
        found += os.read(master, 1 << 16)
    return found.decode().splitlines()[:-1]


@pytest.mark.parametrize("columns", [40, 79, 80, 200])
@pytest.mark.parametrize("line", [PLAN, "verify   " + "equal to one device " * 9, "error: " + "no words " * 30])
def test_a_line_is_folded_to_the_terminal_and_loses_nothing(line: str, columns: int) -> None:
    with terminal(columns) as (stream, _):
        lines = folded(line, stream).split("\n")
        assert all(len(each) <= columns for each in lines)
        assert " ".join(lines).split() == line.split()
        first = 0 if line.startswith("error") else 9
        assert all(each[:first].isspace() and each[first] != " " for each in lines[1:] if first)
        assert (len(lines) == 1) is (len(line) <= columns)


def test_a_word_that_is_longer_than_the_terminal_stays_whole() -> None:
    path = "/a" * 60
    with terminal(80) as (stream, _):
        assert path in folded(f"report   {path}  forecast vs measured: time -5.1%", stream).split()


def test_a_command_can_be_copied() -> None:
    command = f"      paceline plan spec.toml {'--set plan.zero=2 ' * 9}".rstrip()
    with terminal(80) as (stream, _):
        assert folded(command, stream) == command


def test_nothing_is_folded_for_a_file_a_pipe_or_a_terminal_without_width() -> None:
    assert folded(PLAN, io.StringIO()) == PLAN
    for columns in (0, 20):
        with terminal(columns) as (stream, _):
            assert folded(PLAN, stream) == PLAN
    read, write = os.pipe()
    with open(read, encoding="utf-8") as reader, open(write, "w", encoding="utf-8") as writer:  # noqa: PTH123 (descriptors)
        say_line(PLAN, writer)
        assert reader.readline() == f"{PLAN}\n"


class Tee:
    """What a script puts in the place of its output, to have it in a file as well."""

    def __init__(self) -> None:
        self.told = ""

    def write(self, text: str) -> None:
        """Keep a text."""
        self.told += text

    def flush(self) -> None:
        """Do nothing."""


def test_an_output_of_a_scripts_own_gets_whole_lines() -> None:
    """It was asked whether it is a terminal, which hardly any such class can tell."""
    tee = Tee()
    say_line(PLAN, cast(TextIO, tee))
    assert tee.told == f"{PLAN}\n" and not is_shown(cast(TextIO, tee))


def test_a_plan_is_read_on_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was cut at column 80 in the middle of words, by the terminal."""
    with terminal(80) as (stream, master):
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["plan", "--set", "cluster.probe=false"]) == 0
        told = printed(stream, master)
    assert any(line.startswith("plan ") for line in told) and all(len(line) <= 80 for line in told)


def journal_of(run: Path, seconds: float = 1.0) -> Path:
    """Write the journal of a short run that waited for its data, with an alert that says at length what to try."""
    lines = [{"kind": "run_started", "time": 0.0, "attempt": 1, "step": 0, "world_size": 1}]
    lines += [{"kind": "step", "time": at + 1.0, "step": at, "loss": 2.0 - at / 100, "weight": 1.0,
               "seconds": {"total": seconds + at % 3 / 100, "data": 0.9, "forward_backward": 0.1}}
              for at in range(1, 40)]  # fmt: skip
    alert = {"kind": "alert", "time": 30.0, "rule": "slow", "severity": "warning", "state": "firing", "step": 30,
             "title": "steps take twice as long as " + "was forecast " * 4, "advice": "look " * 12}  # fmt: skip
    lines.append({"kind": "run_ended", "time": 40.0, "status": "complete", "exit_code": 0, "step": 39})
    (run / "journal").mkdir(parents=True)
    (run / "journal" / "0001.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run / "journal" / "alerts-0001.jsonl").write_text(json.dumps(alert) + "\n")
    return run


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["report", "a"], 0, "verdict  data-bound"),
        (["compare", "a", "b"], 0, "step time      b against a"),
        (["bill", "a", "b"], 0, "unknown    money of some starts"),
        (["alerts", "list", "a"], 0, "1 on record"),
        (["alerts", "rules"], 0, "no_step"),
        (["doctor"], 0, "training works here"),
    ],
)
def test_what_a_verb_tells_of_runs_is_read_on_eighty_columns(
    words: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts, differences, notes and advice are long: those of most verbs were cut in the middle of words."""
    for name, seconds in (("a", 1.0), ("b", 1.5)):
        journal_of(tmp_path / name, seconds)
    monkeypatch.chdir(tmp_path)
    with terminal(80) as (stream, master):
        monkeypatch.setattr("sys.stdout", stream)
        assert main(words) == code
        told = printed(stream, master)
    assert any(line.startswith(said) for line in told)
    table = next((index for index, line in enumerate(told) if not line.strip()), 0) if words[0] == "bill" else 0
    assert all(len(line) <= 80 or " " not in line.strip() for line in told[table:]), told


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--set", "task.schedule.kind=cosin", "--set", "task.stop=3 stepz", "--set", "cluster.devices=two"],
        ["plan", "--set", "task.model=llama-70b", "--set", "cluster.device=h100-sxm", "--set", "cluster.devices=8"],
        ["plan", "--set", "task.model=llama-8b", "--set", "task.model.experts=64", "--set", "cluster.probe=false"],
    ],
)
def test_an_error_is_read_on_eighty_columns(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Why, and what to try, were cut in the middle of words; below their first line they stand under themselves."""
    with terminal(80) as (stream, master):
        monkeypatch.setattr("sys.stderr", stream)
        assert main(words) in (2, 3)
        told = printed(stream, master)
    assert "error:" in told[0]
    assert all(len(line) <= 80 for line in told[1:]), told
    assert any(line.startswith("           ") for line in told), "nothing was folded"


def test_a_warning_of_ours_is_one_line_of_ours_and_those_of_others_are_pythons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a GPT-2 with adapters showed lines of our source, each several times."""
    monkeypatch.setattr(warnings, "showwarning", lambda *given: print("theirs", given[0]))
    say_own_warnings()
    warnings.simplefilter("always")  # as after any `catch_warnings` of a library: Python forgets what it has shown
    for _ in range(3):
        warnings.warn("random numbers of a block", OwnWarning, stacklevel=1)
    warnings.warn("other", UserWarning, stacklevel=1)
    out, err = capsys.readouterr()
    assert (out, err) == ("theirs other\n", "note     random numbers of a block\n")
