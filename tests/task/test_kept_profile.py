"""A traced profile is kept, and traced anew where anything that it depends on changed."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch  # noqa: F401  (so that models are traced in this process)

from paceline.spec.profile import ModelProfile
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task import own_code
from paceline.task.data.facts import DataFacts
from paceline.task.profile import kept_profiles
from paceline.task.profile.kept_profiles import trace_once

FACTS = DataFacts(64, 8, "tokens", 256, 512, 1, "text", "f")
MODEL = """
import json
from pathlib import Path

import kept_widths
from torch import nn

class Words(nn.Module):
    def __init__(self, config=""):
        super().__init__()
        width = kept_widths.WIDTH * json.loads(Path(__file__).with_name("kept.json").read_text())["times"]
        width += json.loads(Path(config, "config.json").read_text())["more"] if config else 0
        self.inner, self.head = nn.Embedding(256, width), nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.inner(tokens))

def loss(model, batch):
    found = nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    return found * batch["tokens"].numel(), batch["tokens"].numel()
"""

Traced = Callable[..., ModelProfile]


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Traced, list[Task]]:
    """Return what gives the model's profile, from modules as they are in the files now, and the list of traces."""
    (tmp_path / "kept_model.py").write_text(MODEL)
    (tmp_path / "kept_widths.py").write_text("WIDTH = 8\n")
    (tmp_path / "kept.json").write_text('{"times": 1}')
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(folder for folder in sys.path if "lib/python" in folder)])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    traces: list[Task] = []
    real = kept_profiles.trace_task
    monkeypatch.setattr(kept_profiles, "trace_task", lambda task: traces.append(task) or real(task))
    data = DataSpec(source=str(tmp_path / "text.txt"), tokenizer="bytes", seq_len=8)

    def profile(facts: DataFacts = FACTS, data: DataSpec = data, **arguments: str) -> ModelProfile:
        for name in ("kept_model", "kept_widths"):
            sys.modules.pop(name, None)
        model = ModelSpec("kept_model:Words", arguments=arguments)
        return trace_once(Task(model=model, data=data, objective="kept_model:loss"), facts)

    return profile, traces


def test_one_that_is_kept_is_the_one_that_was_traced(traced: tuple[Traced, list[Task]]) -> None:
    profile, traces = traced
    first = profile()
    assert first.parameters == 8 * 256 * 2 + 256
    assert profile() == first and len(traces) == 1


def test_it_is_traced_anew_where_code_settings_or_data_changed(
    traced: tuple[Traced, list[Task]], tmp_path: Path
) -> None:
    """Code that the model imports, a file beside it, a folder that an argument names, the size of the data."""
    profile, traces = traced
    folder = tmp_path / "elsewhere" / "config"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"more": 1}')
    sizes = [profile(config=str(folder)).parameters]
    (tmp_path / "kept_widths.py").write_text("WIDTH = 16\n")
    sizes.append(profile(config=str(folder)).parameters)
    (tmp_path / "kept.json").write_text('{"times": 2}')
    sizes.append(profile(config=str(folder)).parameters)
    (folder / "config.json").write_text('{"more": 3, "and": 0}')
    sizes.append(profile(config=str(folder)).parameters)
    assert sizes == [(width * 2 + 1) * 256 for width in (9, 17, 33, 35)]
    profile(dataclasses.replace(FACTS, fingerprint="g"), config=str(folder))
    assert len(traces) == 5
    profile(config=str(folder))
    assert len(traces) == 5


