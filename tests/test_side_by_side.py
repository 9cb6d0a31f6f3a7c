"""Files of tests that run side by side give what they give one after the other, also where a process dies."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest
from runs import environment

CONFTEST = """
import os
from pathlib import Path

import pytest
from started.side_by_side import pytest_addoption, pytest_runtestloop

LOG = Path(__file__).with_name("log.txt")


def note(what):
    with LOG.open("a") as log:
        log.write(f"{what} {os.getpid()}\\n")


@pytest.fixture(scope="session", autouse=True)
def whole():
    note("begins")
    yield
    note("ends")


@pytest.fixture(scope="module")
def of_file(request):
    note("file")
    yield
    note("file-ends")
"""
FIRST = """
import os, signal, warnings
import pytest

def test_passes(of_file, tmp_path):
    print("said by one that passes")

def test_fails(of_file):
    print("said by one that fails")
    assert 1 + 1 == 3

def test_warns():
    warnings.warn("a word of warning", RuntimeWarning)

@pytest.mark.skip(reason="not here")
def test_skipped():
    raise AssertionError

def test_passes_after_all(of_file):
    pass
"""
KILLED = """
import os, signal

def test_before():
    pass

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""
ERROR = """
import pytest

@pytest.fixture
def broken():
    raise ValueError("of a fixture")

def test_has_no_fixture(broken):
    pass
"""


def ran(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Counter[str], list[str]]:
    """Return how pytest ended, how each test did as its report has it, and what the tests noted."""
    (folder / "log.txt").unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder),
             f"--junitxml={folder / 'report.xml'}", "--durations=0", *options, str(folder)]  # fmt: skip
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    cases = ET.parse(folder / "report.xml").iter("testcase")
    outcomes = Counter(f"{case.get('name')} {'+'.join(child.tag for child in case)}" for case in cases)
    return done, outcomes, (folder / "log.txt").read_text().splitlines()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(3):
        (tmp_path / f"test_first_{number}.py").write_text(FIRST)
    (tmp_path / "test_error.py").write_text(ERROR)
    return tmp_path


def test_reports_are_those_of_one_process(files: Path) -> None:
    alone, expected, _ = ran(files)
    shared, found, notes = ran(files, "--workers=2")
    assert found == expected and len(found) == 6
    assert alone.returncode == shared.returncode == 1
    assert alone.stdout.splitlines()[-1].split(" in ")[0] == shared.stdout.splitlines()[-1].split(" in ")[0]
    for words in ("said by one that fails", "said by one that passes", "RuntimeWarning: a word of warning"):
        assert shared.stdout.count(words) == alone.stdout.count(words), words
    kinds = Counter(note.split()[0] for note in notes)
    processes = {note.split()[1] for note in notes}
    assert len(processes) == 2, "both had a file"
    assert kinds == {"begins": 2, "ends": 2, "file": 3, "file-ends": 3}


def test_a_process_that_dies_costs_the_test_in_which_it_does(files: Path) -> None:
    (files / "test_a_killed.py").write_text(KILLED)
    done, found, _ = ran(files, "--workers=2")
    assert done.returncode == 1
    assert found["test_dies failure"] == 1 and found["test_before "] == found["test_after "] == 1
    assert sum(found.values()) == 3 * 5 + 1 + 3
    assert "ended with -9 in test_a_killed.py::test_dies" in done.stdout


def test_the_first_failure_ends_all_where_that_is_asked(files: Path) -> None:
    done, found, _ = ran(files, "--workers=2", "-x")
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout
    assert sum(found.values()) < 3 * 5 + 1
