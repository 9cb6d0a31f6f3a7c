"""Import paths: the object is found, or the message says which part of the path is wrong."""

import os.path
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.spec.import_paths import is_import_path, load_object, make_importable
from paceline.spec.load import load_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_objects_are_found() -> None:
    assert load_object("os.path:join", "x") is os.path.join
    assert load_object("pathlib:Path.exists", "x") is Path.exists


@pytest.mark.parametrize(
    ("text", "is_path"),
    [("a:b", True), ("a.b:c.d", True), ("a", False), ("a:", False), (":b", False), ("a/b:c", False), ("a:b:c", False),
     ("C:\\x", False), ("", False)],
)  # fmt: skip
def test_the_form_of_an_import_path(text: str, is_path: bool) -> None:
    assert is_import_path(text) == is_path


@pytest.mark.parametrize(
    ("path", "says"),
    [("os.path", "package.module:attribute"), ("no_such_module_here:x", "no module 'no_such_module_here'"),
     ("os.path:jion", "did you mean 'join'?"), ("pathlib:Path.nope", "has no 'nope'"),
     ("os.path.deep:x", "os.path.deep"), ("no_such_module_here.py:x", "did you mean 'no_such_module_here:x'?")],
)  # fmt: skip
def test_what_is_missing_is_named(path: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_object(path, "task.model.name")
    assert caught.value.what.startswith(f"task.model.name = '{path}'") and says in str(caught.value)


def test_a_module_that_fails_to_import_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "fails_at_import.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "needs_another.py").write_text("import no_such_package_here\n")
    (tmp_path / "is_no_python.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"ZeroDivisionError in .*fails_at_import\.py:2"):
        load_object("fails_at_import:x", "x", search=[tmp_path])
    with pytest.raises(ConfigError, match="'needs_another' needs 'no_such_package_here'"):
        load_object("needs_another:x", "x", search=[tmp_path])
    with pytest.raises(ConfigError, match="SyntaxError"):
        load_object("is_no_python:f", "x", search=[tmp_path])


def test_a_file_beside_the_spec_never_replaces_an_installed_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("loads = None\n")
    assert load_object("json:loads", "x", search=[tmp_path]) is not None


def test_folders_are_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", ["first"])
    make_importable([tmp_path, str(tmp_path), tmp_path / "." / "x" / ".."])
    import sys

    assert sys.path == ["first", str(tmp_path)]


def test_the_example_model_is_found_beside_its_spec() -> None:
    torch = pytest.importorskip("torch")
    spec = load_spec(EXAMPLES / "digits.toml")
    model = load_object(spec.task.model.name, "task.model.name")(**spec.task.model.arguments)
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
