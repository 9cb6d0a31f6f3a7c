"""`paceline doctor`, and what a machine without the packages, or with an old Python, is told."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import environment

import paceline
from paceline.cli.output import print_bare, print_json
from paceline.session.doctor import examine as looks
from paceline.session.doctor.finding import NOTE, OK, WRONG, Examination, Finding, lines_of

PACKAGE = Path(paceline.__file__)


def python(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], env=environment(), capture_output=True, text=True)


def test_doctor_tells_machines_and_people_the_same(tmp_path: Path) -> None:
    ended = python("-m", "paceline", "doctor", "--json", "--runs", tmp_path)
    told = json.loads(ended.stdout)
    findings = {finding["about"]: finding for finding in told["findings"]}
    assert {"python", "torch", "cuda", "gloo", "cores", "memory", "runs", "open files", "extras"} <= set(findings)
    assert findings["runs"]["state"] == "ok" and str(tmp_path) in findings["runs"]["found"]
    assert told["exit_code"] == ended.returncode == 0
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_what_is_wrong_has_something_to_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_file = tmp_path / "file"
    a_file.write_text("")
    monkeypatch.setattr(looks, "_version_of", lambda package: "")
    found = looks.examine(a_file / "runs")
    wrong = {finding.about: finding for finding in found.findings if finding.state == WRONG}
    assert set(wrong) == {"torch", "numpy", "safetensors", "runs"} and found.exit_code == 2
    (hashes,) = (finding for finding in found.findings if finding.about == "blake3")
    assert hashes.state == NOTE and "cannot be read" in hashes.found, "training works without it"
    assert all(finding.try_ for finding in found.findings if finding.state != OK)
    assert lines_of(found)[-1].startswith("training cannot work here: torch")


def test_a_remark_is_no_failure() -> None:
    found = Examination((Finding("python", OK, "3.11"), Finding("load", NOTE, "9 processes", "wait")))
    assert found.exit_code == 0
    assert lines_of(found)[1:] == ["- load        9 processes", "              try: wait",
                                   "training works here; 1 remark (- above)"]  # fmt: skip


@pytest.mark.parametrize(("entered", "code"), [("-m", 2), ("bin/paceline", 2), ("mine.py", 1)])
def test_an_old_python_is_told_in_one_line(entered: str, code: int) -> None:
    text = f"import sys; sys.version_info = (3, 10, 4); sys.version = '3.10.4 (main)'; sys.argv = ['{entered}']"
    ended = python("-c", text + "; import paceline")
    assert ended.returncode == code
    line = ended.stderr.strip().splitlines()[-1]
    assert "needs Python 3.11 or later, and this is 3.10.4" in line and (code == 1 or ended.stderr.count("\n") == 1)


def test_an_old_python_can_read_what_tells_it() -> None:
    for file in (PACKAGE, PACKAGE.with_name("version.py"), PACKAGE.with_name("__main__.py")):
        ast.parse(file.read_text("utf-8"), feature_version=(3, 8))
    names = [node for node in ast.parse(PACKAGE.read_text("utf-8")).body if isinstance(node, ast.If)]
    assert "version_info" in ast.unparse(names[0].test), "the version is looked at before rooms are imported"


def test_a_missing_package_is_named_without_a_traceback() -> None:
    ended = python("-c", "import sys; sys.modules['numpy'] = None; from paceline.cli.main import main; "
                   "sys.exit(main(['plan', '--set', 'task.model=llama-1m']))")  # fmt: skip
    assert ended.returncode == 2
    assert "the package 'numpy' is not installed" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("value", "code", "shown"),
    [({"findings": []}, None, 0), ({"findings": []}, 74, 74), (Examination(()), None, 0)],
)
def test_json_always_has_the_exit_code(value: object, code: int | None, shown: int, capsys: Any) -> None:
    print_json(value, "paceline doctor", code)
    assert json.loads(capsys.readouterr().out)["exit_code"] == shown
    print_bare({"properties": {}})
    assert "exit_code" not in json.loads(capsys.readouterr().out)
