"""The page of simulated runs and its pictures are what the code says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "write_simulation.py"
SPEC = importlib.util.spec_from_file_location("write_simulation", SCRIPT)
assert SPEC is not None and SPEC.loader is not None
WRITER = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(WRITER)


@pytest.fixture(scope="module")
def written() -> dict[Path, str]:
    found: dict[Path, str] = WRITER.files()
    return found


def test_the_page_and_its_pictures_are_current(written: dict[Path, str]) -> None:
    stale = [path.name for path, content in written.items() if path.read_text(encoding="utf-8") != content]
    assert not stale, "run: python docs/scripts/write_simulation.py"
