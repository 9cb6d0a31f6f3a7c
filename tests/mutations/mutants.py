"""Mutation testing: how many small changes of the code no test notices.

    python tests/mutations/mutants.py                                    # 40 mutants of each room
    python tests/mutations/mutants.py --rooms plan/cost --sample 200     # more of one room
    python tests/mutations/mutants.py --rooms run --match loop/ numerics/  # of some files
    python tests/mutations/mutants.py --rooms run --skip 40              # the forty after those
    python tests/mutations/mutants.py --rooms verify --whole             # with every test of the room, for hours
    python tests/mutations/mutants.py --rooms run --most 2 --save        # and keep what became of them as a page

Each mutant is one change by an operator of cosmic-ray (`a + b` to `a - b`, `<` to `<=`, a number to the next, a loop
that never runs, ...), made in a copy of the checkout. The tests that import the mutated module run first, those that
start no processes before the others, then a few that drive all of its room, in one process of pytest; a mutant that
fails none of them survives. The seed decides which mutants are tried.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
PAGE = HERE / "benchmarks" / "results" / "mutants.md"
SURVIVED = "survived"
OUTCOMES = ("killed", "endless", SURVIVED)
HEAD = """# Mutants

`python tests/mutations/mutants.py ARGS --save`: small changes of the code, and how many of them tests notice. Survivors
are told as they were found; what became of them stands in the log.

| changed | which | tried | killed | endless | survived | survivors |
|---|---|---:|---:|---:|---:|---|
"""
COPIED = ("src", "tests", "examples", "docs", "benchmarks", "pyproject.toml", "README.md", "CONTRIBUTING.md")
NO_TESTS = 5  # pytest's exit code where all tests of a file are deselected
LIMIT_SECONDS = 900.0  # of the tests of a mutant, several times what they take; a loop without an end is noticed by it

# room -> tests that drive all of it, and every test that looks after it; those that name the mutated module come first
ROOMS = {
    "plan/cost": (["tests/plan"], ["tests/plan"]),
    "checkpoint": (
        ["tests/checkpoint", "tests/run/loop/test_resume.py"],
        ["tests/checkpoint", "tests/run/loop"],
    ),
    "run": (
        [
            "tests/run/loop/test_step.py",
            "tests/run/loop/test_resume.py",
            "tests/verify/story/test_story.py",
            "tests/test_distributed.py",
        ],
        ["tests/verify", "tests/run", "tests/mutations/test_planted_bugs.py"],
    ),
    "verify": (
        [
            "tests/verify/compare/test_compare.py",
            "tests/verify/loops/test_loops.py",
            "tests/verify/story/test_story.py",
            "tests/verify/test_verify_verb.py",
        ],
        ["tests/verify", "tests/mutations/test_planted_bugs.py"],
    ),
}
TORCHLESS = ("plan/cost",)  # rooms of pure functions: tests that start ranks say nothing of them that others do not


@dataclass(frozen=True)
class Place:
    """Where an operator could change a file: its occurrence there, counted from 0."""

    path: str  # within the checkout
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True)
class Mutant:
    """One change of one file: which operator made it at which place, and the code that comes of it."""

    path: str  # within the checkout
    operator: str
    line: int
    code: str

    def difference(self, root: Path) -> str:
        """Return the changed lines, without what surrounds them."""
        before, after = (root / self.path).read_text(encoding="utf-8"), self.code
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
        return "\n".join(line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a mutant: "killed", "survived", or "endless" where they were stopped."""

    mutant: Mutant
    outcome: str
    seconds: float
    by: str = ""  # the first test that failed


def places_of(path: str, root: Path) -> Iterator[Place]:
    """Yield every place of a file where an operator could make a change."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast((root / path).read_text(encoding="utf-8"))))
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        if kind.arguments() or "NoOp" in name:
            continue
        starts = [start for node in nodes for start, _ in kind().mutation_positions(node)]
        yield from (Place(path, name, occurrence, start[0]) for occurrence, start in enumerate(starts))


def mutant_at(place: Place, root: Path) -> Mutant | None:
    """Return the mutant of a place; None where the code means the same: annotations and docstrings do not count."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    code = (root / place.path).read_text(encoding="utf-8")
    changed = mutate_code(code, plugins.get_operator(place.operator)(), place.occurrence)
    if changed is None or _meaning(changed) in (_meaning(code), None):
        return None
    return Mutant(place.path, place.operator.split("/")[-1], place.line, changed)


