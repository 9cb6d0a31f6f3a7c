"""What a module draws as it is imported is alike on all ranks of a run, or told by the proof."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.optim.optimizer as of_all

from paceline.cli.main import main
from paceline.run.process.handover import hand_over
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.plan import Plan
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.units import Amount
from paceline.verify.compare.in_a_group import are_alike, first_numbers
from paceline.verify.process import own_modules, worker
from paceline.verify.process.own_modules import OwnModules
from paceline.verify.process.process_hooks import hooks_of_all
from paceline.verify.process.read_once import ReadOnce
from paceline.verify.process.worker import Row

DRAWS = """
import random, numpy as np
SEEDED, PYTHONS, OWN = np.random.rand(), random.random(), np.random.default_rng().random()
"""
REGISTERS = """
import sys
if hasattr(sys, "once_alone"): raise ValueError("already registered")
sys.once_alone = True
"""


@pytest.fixture
def drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Return what writes a module and returns what imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def written(text: str) -> Callable[[], ModuleType]:
        (tmp_path / "of_a_user.py").write_text(text, encoding="utf-8")
        return lambda: importlib.import_module("of_a_user")

    yield written
    sys.modules.pop("of_a_user", None)
    if hasattr(sys, "once_alone"):
        del sys.once_alone


HOOKS = """
import sys
from torch.optim.optimizer import register_optimizer_step_post_hook
def follows(*given): pass
register_optimizer_step_post_hook(follows)
if hasattr(sys, "once_alone"): raise ValueError("already registered")
"""


def test_hooks_on_all_optimizers_are_there_once_however_often_their_module_is_imported(drawing: Any) -> None:
    """The old ones stayed, and knew the models of a module that nobody had any more."""
    load = drawing(HOOKS)
    modules = OwnModules(load)
    modules.import_again(load)
    assert [hook.__module__ for hook in of_all._global_optimizer_post_hooks.values()] == ["of_a_user"]
    assert hooks_of_all() == {"optimizers": ["of_a_user.follows"]}
    (ours,) = of_all._global_optimizer_post_hooks.values()
    sys.once_alone = True  # type: ignore[attr-defined]
    modules.import_again(load)
    assert list(of_all._global_optimizer_post_hooks.values()) == [ours], "it could not be imported again"
    of_all._global_optimizer_post_hooks.clear()


def test_each_rank_draws_what_generators_of_its_own_give(drawing: Any) -> None:
    load = drawing(DRAWS)
    modules = OwnModules(load)
    first = load()
    modules.import_again(load)
    again = load()
    assert again is not first
    assert (again.SEEDED, again.PYTHONS) == (first.SEEDED, first.PYTHONS) and again.OWN != first.OWN


def test_what_cannot_be_imported_twice_is_imported_once(drawing: Any) -> None:
    load = drawing(REGISTERS)
    modules = OwnModules(load)
    first = load()
    modules.import_again(load)
    assert load() is first


def test_what_takes_long_is_imported_once(drawing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load = drawing(DRAWS)
    monkeypatch.setattr(own_modules, "MOST_SECONDS", 0.0)
    modules = OwnModules(load)
    first = load()
    modules.import_again(load)
    assert load() is first


ASKS = """
import os
import torch
from torch import nn

RANKS = int(os.environ.get("WORLD_SIZE", "1"))

def net():
    return nn.Linear(6, 3)

def loss(model, batch):
    found = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return found / RANKS, torch.tensor(len(batch[0]))

class Rows:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        row = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return row, (row[0] > 0).long()
"""


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_module_that_reads_the_number_of_ranks_as_it_is_imported_is_told(
    ranks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawing: Any
) -> None:
    """The process alone had the rank's modules, whose loss was divided as in the layout: told "equal"."""
    load = drawing(ASKS)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", ranks)
    task = Task(
        model=ModelSpec("of_a_user:net"), data=DataSpec("of_a_user:Rows"), objective="of_a_user:loss",
        global_batch=Amount(8, "samples"), stop=Amount(2, "steps"),
    )  # fmt: skip
    path = hand_over(Spec(task=task), tmp_path)
    read = ReadOnce()
    read.own_modules = OwnModules(load)
    row = Row(path, Plan(Layout(dp_replicate=2), batch_samples=8, micro_batch=4), "steps", False, 1)
    (alone,) = worker.numbers_of_one([row], read).values()
    worker._import_again([row], read)
    source = read.source(task, False)
    here = first_numbers(task, row.plan, source, source.items_per_sample)
    assert are_alike(alone, here, "fp32") is (ranks == "1")


PROGRAM = """
import os
from pathlib import Path
import numpy as np, torch
from torch import nn

SCALE, NAMES = 1 + {drawn}, list({{"alpha", "beta", "gamma", "delta", "epsilon"}})

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        with Path(__file__).with_suffix(".told").open("a") as told:
            told.write(f"{{SCALE}} {{NAMES}}\\n" if os.environ.get("RANK") else "")

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)) * SCALE)

class Rows:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        row = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return row, (row[0] > 0).long()
"""
SPEC = """
[task]
name = "draws"
objective = "classification"
global_batch = "12 samples"
stop = "2 steps"
model = {{ name = "{module}:Net" }}
data = {{ source = "{module}:Rows" }}

[cluster]
device = "cpu"
devices = 2
probe = false
learn = false

[plan]
dp_replicate = 2

[run]
dir = "{folder}/run"
"""


@pytest.mark.deep
@pytest.mark.parametrize(("drawn", "code"), [("np.random.rand()", 0), ("np.random.default_rng().random()", 4)])
def test_ranks_that_draw_as_they_import_train_alike_or_do_not_train(tmp_path: Path, drawn: str, code: int) -> None:
    """Ranks of a proof were forked after the import: "equal", and ranks of the run had a scale of their own each."""
    module = f"drawing_{code}"
    (tmp_path / f"{module}.py").write_text(PROGRAM.format(drawn=drawn), encoding="utf-8")
    spec = tmp_path / "draws.toml"
    spec.write_text(SPEC.format(module=module, folder=tmp_path), encoding="utf-8")
    assert main(["train", str(spec)]) == code
    if not code:
        told = (tmp_path / f"{module}.told").read_text(encoding="utf-8").splitlines()
        assert len(told) > 2 and len(set(told)) == 1, "of the proof and of the run"
