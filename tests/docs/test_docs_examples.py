"""What the documentation shows works: every command and every Python block in it is run, on a tiny task.

Pages share one folder with a copy of examples/, made small by SMALLER; a tutorial has an empty one of its own, so that
what it needs stands on it. The rules:

- A line `$ COMMAND` is run, each once, with the exit code 0; `<!-- exit 2 -->` before its block asks for another.
  The lines below it are what it prints: a line that is really printed has all words of each, in their order. Numbers,
  units, and names with a figure in them are the machine's and the small task's, and are not compared.
- A TOML block is read as a spec. A Python block is executed; it knows the names of the blocks above it.
- `<!-- file: train.py -->` before a block writes it to that file instead, for commands further down.
- `<!-- not run: REASON -->` leaves a block alone; `<!-- deep -->` leaves it to `make test-deep`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import run_patiently

from paceline.spec.load import parse_spec

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
COMMAND_SECONDS = 120
SHELL = re.compile(r"[|&;<>()$`*?\[\]~#!{}]|^\s*\w+=")  # what a shell does more with than to start a program
KINDS = ("console", "python", "toml", "csv")  # csv: only as a file
TRAIN = "paceline train examples/stdlib-code.toml"  # pages look at what this leaves in runs/stdlib-code
SMALLER = {
    "stdlib-code.toml": {
        'model = "llama-3m"': 'model = { name = "llama-1m", hidden = 32, layers = 2, ffn = 48 }',
        "devices = 2": "devices = 2\nprobe = false",
        '"8192 tokens"': '"512 tokens"',
        '"300 steps"': '"6 steps"',
        "seq_len = 256": 'seq_len = 64\nmax_bytes = "300 kB"',
        '"30 steps"': '"2 steps"',
        '"10 steps"': '"2 steps"',
        '"100 steps"': '"3 steps"',
    },
    "digits.toml": {
        "devices = 2": "devices = 2\nprobe = false",
        '"10 epochs"': '"6 steps"',
        '"20 steps"': '"2 steps"',
        '"50 steps"': '"3 steps"',
    },
}
# What is printed on a machine that was probed, of a run long enough to be held against its forecast.
ELSEWHERE = re.compile(r"\(probed\)|forecast vs measured.*|at sequence .*|mfu \S+ \(causal\)|AMD EPYC.*")
UNITS = set(re.findall(r"\w+", "s ms m h d k M B W kWh Wh J GiB MiB KiB GB MB kB TB TFLOP GFLOP tok USD EUR"))
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<kind>\w+)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the mark in the comment before it."""

    page: Path
    line: int
    kind: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("kind")) + 1, found["kind"], found["text"], found["mark"] or "")
        for found in BLOCK.finditer(text)
    ]


BLOCKS = [block for page in PAGES if page.exists() for block in blocks_of(page)]


def cases() -> Iterator[object]:
    """Yield the blocks to run, each command once, as pytest parameters."""
    seen: set[str] = set()
    for block in BLOCKS:
        if block.kind not in KINDS or block.mark.startswith("not run"):
            continue
        if block.kind == "console" and block.text in seen and TUTORIALS not in block.page.parents:
            continue
        seen.add(block.text)
        marks = [pytest.mark.deep] if block.mark == "deep" else []
        yield pytest.param(block, id=str(block), marks=marks)


class Checkout:
    """A folder like a checkout with small examples, and what the commands run in it have printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._endings: dict[str, tuple[int, str]] = {}

    def run(self, command: str) -> tuple[int, str]:
        """Run a command, if it was not run before, and return its exit code and all that it printed."""
        if command not in self._endings:
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            environ = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
            ran = run_patiently(words_to_start(command), COMMAND_SECONDS, cwd=self.folder, env=environ)
            self._endings[command] = (ran.returncode, ran.stdout + ran.stderr)
        return self._endings[command]


def words_to_start(command: str) -> list[str]:
    """Return what runs a command: the interpreter itself where a shell would only start it, else the shell."""
    first, *rest = [""] if SHELL.search(command) else shlex.split(command)
    if first == "paceline":
        return [sys.executable, "-m", "paceline", *rest]
    return [sys.executable, *rest] if first == "python" else ["bash", "-c", command]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a checkout in which the example has been trained."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "examples").mkdir()
    for path in (ROOT / "examples").glob("*.*"):
        text = path.read_text(encoding="utf-8")
        for shown, small in SMALLER.get(path.name, {}).items():
            assert shown in text, f"{path.name} no longer has {shown}"
            text = text.replace(shown, small)
        (folder / "examples" / path.name).write_text(text, encoding="utf-8")
    made = Checkout(folder)
    code, printed = made.run(TRAIN)
    assert code == 0, printed
    return made


@pytest.fixture(scope="module")
def folder_of(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Checkout]:
    """Return what gives the folder in which a page's blocks are run."""

    @functools.cache
    def alone(page: Path) -> Checkout:
        return Checkout(tmp_path_factory.mktemp(page.stem))

    return lambda page: alone(page) if TUTORIALS in page.parents else checkout


@pytest.fixture(scope="module")
def names() -> dict[Path, dict[str, object]]:
    """Return the names that each page's Python blocks have defined so far."""
    return {}