def _meaning(code: str) -> str | None:
    """Return the syntax tree without annotations and docstrings as text; None for what cannot be parsed."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value = ast.Constant(None)
    return ast.dump(tree)


def tests_of(mutant: Mutant, room: str, root: Path, whole: bool = False, most: int = 0) -> list[str]:
    """Return the tests to run for a mutant: those that name its module, then those of the room, few or the `whole`.

    Of the first, those come first that start no processes, and then those that speak most of the class and the function
    that are changed. With `most` there are so many of them, and one of the room's.
    """
    module = mutant.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    short = module.rpartition(".")
    named = re.compile(rf"{re.escape(module)}\b|from {re.escape(short[0])} import [^\n]*\b{short[2]}\b")
    changed = re.compile(rf"\b({'|'.join(names_around(mutant, root)) or short[2]})\b")
    every = [test.relative_to(root).as_posix() for test in sorted((root / "tests").rglob("test_*.py"))]
    texts = {test: (root / test).read_text(encoding="utf-8") for test in every}
    rest = [test for start in ROOMS[room][whole] for test in every if test.startswith(start)]
    if room in TORCHLESS:
        texts = {test: text for test, text in texts.items() if not re.search(r"\brun_(ranks|kept)\b", text)}
    own = [test for test, text in texts.items() if named.search(text)]
    beside = str(Path(mutant.path).parent).replace("src/paceline", "tests")
    own = sorted(own, key=lambda test: (-len(changed.findall(texts[test])), not test.startswith(beside)))[
        : most or None
    ]
    own.sort(key=lambda test: _starts_processes(texts[test]))
    rest = [test for test in rest if test in texts and test not in own]
    return [*own, *(rest[:1] if most else rest)]


def names_around(mutant: Mutant, root: Path) -> list[str]:
    """Return the names of the class and the functions that a mutant's line lies in, from the outermost on."""
    tree = ast.parse((root / mutant.path).read_text(encoding="utf-8"))
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    around = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [node.name for node in around if node.lineno <= mutant.line <= (node.end_lineno or 0)]


def _starts_processes(text: str) -> bool:
    return re.search(r"\brun_(ranks|kept)\b|\bpaceline\(|\bsubprocess\b", text) is not None


def judge(mutant: Mutant, tests: list[str], root: Path) -> Verdict:
    """Write the mutant into the copy of the checkout, run the tests until the first failure, and put the file back."""
    target, began = root / mutant.path, time.monotonic()
    before = target.read_text(encoding="utf-8")
    target.write_text(mutant.code, encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not deep", "-p", "no:cacheprovider", "--tb=no"]
    try:
        ended = subprocess.run(
            [*command, "-n", "0", *tests],
            cwd=root, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Verdict(mutant, "endless", time.monotonic() - began)
    finally:
        target.write_text(before, encoding="utf-8")
    seconds = time.monotonic() - began
    if ended.returncode in (0, NO_TESTS):
        return Verdict(mutant, SURVIVED, seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    return Verdict(mutant, "killed", seconds, failed[1] if failed else "the start of the tests")


def main() -> int:
    """Try the mutants that were asked for and print what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), choices=list(ROOMS))
    parser.add_argument("--match", nargs="+", default=[""], help="only files whose path contains one of these")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many mutants of each room: they were tried")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--whole", action="store_true", help="every test of the room, not only those that drive all of it"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=0,
        help="test files that name the module, beside one of the room; 0 for all",
    )
    parser.add_argument("--save", action="store_true", help="add what became of them to benchmarks/results/mutants.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        root = Path(name)
        for part in COPIED:
            copy = shutil.copytree if (HERE / part).is_dir() else shutil.copy2
            copy(HERE / part, root / part)
        for room in options.rooms:
            verdicts = _try_room(room, options, root)
            if options.save:
                _save(row_of(room, options, verdicts))
    return 0


def row_of(room: str, options: argparse.Namespace, verdicts: list[Verdict]) -> str:
    """Return a row of the page: which mutants were tried, how, and what became of them."""
    counts = [sum(v.outcome == kind for v in verdicts) for kind in OUTCOMES]
    left = "; ".join(
        f"`{v.mutant.path}:{v.mutant.line}` {v.mutant.operator}" for v in verdicts if v.outcome == SURVIVED
    )
    which = f"`{room}/`, of {', '.join(options.match)}" if options.match != [""] else f"`{room}/`"
    asked = f"seed {options.seed}, from {options.skip + 1} on"
    asked += f", {options.most} test files each beside one of the room" if options.most else ""
    return "| " + " | ".join([which, asked, str(len(verdicts)), *map(str, counts), left or "none"]) + " |"


def _save(row: str) -> None:
    known = PAGE.read_text(encoding="utf-8") if PAGE.exists() else HEAD
    PAGE.write_text(f"{known}{row}\n", encoding="utf-8")


def _try_room(room: str, options: argparse.Namespace, root: Path) -> list[Verdict]:
    files = [p.relative_to(root).as_posix() for p in sorted((root / "src/paceline" / room).rglob("*.py"))]
    places = [place for path in files if any(part in path for part in options.match) for place in places_of(path, root)]
    random.Random(options.seed).shuffle(places)
    mutants = (mutant for place in places if (mutant := mutant_at(place, root)) is not None)
    print(f"{room}: {len(places)} places in {len(files)} files, {options.sample} mutants are tried", flush=True)
    verdicts = []
    for mutant in itertools.islice(mutants, options.skip, options.skip + options.sample):
        verdict = judge(mutant, tests_of(mutant, room, root, options.whole, options.most), root)
        verdicts.append(verdict)
        where = f"{mutant.path}:{mutant.line} {mutant.operator}"
        print(f"  {verdict.outcome:8} {where} {verdict.seconds:.0f} s {verdict.by}", flush=True)
        if verdict.outcome == SURVIVED:
            print("    " + mutant.difference(root).replace("\n", "\n    "), flush=True)
    counts = {kind: sum(v.outcome == kind for v in verdicts) for kind in OUTCOMES}
    print(f"{room}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()), flush=True)
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
