"""What users' scripts of the first hour say on a GPU: the same, without the word that keeps them off it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_no_script_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only torch alone moves its model and its batches by itself; a spec file says nothing of devices."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import first_hour

    scripts = [each for each in first_hour.CONTENDERS if each.path.suffix == ".py"]
    assert len(scripts) == 10
    for each in scripts:
        (script,) = each.words(tmp_path)
        text = Path(script).read_text("utf-8")
        ast.parse(text)
        assert "cpu" not in text.lower(), script
        assert (".cuda()" in text and '.to("cuda")' in text) == (each.name == "torch alone"), script
        assert Path(script).parent == tmp_path / each.task, "the files of the task are left as they are"
        assert {path.name for path in each.path.parent.glob("*.py")} <= {
            path.name for path in Path(script).parent.iterdir()
        }
    specs = [each for each in first_hour.CONTENDERS if each.path.suffix == ".toml"]
    assert specs and all("device" not in each.path.read_text("utf-8") for each in specs)
