"""The process of a rank that is started anew: what it imports, and that no time goes into garbage meanwhile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runs import as_json, environment, run_patiently

from paceline.supervise.blame import errors_told
from paceline.supervise.supervisor import ERROR_FOLDER

COUNTS = """
import gc, json, sys
from paceline.launch.worker import import_all
looks = []
gc.callbacks.append(lambda phase, about: looks.append(about["generation"]) if phase == "start" else None)
import_all()
made = len(looks)
names = ("torch._dynamo", "sympy", "torch.distributed.tensor", "paceline.run.loop.training")
known = [name in sys.modules for name in names]
import_all()
print(json.dumps([made, known, gc.isenabled()]))
"""


def test_a_rank_looks_for_no_garbage_while_it_imports() -> None:
    """Where no standby forks ranks each of them imports torch: a sixth of that went into collections.

    torch's compiler and its tensors in shards are a third of all that could be imported: plain copies use neither.
    """
    ended = run_patiently([sys.executable, "-c", COUNTS], is_cold=True, env=environment())
    assert ended.returncode == 0, ended.stderr
    assert as_json(ended.stdout) == [0, [False, False, False, True], True]


def test_a_rank_that_cannot_import_torch_says_so(tmp_path: Path) -> None:
    """Without a word of it the supervisor said that something had called exit."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise OSError('libcudart.so.13: cannot open shared object file')\n"
    )
    environ = environment()
    environ["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environ.get('PYTHONPATH', '')}"
    environ |= {ERROR_FOLDER: str(tmp_path), "RANK": "0"}
    ended = run_patiently([sys.executable, "-m", "paceline.launch.worker", "spec.json"], is_cold=True, env=environ)
    assert ended.returncode == 1
    (told,) = errors_told(tmp_path)
    assert told.cause and "libcudart.so.13" in str(told.words["what"]) and "doctor" in str(told.words["try"])
