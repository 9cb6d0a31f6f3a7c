"""Scripts beside the package import names that it has: nobody else reads them before somebody needs a figure."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples")


def module_at(name: str) -> Path | None:
    """Return the file of a module of the package."""
    path = ROOT / "src" / name.replace(".", "/")
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


@functools.cache
def bound(path: Path) -> set[str]:
    """Return the names that a module binds outside of its functions and classes."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(each.asname or each.name).partition(".")[0] for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Dict):  # a table of names that are imported when they are asked for
            found |= {
                each.value for each in node.keys if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
        waiting += ast.iter_child_nodes(node)
    return found


def absent(name: str, names: set[str]) -> set[str]:
    """Return which names a module of the package lacks."""
    path = module_at(name)
    return names if path is None else {each for each in names - bound(path) if module_at(f"{name}.{each}") is None}


def test_scripts_import_what_there_is() -> None:
    broken, looked = [], 0
    for path in sorted(each for folder in FOLDERS for each in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paceline":
                looked += 1
                missing = absent(node.module or "", {each.name for each in node.names})
                broken += [f"{path.relative_to(ROOT)}: {node.module} has no {each}" for each in sorted(missing)]
    assert not broken and looked > 100


def beside(script: Path, name: str) -> Path | None:
    """Return the file of a module that a benchmark finds in its own folder or in that of all benchmarks."""
    places = [folder / name.replace(".", "/") for folder in (script.parent, ROOT / "benchmarks")]
    return next((each for path in places for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()),
                None)  # fmt: skip


def test_benchmarks_find_what_they_share() -> None:
    """A benchmark that moved into a folder is not looked for where it was."""
    benchmarks = sorted((ROOT / "benchmarks").rglob("*.py"))
    ours = {path.stem for path in benchmarks} | {path.parent.name for path in benchmarks}
    broken, looked = [], 0
    for path in benchmarks:
        for node in ast.walk(ast.parse(path.read_text())):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) and not node.level else ""
            if module.partition(".")[0] in ours - set(sys.stdlib_module_names):
                looked += 1
                found, names = beside(path, module), {each.name for each in node.names}
                lacking = names if not found else {
                    each for each in names - bound(found) if not beside(path, f"{module}.{each}")
                }  # fmt: skip
                broken += [f"{path.relative_to(ROOT)}: {module} has no {each}" for each in sorted(lacking)]
    assert not broken and looked > 30


def test_no_benchmark_needs_the_tests() -> None:
    """What tests and benchmarks have in common stands in benchmarks/shared, which both find."""
    tests = ROOT / "tests"
    helpers = {path.stem for path in tests.rglob("*.py")} | {path.name for path in tests.iterdir() if path.is_dir()}
    helpers -= {path.stem for path in (ROOT / "benchmarks").rglob("*.py")} | {"__init__"}
    shared = {path.stem for path in (ROOT / "benchmarks" / "shared").glob("*.py")} - {"__init__"}
    of_tests = {name for path in tests.rglob("*.py") for name in imported(path)}
    assert {str(path) for path in (ROOT / "benchmarks").rglob("*.py") if helpers & imported(path)} == set()
    assert shared <= of_tests, "and what tests do not need is no part of it"


def imported(path: Path) -> set[str]:
    """Return the outermost names that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
    return found - set(sys.stdlib_module_names)


def test_a_name_that_is_gone_is_found() -> None:
    assert absent("paceline.units", {"format_bytes", "format_pounds"}) == {"format_pounds"}
    assert absent("paceline.of_no_name", {"one"}) == {"one"}
    assert absent("paceline", {"Run", "no_name"}) == {"no_name"}


def test_make_bench_runs_every_script_that_needs_no_arguments() -> None:
    """`make bench ARGS=--quick` goes through the scripts that have a short form; the others ask for files."""
    scripts = [path for folder in ("", "costs") for path in sorted((ROOT / "benchmarks" / folder).glob("*.py"))]
    runnable = {path.stem for path in scripts if "__main__" in path.read_text()}
    short = {path.stem for path in scripts if '"--quick"' in path.read_text()}
    assert short <= runnable and runnable - short == {"choices"}, "choices.py reads tables that are named"
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert """grep -l '"--quick"' benchmarks/*.py benchmarks/costs/*.py""" in recipe
