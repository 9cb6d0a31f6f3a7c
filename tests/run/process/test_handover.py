"""A task of objects whose classes are in modules that only its script finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

from paceline.run.process.handover import hand_over
from paceline.spec.load import Spec
from paceline.spec.task import Task

MODULE = "import torch\nclass Net(torch.nn.Module):\n    pass\nclass Rows(list):\n    pass\n"


def test_another_process_finds_modules_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started elsewhere, and its own path does not have the script's folder."""
    (tmp_path / "beside_script.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside_script  # type: ignore[import-not-found]

    rows = beside_script.Rows([{"x": 1}])
    path = hand_over(Spec(task=Task(model=beside_script.Net(), data=rows, objective="m:f")), tmp_path)
    code = (
        f"from pathlib import Path; from paceline.run.process.handover import take_over; take_over(Path({str(path)!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