def test_a_file_that_is_damaged_is_traced_anew_and_the_oldest_go(
    traced: tuple[Traced, list[Task]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, traces = traced
    first = profile()
    (path,) = (tmp_path / "cache/paceline/profiles").glob("*.json")
    path.write_text(path.read_text()[:100])
    assert profile() == first and len(traces) == 2
    monkeypatch.setattr(kept_profiles, "MOST_KEPT", 1)
    profile(dataclasses.replace(FACTS, fingerprint="g"))
    assert len(list(path.parent.glob("*.json"))) == 1 and not path.exists()


def test_data_that_code_of_the_user_makes_keep_nothing(traced: tuple[Traced, list[Task]], tmp_path: Path) -> None:
    """What such data hold is not in any file's digest."""
    profile, traces = traced
    (tmp_path / "kept_rows.py").write_text(
        "import torch\nrows = [{'tokens': torch.zeros(8).long(), 'labels': torch.zeros(8).long()}] * 64\n"
        "class Rows(list):\n    vocab, items_per_sample, unit = 256, 8, 'tokens'\n"
        "made = lambda: Rows(rows)\n"
    )
    data = DataSpec(source="kept_rows:made")
    assert kept_profiles._key(Task(model=ModelSpec("kept_model:Words"), data=data), FACTS) is None
    assert profile() and len(traces) == 1


def test_texts_that_name_nothing_and_files_that_cannot_be_read_end_no_plan(
    traced: tuple[Traced, list[Task]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt with a slash is longer than a file's name may be; data beside the code are not read whole."""
    prompt = "either/or " * 100
    large = tmp_path / "data.json"
    large.write_text("{}")
    read: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self) or real(self))
    values = ["kept_model:Words", prompt, "a\0/b"]
    before = own_code.own_code(values)
    assert before and large not in read and tmp_path / "kept_model.py" in read
    large.write_text("[1]")
    assert own_code.own_code(values) != before, "its size is a part all the same"

    def refused(self: Path) -> bytes:
        raise PermissionError(13, "not yours", str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert own_code.own_code(values) is None
    assert kept_profiles._key(Task(model=ModelSpec("kept_model:Words"), data=DataSpec()), FACTS) is None


def test_what_is_no_folder_has_no_code_and_the_rest_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PYTHONPATH names folders that are not there, and archives; a folder below may be another user's, or just go."""
    (tmp_path / "kept_model.py").write_text("")
    (tmp_path / "code.zip").write_text("")
    (tmp_path / "another's").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    plain = own_code.own_code(["kept_model:Words"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "gone"), str(tmp_path / "code.zip")]))
    real = os.scandir

    def scandir(folder: str) -> object:
        if folder == str(tmp_path / "another's"):
            raise PermissionError(13, "not yours", folder)
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert own_code.own_code(["kept_model:Words"]) == plain is not None


def test_a_second_plan_starts_no_process_and_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "kept_model.py").write_text(MODEL.replace("import kept_widths\n", "").replace("kept_widths.WIDTH", "8"))
    (tmp_path / "kept.json").write_text('{"times": 1}')
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    spec = tmp_path / "spec.toml"
    spec.write_text(
        '[task]\nmodel = "kept_model:Words"\nobjective = "kept_model:loss"\n'
        'data = { source = "text.txt", tokenizer = "bytes", seq_len = 8 }\nglobal_batch = "8 samples"\n'
        '[cluster]\ndevice = "h100-sxm"\ndevices = 8\n'
    )
    code = (
        "import subprocess, sys\nfrom paceline.spec.load import load_spec\n"
        "from paceline.plan.planned import plan_task\n"
        "started = []\nreal = subprocess.run\nsubprocess.run = lambda *a, **k: started.append(a) or real(*a, **k)\n"
        f"plans = [plan_task(load_spec({str(spec)!r})).plan for _ in range(2)]\n"
        "print(len(started), plans[0] == plans[1], 'torch' in sys.modules)"
    )
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(own_code.OURS.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert done.stdout.split() == ["1", "True", "False"], done.stderr


def test_the_scheme_of_a_source_is_no_module_whose_code_cannot_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of a task with the folder `table` was ever remembered: "table:table" was taken for an object's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # whose folders are read too, and may hold too many files
    (tmp_path / "table").mkdir()
    assert own_code.own_code(["table:table", "classification"]) == own_code.own_code(["table:rows.csv"]) == ""
    assert own_code.own_code(["nowhere:table"]) is None
    (tmp_path / "table").rmdir()
    (tmp_path / "table.py").write_text("table = 1")
    importlib.invalidate_caches()
    first = own_code.own_code(["table:table"])
    (tmp_path / "table.py").write_text("table = 2")
    assert first and own_code.own_code(["table:table"]) not in (first, None)
