"""The house keeps its floors: what each room may import, checked from the code's own imports.

A room is a module or a package; its floor is stated once, in FLOORS. Imports may go sideways and down, never up, and
no two modules may need each other: imports inside functions, those for types alone, and modules that are loaded or
started by name count.
"""

from __future__ import annotations

import ast
import functools
import gc
import graphlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runs import run_patiently

import paceline

ROOT = Path(paceline.__file__).parent
LONGEST_FILE_LINES = 600

LARGEST_ROOM = 0.25  # of the code
MOST_FILES = 15  # at the top of a folder; its __init__.py does not count
KEPT_FILES = {".py", ".md", ".json", ".csv", ".toml", ".svg", ".png", ".txt", ".css", ".js"}  # what is committed

# Room -> floor. The longest matching name decides.
FLOORS: dict[str, float] = {
    "paceline": 7,  # the lazy public names: they stand on everything, and nothing on them
    "paceline.version": 1,
    "paceline.errors": 1,
    "paceline.foreign_errors": 1,
    "paceline.units": 1,
    "paceline.uncaught": 1,
    "paceline.no_redirects": 1,
    "paceline.durable": 1,
    "paceline.said": 1,
    "paceline.scratch": 1,
    "paceline.lock": 1,
    "paceline.lock_file": 1,
    "paceline.system": 1,
    "paceline.svg": 1,
    "paceline.patience": 1,
    "paceline.robust": 1,
    "paceline.config": 1,
    # the frozen nouns
    "paceline.spec": 2,
    # what to learn, and on what
    "paceline.task": 3,
    "paceline.cluster": 3,
    # how, and at what price
    "paceline.simulate": 3,
    "paceline.plan": 3.5,
    "paceline.backtest": 3.6,
    # what a journal tells
    "paceline.verdict": 3,  # figures in, words out: a run says it of itself, and the report of any
    "paceline.history": 3.5,
    # doing it
    "paceline.checkpoint": 3.5,
    "paceline.supervise": 3.8,
    "paceline.run": 4,
    # what is built on a run
    "paceline.observe": 4.5,
    "paceline.observe.live": 5.1,  # a live page stands on the report's figures and the account
    "paceline.observe.dash": 5.2,
    "paceline.observe.compare": 5.2,
    "paceline.report": 5,
    "paceline.account": 5,
    "paceline.verify": 5,
    "paceline.launch": 5,
    "paceline.session": 5.5,
    "paceline.cli": 6,
    "paceline.__main__": 6,
}

# Rooms whose modules import no torch while they are being imported: whoever plans or asks for help does not wait.
TORCH_FREE = ("paceline.config", "paceline.errors", "paceline.uncaught", "paceline.units", "paceline.spec",
              "paceline.plan",
              "paceline.simulate", "paceline.backtest", "paceline.cluster", "paceline.cli", "paceline.supervise",
              "paceline.session.start", "paceline.session.measure", "paceline.session.verbs",
              "paceline.report", "paceline.account", "paceline.observe", "paceline.history",
              "paceline.verdict")  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One import statement: the module it names, where it stands, and whether it runs with the importing module."""

    of: str
    line: int
    at_module_level: bool  # False inside functions, and where it is for types alone
    starts: bool = False  # whether the module is only named, as that of which a process of its own is started


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def imports_of(tree: ast.Module, module: str, has_types: bool) -> list[Import]:
    """Return the module's imports of anything, in order; `has_types` says whether some may be for types alone."""
    package = module if SOURCES[module].name == "__init__.py" else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, at_module_level: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if has_types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for inner in child.body:
                    visit(ast.Module([inner], []), False)
                for inner in child.orelse:
                    visit(ast.Module([inner], []), at_module_level)
                continue
            if isinstance(child, ast.Import):
                found.extend(Import(alias.name, child.lineno, at_module_level) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *filter(None, [base])])
                for alias in child.names:  # `from package import module` imports the module
                    full = f"{base}.{alias.name}"
                    found.append(Import(full if full in SOURCES else base, child.lineno, at_module_level))
            elif isinstance(child, ast.Call) and called(child).endswith("import_module"):
                named = [argument.value for argument in child.args if isinstance(argument, ast.Constant)]
                found.extend(Import(name, child.lineno, at_module_level) for name in named if isinstance(name, str))
            elif isinstance(child, ast.Constant) and child.value in SOURCES and child.value != "paceline":
                found.append(Import(child.value, child.lineno, False, starts=True))
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, at_module_level and not inside)

    visit(tree, True)
    return found


