"""The map of the house, the glossary and the questions of a stranger are true of the code as it is."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
HOUSE = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
QUESTIONS = CONTRIBUTING.partition("## Where is")[2].partition("## ")[0]
TYPE_NAME = re.compile(r"[A-Z]\w*[a-z]\w*")
PATH = re.compile(r"`([\w./-]+(?:/|\.py|\.toml))`")
WORD = re.compile(r"`([A-Za-z_]\w*)`")
SAID_BY_USERS = {"train", "fit"}  # words of the command line and of Python that are no names of a file


def is_there(name: str) -> bool:
    return any((folder / name).exists() for folder in (SOURCE, ROOT))


def test_files_that_pages_name_are_there() -> None:
    named = {name for page in (HOUSE, CONTRIBUTING) for name in PATH.findall(page)}
    assert len(named) > 40
    assert {name for name in named if not is_there(name)} == set()


def test_every_room_has_a_line_and_every_line_a_room() -> None:
    tree = HOUSE.partition("```text\n")[2].partition("```")[0]
    listed = re.findall(r"^([\w/]+/) +\S", tree, re.M)
    folders = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("*.py")} - {Path()}
    assert sorted(listed) == sorted({"/".join(folder.parts[:2]) + "/" for folder in folders})


PRONOUNS = {
    "it", "its", "itself", "they", "them", "their", "theirs", "those", "these", "one", "ones", "each", "others",
    "another", "both", "who", "whom", "whose",
}  # fmt: skip


def test_the_first_line_of_a_file_names_nouns() -> None:
    """A sentence with three pronouns is read twice: what does each stand for?"""
    found = []
    for path in SOURCE.rglob("*.py"):
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        words = re.findall(r"[a-z]+", re.sub(r"`[^`]*`", "", first.lower()))
        if sum(word in PRONOUNS for word in words) >= 3:
            found.append(f"{path.relative_to(SOURCE)}: {first}")
    assert not found, "\n".join(found)


def test_the_first_line_of_a_function_or_class_names_nouns() -> None:
    """It has room for more than a file's, which says what a room is for: five pronouns are too many for either."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            words = re.findall(r"[a-z]+", re.sub(r"`[^`]*`", "", first.lower()))
            if sum(word in PRONOUNS for word in words) >= 5:
                found.append(f"{path.relative_to(SOURCE)} {node.name}: {first}")
    assert not found, "\n".join(found)


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports a file of tests by its bare name: the second file of a name is not collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 400 and {name for name, count in names.items() if count > 1} == set()


def test_a_stranger_has_ten_answers() -> None:
    rows = [line for line in QUESTIONS.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 10 and all(PATH.search(row.split("|")[2]) for row in rows)


def test_names_in_an_answer_are_those_of_its_files() -> None:
    """A function or a table that was renamed leaves no answer behind."""
    rows = [line for line in QUESTIONS.splitlines() if line.startswith("|")][2:]
    looked = 0
    for row in rows:
        files = [folder / name for name in PATH.findall(row) for folder in (SOURCE, ROOT) if (folder / name).is_file()]
        known = set(re.findall(r"\w+", " ".join(file.read_text(encoding="utf-8") for file in files)))
        names = set(WORD.findall(row)) - SAID_BY_USERS
        looked += len(names)
        assert names <= known, f"{sorted(names - known)} of: {row[:90]}"
    assert looked > 12


def test_a_walk_names_the_files_in_its_order() -> None:
    walks = HOUSE.partition("## Two walks")[2].partition("## ")[0].split("**A price")
    assert len(walks) == 2
    for walk in walks:
        files = PATH.findall(walk)
        assert len(files) >= 8 and files[0].startswith("cli/") and len(set(files)) == len(files)


def named_in(path: Path) -> set[str]:
    """Return the files of the package that a file imports, or names as a module to be started."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name.removeprefix("paceline.").replace(".", "/") + ".py" for name in found if name.startswith("paceline.")}


def test_a_walk_goes_where_the_code_goes() -> None:
    """Each file of a walk is named by the code of one that stands before it; the command line finds verbs by name."""
    walks = [PATH.findall(walk) for walk in HOUSE.partition("## Two walks")[2].partition("## ")[0].split("**A price")]
    walks[0] = walks[0][walks[0].index("cli/train.py") :]
    for files in walks:
        known = set()
        for number, file in enumerate(files):
            assert number == 0 or file in known, f"nothing before {file} leads to it"
            known |= named_in(SOURCE / file)


def test_a_word_stands_in_the_glossary_once() -> None:
    words = re.findall(r"^\| ([\w -]+?) \|", GLOSSARY, re.M)[1:]
    assert words == sorted(words) and len(words) > 30
    assert [word for word, count in Counter(words).items() if count > 1] == []


def meanings(path: Path) -> list[tuple[str, str]]:
    """Return the public names of a file's classes, each with its place, and of its types, each with what it stands for.

    A type variable means nothing outside of its file. The same type under the same name in two files is one thing.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [(node.name, str(path.relative_to(SOURCE))) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            stands_for = re.sub(r"\b(npt|torch|np)\.", "", ast.unparse(node.value))
            if TYPE_NAME.fullmatch(node.targets[0].id) and not stands_for.startswith("TypeVar("):
                found.append((node.targets[0].id, stands_for))
    return [(name, meaning) for name, meaning in found if not name.startswith("_")]


def test_a_class_has_its_name_alone() -> None:
    """Also one that its file alone uses: whoever searches for the name finds one thing."""
    names = Counter(re.findall(r"^\s*class (\w+)", "\n".join(p.read_text("utf-8") for p in SOURCE.rglob("*.py")), re.M))
    assert len(names) > 1000 and {name for name, count in names.items() if count > 1} == set()


def test_a_public_name_of_a_class_or_type_means_one_thing() -> None:
    of: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name, meaning in meanings(path):
            if meaning not in of.setdefault(name, []) or meaning.endswith(".py"):
                of[name].append(meaning)
    assert len(of) > 900
    assert {name: found for name, found in of.items() if len(found) > 1} == {}