@pytest.mark.parametrize("block", cases())
def test_what_is_shown_works(
    block: Block,
    folder_of: Callable[[Path], Checkout],
    names: dict[Path, dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkout = folder_of(block.page)
    monkeypatch.chdir(checkout.folder)
    wrong = differences(block, checkout, names.setdefault(block.page, {"__name__": "page"}))
    if wrong:
        pytest.fail(f"{block}\n{numbered(block)}\n" + "\n".join(wrong), pytrace=False)


def numbered(block: Block) -> str:
    """Return the lines of a block with their numbers on the page."""
    lines = enumerate(block.text.splitlines(), block.line + 1)
    return "\n".join(f"{number:5} | {line}" for number, line in lines)


def differences(block: Block, checkout: Checkout, space: dict[str, object]) -> list[str]:
    """Return how a block does other things than its page says, with what it has printed."""
    printed = io.StringIO()
    try:
        return outcome_of(block, checkout, space, printed)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        told = "".join(traceback.format_exception(type(error), error, trace))
        return [*([f"printed\n{printed.getvalue()}"] if printed.getvalue() else []), told]


def outcome_of(block: Block, checkout: Checkout, space: dict[str, object], printed: io.StringIO) -> list[str]:
    """Do what a block says. What is no command raises where it does not work."""
    if block.mark.startswith("file: "):
        Path(block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
    elif block.kind == "toml":
        parse_spec(block.text, str(block))
    elif block.kind == "console":
        code = int(block.mark.removeprefix("exit ")) if block.mark.startswith("exit ") else 0
        asked = commands(block.text)
        return [off for command, shown in asked for off in not_as_shown(command, shown, code, *checkout.run(command))]
    else:
        # Its lines have their numbers on the page, and a traceback finds them.
        text = "\n" * block.line + block.text
        linecache.cache[str(block)] = (len(text), None, text.splitlines(keepends=True), str(block))
        with contextlib.redirect_stdout(printed):
            exec(compile(text, str(block), "exec"), space)
    return []


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a console block with the lines that it is shown to print."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, *shown = part.replace("\\\n", " ").splitlines()
        yield command, shown


def not_as_shown(command: str, shown: list[str], expected: int, code: int, printed: str) -> list[str]:
    """Return how a command ended otherwise than its page says, and the lines whose words it did not print."""
    wrong = [] if code == expected else [f"$ {command}\nended with {code}\n{printed}"]
    found = [words_of(line) for line in printed.splitlines()]
    for line in shown:
        words = words_of(line.replace("...", " "))
        if words and not any(is_within(words, other) for other in found):
            wrong.append(f"$ {command}\nno line has the words of: {line}\n{printed}")
    return wrong


def words_of(line: str) -> list[str]:
    """Return the words of a line without figures, units and paths, and without what a small task does not print."""
    plain = re.sub(r"\S*[\d/]\S*", " ", ELSEWHERE.sub(" ", line))
    return [word for word in re.findall(r"[A-Za-z_]+", plain) if word not in UNITS]


def is_within(words: list[str], other: list[str]) -> bool:
    """Return whether the words come in the others, in this order, the first of both being the same."""
    rest = iter(other)
    return words[:1] == other[:1] and all(word in rest for word in words)


def test_lines_that_say_something_else_are_told() -> None:
    printed = "step    4/6  loss 5.51  2.1 s (forecast 719 ms)  3.8 k tok/s\nreport   runs/x/report.html"
    right = ["step   10/300  loss 3.80  18 ms (forecast 1.2 s)", "report   runs/stdlib-code/report.html", ""]
    assert not_as_shown("run", right, 0, 0, printed) == []
    for wrong in (
        "step  4/6  lost 5.51",
        "step  4/6  loss 5.51  (measured 719 ms)",
        "steps 4/6",
        "forecast, loss of a step",
    ):
        (told,) = not_as_shown("run", [wrong], 0, 0, printed)
        assert f"no line has the words of: {wrong}" in told
    assert not_as_shown("run", right, 0, 3, printed) == [f"$ run\nended with 3\n{printed}"]


def test_a_block_that_fails_is_shown_with_what_it_printed(checkout: Checkout) -> None:
    page = ROOT / "docs" / "page.md"
    block = Block(page, 7, "python", "print('so far')\nleft = 1 / 0\n", "")
    assert numbered(block) == "    8 | print('so far')\n    9 | left = 1 / 0"
    printed, told = differences(block, checkout, {})
    assert printed == "printed\nso far\n"
    assert 'docs/page.md:7", line 9' in told and "left = 1 / 0" in told and "ZeroDivisionError" in told
    assert "test_docs_examples" not in told
    assert "unknown key" in differences(Block(page, 7, "toml", "[task]\nnmae = 1\n", ""), checkout, {})[-1]


def test_a_command_is_started_without_a_shell_where_none_is_needed(checkout: Checkout) -> None:
    assert words_to_start("paceline plan a.toml --set 'plan.zero = 3'")[2:] == ["paceline", "plan", "a.toml", "--set",
                                                                                 "plan.zero = 3"]  # fmt: skip
    assert words_to_start("python train.py 2") == [sys.executable, "train.py", "2"]
    for command in ("paceline plan a.toml | head", "A=1 paceline plan", "torchrun train.py", "ls runs/*"):
        assert words_to_start(command) == ["bash", "-c", command]
    code, printed = checkout.run("echo $(paceline --version)")  # the program that is installed
    assert code == 0 and printed.startswith("paceline ")


def test_reasons_are_given_and_marks_are_known() -> None:
    known = re.compile(r"not run: \S.*|deep|exit \d+|file: [\w./-]+|Written by .*|")
    assert [str(block) for block in BLOCKS if not known.fullmatch(block.mark)] == []


def test_every_command_is_in_a_block_that_is_run() -> None:
    shells = [block for block in BLOCKS if block.kind in ("bash", "sh", "shell", "text")]
    assert [str(block) for block in shells if not block.mark.startswith("not run")] == []