@functools.cache
def all_imports() -> dict[str, tuple[Import, ...]]:
    """Return the imports of every module; not before a test asks, since every worker imports this file."""
    return {module: contents(path).imports for module, path in SOURCES.items()}


def floor_of(module: str) -> float:
    rooms = [room for room in FLOORS if module == room or module.startswith(room + ".")]
    return FLOORS[max(rooms, key=len)]


def room_of(module: str) -> str:
    """Return the folder or file at the package's top that a module stands in."""
    return ".".join(module.split(".")[:2])


def ours(name: str) -> bool:
    return name == "paceline" or name.startswith("paceline.")


def test_every_room_has_a_floor() -> None:
    known = {room for room in FLOORS if room.count(".") == 1}
    assert {room_of(module) for module in SOURCES if "." in module} <= known


def test_imports_never_go_up() -> None:
    up = [
        f"{module} (floor {floor_of(module):g}) imports {found.of} (floor {floor_of(found.of):g}) in line {found.line}"
        for module, imports in all_imports().items()
        for found in imports
        if ours(found.of) and floor_of(found.of) > floor_of(module)
    ]
    assert not up


def test_modules_do_not_need_each_other() -> None:
    # A package's __init__ runs before its modules; where it is not empty, they must not need it back.
    needs = {module: {found.of for found in imports if ours(found.of) and not found.starts} - {module}
             for module, imports in all_imports().items()}  # fmt: skip
    order = list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError, naming the cycle
    assert set(order) >= set(SOURCES)


def test_rooms_do_not_need_each_other() -> None:
    """Where files make no ring their rooms still may: then neither room can be read, or moved, without the other."""
    needs: dict[str, set[str]] = {}
    for module, imports in all_imports().items():
        room = room_of(module)
        named = {room_of(found.of) for found in imports if ours(found.of) and not found.starts}
        needs.setdefault(room, set()).update(named - {room})
    order = list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError, naming the ring
    assert set(order) >= {"paceline.plan", "paceline.simulate", "paceline.supervise", "paceline.run"}


def test_a_module_that_starts_a_process_is_not_needed_by_the_module_of_that_process() -> None:
    """Through others a process may come back to who started it: it goes through the package from the top."""
    started = {(module, found.of) for module, imports in all_imports().items() for found in imports if found.starts}
    assert len(started) > 8
    assert {(module, of) for module, of in started
            if module != of and module in {found.of for found in all_imports()[of]}} == set()  # fmt: skip


@pytest.mark.parametrize("room", TORCH_FREE)
def test_rooms_that_are_torch_free_stay_so_through_everything_they_import(room: str) -> None:
    """Follow module-level imports from each module of the room: none may reach torch."""
    seen: dict[str, str] = {}
    pending = [(module, module) for module in SOURCES if module == room or module.startswith(room + ".")]
    assert pending
    while pending:
        module, chain = pending.pop()
        if module in seen:
            continue
        seen[module] = chain
        for found in all_imports()[module]:
            if not found.at_module_level:
                continue
            assert found.of.split(".")[0] != "torch", f"{chain} imports {found.of} in line {found.line}"
            if found.of in SOURCES:
                pending.append((found.of, f"{chain} -> {found.of}"))


