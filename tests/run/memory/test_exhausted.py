"""Memory that is exhausted: an allocator fails on one rank of two; the run says where, by what, and what fits."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import environment, paceline, records_of, steps_of, write_spec
from torch import nn

from paceline.checkpoint import find_latest
from paceline.checkpoint.inspect.sound import check_sound
from paceline.errors import OutOfMemory
from paceline.plan.smaller import SmallerPlan
from paceline.run.memory.exhausted import asked_bytes, is_exhausted, smallest_that_fits
from paceline.run.memory.live import largest_live

# In a run's third step a rank's address space is limited to what it has: the allocator fails as on a full machine.
MODEL = """
import os
import resource
import sys

import torch
from torch import nn


class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(600, 64)
        self.head = nn.Linear(64, 600)
        self.calls = 0

    def forward(self, tokens):
        self.calls += self.training
        if os.environ.get("GREEDY") == os.environ.get("RANK", "0") and self.calls == 4:  # a survey was the first
            status = open("/proc/self/status").read()
            size = int(status.partition("VmSize:")[2].split()[0]) * 1024
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**20, resource.RLIM_INFINITY))
        hidden = torch.tanh(self.embed(tokens))
        room = hidden.new_zeros(len(tokens), 2**21)
        return self.head(hidden) + room.sum()
"""


def greedy_spec(folder: Path, name: str, devices: int) -> Path:
    (folder / "greedy_model.py").write_text(MODEL)
    path = write_spec(folder, folder / name, devices, f"dp_replicate = {devices}\nmicro_batch = 7", steps=4)
    own = {"model": 'model = "greedy_model:Greedy"\nobjective = "next_token"',
           "checkpoint_every": 'checkpoint_every = "1 steps"'}  # fmt: skip
    lines = path.read_text().splitlines()
    path.write_text("\n".join(own.get(line.partition(" =")[0], line) for line in lines))
    return path


def train(folder: Path, spec: Path, greedy: str, *options: str) -> Any:
    return paceline(
        "train", spec, *options, env=environment(GREEDY=greedy, PYTHONPATH=os.pathsep.join([str(folder), *sys.path]))
    )


def test_one_rank_of_two_runs_out_of_memory(tmp_path: Path) -> None:
    """All end with code 3, rank 1 and what it holds are named, the last checkpoint is whole, the change is taken."""
    spec, run_dir = greedy_spec(tmp_path, "two", 2), tmp_path / "two"
    ended = train(tmp_path, spec, "1")
    assert ended.returncode == 3, ended.stderr
    assert "out of memory on rank 1 of 2, in the forward and backward passes of step 3" in ended.stderr
    assert "Traceback" not in ended.stderr and "plan.micro_batch = " in ended.stderr
    (end,) = records_of(run_dir, "run_ended")
    told = end["error"]["evidence"]
    assert end["exit_code"] == 3 and (told["rank"], told["step"], told["phase"]) == (1, 3, "forward")
    assert told["asked_bytes"] == 7 * 2**21 * 4 and told["free_bytes"] < told["asked_bytes"]
    assert set(told["planned"]) == set(told["actual"]) and told["actual"]["weights"] == 4 * (600 * 64 * 2 + 600)
    assert sum(told["actual"].values()) == told["used_bytes"]
    names = [each["what"] for each in told["largest"]]
    assert {"gradient of embed.weight", "exp_avg of embed.weight"} <= set(names)
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None and newest.name.startswith("step-00000002") and not check_sound(newest).unchecked
    change = told["smallest_change"]["change"].replace(" ", "")
    assert change in ("plan.micro_batch=3", "plan.micro_batch=1") and told["smallest_change"]["bytes"] > 0
    again = train(tmp_path, spec, "", "--set", change)
    assert again.returncode == 0, again.stderr
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3, 4]


def test_what_an_allocator_says_is_read() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_exhausted(real.value) and asked_bytes(real.value) == 2**50
    of_cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79")
    assert is_exhausted(of_cuda) and asked_bytes(of_cuda) == 5 * 2**29
    assert is_exhausted(MemoryError()) and asked_bytes(MemoryError()) is None
    assert not is_exhausted(RuntimeError("gloo: connection closed")) and not is_exhausted(ValueError("out of memory"))


def test_what_a_graph_has_saved_is_found_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters())
    loss = model(torch.ones(4099, 256)).sum()
    found = largest_live(model, optimizer, torch.device("cpu"), 4, looks_into_graph=True)
    assert loss.requires_grad and ("saved by GeluBackward0", (4099, 256)) in [(each.what, each.shape) for each in found]
    assert [each.bytes for each in found] == sorted((each.bytes for each in found), reverse=True)
    without = largest_live(model, optimizer, torch.device("cpu"), 4, looks_into_graph=False)
    assert not any(each.what.startswith("saved") for each in without)


def smaller(change: str, activations: float, fixed: float = 100.0) -> SmallerPlan:
    return SmallerPlan(change, 1, 1, "none", "none", {"weights": fixed, "activations": activations}, 1.0)


@dataclasses.dataclass(frozen=True)
class Priced:
    """What a brief has of prices."""

    record: Any
    smaller: tuple[SmallerPlan, ...]


@pytest.mark.parametrize(("needed", "limit", "change"), [(900, 1000, "half"), (1000, 500, "quarter"), (1800, 600, ""),
                                                         (1700, 950, "half"), (1900, 950, "quarter")])  # fmt: skip
def test_the_smallest_change_that_fits_counts_how_far_the_forecast_was_off(
    needed: float, limit: float, change: str
) -> None:
    """Forecast: 100 bytes of weights and 800 of activations. At 1,700 needed, activations took twice as much."""
    terms = [{"kind": "weights", "value": 100.0}, {"kind": "activations", "value": 800.0}]
    record = dataclasses.make_dataclass("Record", ["forecast"])({"memory": terms})
    priced = Priced(record, (smaller("half", 400.0), smaller("quarter", 310.0)))
    found = smallest_that_fits(priced, needed, limit)  # type: ignore[arg-type]
    assert (found.change if found else "") == change


def test_the_error_travels_whole() -> None:
    error = OutOfMemory("what", "because", "try", {"rank": 1})
    again = pickle.loads(pickle.dumps(error))
    assert again.as_dict() == error.as_dict() and again.as_dict()["evidence"] == {"rank": 1}
    assert error.exit_code == 3 and not math.isnan(error.exit_code)