def test_lower_rooms_know_no_package_but_the_standard_library() -> None:
    """Units, errors, config and the specs are data: they need nothing installed."""
    foreign = [
        f"{module} imports {found.of}"
        for module, imports in all_imports().items()
        if floor_of(module) <= 2
        for found in imports
        if not ours(found.of) and found.of.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not foreign


def test_no_file_is_longer_than_a_reader_bears() -> None:
    repository = Path(__file__).parents[1]
    files = [path for folder in ("src", "tests", "benchmarks", "examples", "docs")
             for path in (repository / folder).rglob("*.py")]  # fmt: skip
    lines = {str(path.relative_to(repository)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count > LONGEST_FILE_LINES} == {}


LONGEST_FUNCTION_LINES = 70  # a screen, and a little more for some that tell a story; the number may only fall
SHORT_BODY = 21  # nodes of a syntax tree: a body of fewer is no thought of its own


@dataclass(frozen=True)
class Function:
    """A function of the package: its place, its text, and what its arguments and its body are made of."""

    name: str
    lines: int
    text: str
    shape: int  # of the kinds of nodes in their order: functions that are written twice have the same one
    nodes: int

    def spelled(self) -> str:
        """Return its arguments and its body without docstring, however they are indented."""
        within = ast.parse(f"if True:\n{self.text}" if self.text[0].isspace() else f"if True: pass\n{self.text}")
        node = next(each for each in ast.walk(within) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
        return ast.dump(node.args) + "".join(map(ast.dump, body_of(node)))


@dataclass(frozen=True)
class Contents:
    """What the tests ask of a file's code, from one walk through it."""

    imports: tuple[Import, ...]  # of a module of the package
    functions: tuple[Function, ...]
    constants: tuple[tuple[str, str], ...]  # the public ones at its top, each with its value as the file spells it
    defined: frozenset[str]  # functions without decorators and classes at its top
    spelled: frozenset[str]  # names that it spells in texts, such as "package.module:name"
    read: frozenset[str]  # names that it reads
    named: frozenset[tuple[str | None, str]]  # what it takes from modules, and attributes of anything


def body_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def in_order(tree: ast.AST) -> tuple[list[ast.AST], dict[ast.AST, tuple[int, int]]]:
    """Return all nodes of a tree as they are written, and where among them each begins and ends with those below it."""
    order, spans = list[ast.AST](), dict[ast.AST, tuple[int, int]]()

    def visit(node: ast.AST) -> None:
        begins = len(order)
        order.append(node)
        for name in node._fields:
            held = getattr(node, name, None)
            for each in held if isinstance(held, list) else (held,):
                if isinstance(each, ast.AST):
                    visit(each)
        spans[node] = begins, len(order)

    visit(tree)
    return order, spans


@functools.cache
def contents(path: Path) -> Contents:
    """Return what a file's code holds, which is parsed once for all tests."""
    gc.disable()  # of a tree nothing is garbage
    try:
        return contents_of(path)
    finally:
        gc.enable()


def contents_of(path: Path) -> Contents:
    """Return what a file's code holds."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    order, spans = in_order(tree)
    kinds = [type(node) for node in order]
    module = module_name(path) if path.is_relative_to(ROOT) else ""
    lines, functions = text.split("\n"), list[Function]()
    spelled, read, named = set[str](), set[str](), set[tuple[str | None, str]]()
    for node in order:
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                read.add(node.id)
        elif isinstance(node, ast.Attribute):
            named.add(("", node.attr))
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                spelled.update(re.split(r"[.:]", node.value)[-1:])
                if node.value.isupper():
                    named.add(("", node.value))  # for getattr
        elif isinstance(node, ast.ImportFrom):
            named.update((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = [spans[each] for each in body_of(node)]
            within = kinds[body[0][0] : body[-1][1]] if body else []
            own = lines[node.lineno - 1 : node.end_lineno]
            name = f"{module}:{node.lineno} {node.name}"
            functions.append(Function(name, len(own), "\n".join(own), hash(tuple(within)), len(within)))
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
               if not node.decorator_list or isinstance(node, ast.ClassDef)}  # fmt: skip
    imports = tuple(imports_of(tree, module, "TYPE_CHECKING" in text)) if module else ()
    return Contents(imports, tuple(functions), tuple(constants(tree)), frozenset(defined), frozenset(spelled),
                    frozenset(read), frozenset(named))  # fmt: skip


def functions() -> Iterator[Function]:
    """Yield every function of the package."""
    for path in SOURCES.values():
        yield from contents(path).functions


def test_a_function_fits_a_screen() -> None:
    lines = {function.name: function.lines for function in functions()}
    assert len(lines) > 5000
    assert {name: count for name, count in lines.items() if count > LONGEST_FUNCTION_LINES} == {}


def test_no_function_is_written_twice() -> None:
    """The same arguments and the same body under any two names are one thing, and stand in one place."""
    alike: dict[int, list[Function]] = {}
    for function in functions():
        if function.nodes >= SHORT_BODY:
            alike.setdefault(function.shape, []).append(function)
    twins: dict[str, list[str]] = {}
    for function in (each for several in alike.values() if len(several) > 1 for each in several):
        twins.setdefault(function.spelled(), []).append(function.name)
    assert [names for names in twins.values() if len(names) > 1] == []


COINCIDENCES = {"CODES", "LOSS", "MEMORY", "WHOLE"}  # constants of one name and one value that are two things


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the public constants at the top of a file, each with its value as the file spells it."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            names, values = [target], [node.value]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                names, values = target.elts, node.value.elts
            for name, value in zip(names, values, strict=True):
                if isinstance(name, ast.Name) and re.fullmatch(r"[A-Z][A-Z0-9_]{2,}", name.id):
                    yield name.id, ast.unparse(value)


def test_no_constant_is_written_twice() -> None:
    """What two files must agree on stands in one of them: the other one imports it. Mere numbers may meet by chance."""
    of: dict[tuple[str, str], list[str]] = {}
    for module, path in SOURCES.items():
        for name, value in contents(path).constants:
            if not re.fullmatch(r"\d[\d.e*<+ -]*", value):
                of.setdefault((name, value), []).append(module)
    again = {name: modules for (name, value), modules in of.items() if len(modules) > 1}
    assert len(of) > 500
    assert {name: modules for name, modules in again.items() if name not in COINCIDENCES} == {}


def test_no_room_holds_more_than_its_part() -> None:
    sizes: dict[str, int] = {}
    for module, path in SOURCES.items():
        room = room_of(module)
        sizes[room] = sizes.get(room, 0) + len(path.read_text(encoding="utf-8").splitlines())
    largest = max(sizes, key=lambda room: sizes[room])
    assert sizes[largest] <= LARGEST_ROOM * sum(sizes.values()), f"{largest}: {sizes[largest]} lines"


def test_no_folder_has_more_files_than_an_eye_takes_in() -> None:
    repository = Path(__file__).parents[1]
    counts: dict[str, int] = {}
    for folder in ("src", "benchmarks", "docs", "examples", "tests"):
        for path in (repository / folder).rglob("*"):
            if path.suffix in KEPT_FILES and path.name != "__init__.py":
                within = str(path.parent.relative_to(repository))
                counts[within] = counts.get(within, 0) + 1
    assert {folder: count for folder, count in counts.items() if count > MOST_FILES} == {}


AT_THE_ROOT = {".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "benchmarks",
               "constraints.txt", "docs", "examples", "mkdocs.yml", "pyproject.toml", "src", "tests"}  # fmt: skip


def test_nothing_stands_at_the_root_that_was_left_behind() -> None:
    """A note and two files of errors were once committed by a careless `git add`."""
    repository = Path(__file__).parents[1]
    if not (repository / ".git").exists():
        pytest.skip("a copy without its history does not say what is committed")
    listed = run_patiently(["git", "-C", repository, "ls-files", "-z"], is_cold=True).stdout.split("\0")
    assert {name.split("/")[0] for name in listed if name} == AT_THE_ROOT


MOST_ANY = {r"\bAny\b": 10.9, r"dict\[str, Any\]": 1.2}  # of 1,000 lines of the package; these may only fall


@pytest.mark.parametrize("pattern", MOST_ANY)
def test_what_the_type_checker_does_not_look_at_becomes_less(pattern: str) -> None:
    """A value that is only passed on is an `object`, a record its class: `Any` is for what a library does not type."""
    texts = [path.read_text(encoding="utf-8") for path in SOURCES.values()]
    found = sum(len(re.findall(pattern, text)) for text in texts)
    assert 1000 * found / sum(len(text.splitlines()) for text in texts) <= MOST_ANY[pattern]


def test_types_are_checked_where_what_only_benchmarks_need_is_not_installed() -> None:
    """CI installs the extras of the tests: an import that only `bench` brings is one that mypy may miss."""
    settings = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    names = {extra: {re.split(r"[>=\[]", line)[0] for line in lines} for extra, lines in extras.items()}
    lone = names["bench"] - names["test"]
    missed = {name for entry in settings["tool"]["mypy"]["overrides"] for name in entry["module"]}
    assert {name for name in lone if f"{name}.*" not in missed} == set()


# Functions of the package that tests alone call: what a test holds the others against, or has in place of processes.
FOR_TESTS = {"fit_file", "from_hf_state", "initial_tensor", "metric_names", "to_hf_state", "undeclared"}


def test_nothing_is_there_that_nobody_uses() -> None:
    """Every function and class at the top of a file is used in the package, by a benchmark, or shown on a page.

    A use is one of this very file: a name that is read there or imported from there, an attribute of anything, or one
    that a page spells right behind a dot, a colon, a quote or in an `import`. Another function of its name is no use.
    """
    repository = Path(__file__).parents[1]
    pages = [path.read_text(encoding="utf-8") for path in (repository / "docs").rglob("*.md") if path.name != "log.md"]
    scripts = [path for folder in ("benchmarks", "docs", "examples") for path in (repository / folder).rglob("*.py")]
    shown = {name for page in pages for name in re.findall(r"[.:`](\w+)", page)}
    shown |= {name for page in pages for line in re.findall(r"import ([\w, ]+)", page) for name in line.split(", ")}
    named = set[tuple[str | None, str]]().union(*(contents(path).named for path in [*SOURCES.values(), *scripts]))
    spelled = {word for path in [*SOURCES.values(), *scripts] for word in contents(path).spelled}
    unused = {name for module, path in SOURCES.items() for name in contents(path).defined - contents(path).read
              if not {(module, name), ("", name)} & named and name not in shown | spelled}  # fmt: skip
    assert unused - {"__getattr__", "__dir__"} == FOR_TESTS


FOR_READERS = {"KINDS", "LINES"}  # constants that a docstring points to, and tests


def test_no_constant_is_there_that_nobody_reads() -> None:
    """Each constant at the top of a file is read in the file or imported from it."""
    scripts = list((Path(__file__).parents[1] / "docs").rglob("*.py"))
    named = set[tuple[str | None, str]]().union(*(contents(path).named for path in [*SOURCES.values(), *scripts]))
    unread: list[str] = []
    for module, path in SOURCES.items():
        own = {name for name, _ in contents(path).constants} - contents(path).read
        unread += [f"{module}.{name}" for name in own if not {(module, name), ("", name)} & named]
    assert {name for name in unread if name.rpartition(".")[2] not in FOR_READERS} == set()


TELL = "\nimport json, sys; print(json.dumps([n for n in {} if n in sys.modules]))"
PLANNER = {"paceline.plan.planned", "paceline.plan.search", "paceline.plan.cost", "paceline.simulate.outcome"}
COMPILER = {"torch._dynamo", "sympy", "torch.distributed.tensor", "torch.distributed.fsdp"}  # and spread tensors
RANK = """
import paceline.launch.worker, paceline.launch.run, torch
from paceline.spec.task import ModelSpec
from paceline.task.models.build import build_model
from paceline.task.optimizer.eager import eager
build_model(ModelSpec("llama-1m"), 257, 16, 7, "meta")
weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
eager(torch.optim.AdamW)([weight]).step()
"""
CLI = "from paceline.cli.main import main; main({})"
PLAN = ["plan", "examples/stdlib-code.toml", "--set", "task.data.max_bytes=1 MB"]


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [("import paceline; paceline.Task, paceline.PacelineError", {"torch", "numpy"}),
     (CLI.format(["plan", "--help"]), {"torch", "numpy"}),
     (CLI.format(["train", "--help"]), {"torch", "numpy"}),
     (CLI.format(["schema"]), {"torch", "numpy"}),
     (CLI.format(PLAN), {"torch"}), (RANK, PLANNER | COMPILER)],
    ids=["import", "plan --help", "train --help", "schema", "plan", "rank"],
)  # fmt: skip
def test_what_must_start_at_once_imports_nothing_heavy(code: str, forbidden: set[str]) -> None:
    ran = run_patiently(
        [sys.executable, "-c", code + TELL.format(sorted(forbidden))], 60, cwd=Path(__file__).parents[1]
    )
    assert ran.returncode == 0, ran.stderr
    assert not forbidden & set(json.loads(ran.stdout.splitlines()[-1]))


# What tests look at beside the rooms: pages, benchmarks, whole runs, and the tests themselves.
OTHER_TESTS = {"benchmarks", "docs", "foreign", "mutations"}


def test_tests_stand_in_the_rooms_that_they_are_of() -> None:
    here = Path(__file__).parent
    folders = {path.parent.relative_to(here) for path in here.rglob("test_*.py")} - {Path()}
    rooms = {str(folder) for folder in folders if folder.parts[0] not in OTHER_TESTS}
    assert {room for room in rooms if not (ROOT / room).is_dir()} == set()


def test_tests_that_are_deep_are_there() -> None:
    """A line that names none would leave a slow test in `make test` without a word."""
    lines = (Path(__file__).parent / "deep.txt").read_text(encoding="utf-8").splitlines()
    for line in filter(lambda line: line and not line.startswith("#"), lines):
        file, _, name = line.partition("::")
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in text, line
