"""Memory that is exhausted: an allocator fails on one rank of two; the run says where, by what, and what fits."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_ranks
from fake_cuda import GIB, FakeCuda
from fake_nvml import FakeNvml
from runs import environment, paceline, records_of, steps_of, write_spec
from tests_shared import SEQ_LEN, VOCAB, Dropout, PaddedText, decoder_task, world_here
from torch import nn

from paceline.checkpoint import find_latest, save, take_snapshot
from paceline.checkpoint.inspect.sound import check_sound
from paceline.errors import (
    ConfigError,
    DataError,
    ExhaustedTogether,
    OutOfMemory,
    PacelineError,
    exhausted_by,
    first_line,
    is_exhausted,
    tells_exhausted,
)
from paceline.foreign_errors import asked_bytes
from paceline.plan.feasible.micro_batch import with_micro_batch
from paceline.run.loop import sources
from paceline.run.loop.training import Training
from paceline.run.memory import exhausted
from paceline.run.memory.exhausted import (
    out_of_memory,
    smallest_that_fits,
    told_together,
)
from paceline.run.memory.live import largest_live
from paceline.run.memory.spent import MemoryMeter
from paceline.run.process.world import World
from paceline.run.record.recorder import describe
from paceline.run.survive.saving import peers
from paceline.spec.arguments import make_spec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.settled import settled_micro_batch
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.spec.survive.phases import TOLD
from paceline.spec.survive.smaller import SmallerPlan
from paceline.spec.task import DataSpec, ModelSpec
from paceline.supervise.nodes.held_in_memory import PIECES_VARIABLE
from paceline.supervise.told.brief import Brief
from paceline.units import Amount

# After a few passes a rank's address space is limited to what it has: the allocator fails as on a full machine.
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
        if os.environ.get("GREEDY") == os.environ.get("RANK", "0") and self.calls >= 3:
            status = open("/proc/self/status").read()
            size = int(status.partition("VmSize:")[2].split()[0]) * 1024
            resource.setrlimit(resource.RLIMIT_AS, (size + 2**20, resource.RLIM_INFINITY))
        hidden = torch.tanh(self.embed(tokens))
        room = hidden.new_zeros(len(tokens), 2**23)
        return self.head(hidden) + room.sum()
"""


def greedy_spec(folder: Path, name: str, devices: int) -> Path:
    (folder / "greedy_model.py").write_text(MODEL)
    path = write_spec(folder, folder / name, devices, f"dp_replicate = {devices}\nmicro_batch = 7", steps=4)
    own = {"model": 'model = "greedy_model:Greedy"\nobjective = "next_token"',
           "checkpoint_every": 'checkpoint_every = "1 steps"'}  # fmt: skip
    lines = path.read_text().splitlines()
    text = "\n".join(own.get(line.partition(" =")[0], line) for line in lines)
    path.write_text(f'{text}\n[run.checkpoints]\nasynchronous = "off"\n')  # so that it is known which is the newest
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
    assert "out of memory on rank 1 of 2, in the forward and backward passes of step " in ended.stderr
    assert "Traceback" not in ended.stderr and "plan.micro_batch = " in ended.stderr
    (end,) = records_of(run_dir, "run_ended")
    told = end["error"]["evidence"]
    step = told["step"]  # whether a survey passes the same model or a copy before is not this test's matter
    assert end["exit_code"] == 3 and (told["rank"], told["phase"]) == (1, "forward") and step in (2, 3)
    assert told["asked_bytes"] == 7 * 2**23 * 4 and told["free_bytes"] < told["asked_bytes"]
    assert set(told["planned"]) == set(told["actual"]) and told["actual"]["weights"] == 4 * (600 * 64 * 2 + 600)
    assert sum(told["actual"].values()) == told["used_bytes"]
    names = [each["what"] for each in told["largest"]]
    assert {"gradient of embed.weight", "exp_avg of embed.weight"} <= set(names)
    newest = find_latest(run_dir / "checkpoints")
    assert newest is not None and newest.name.startswith(f"step-{step - 1:08d}") and not check_sound(newest).unchecked
    change = told["smallest_change"]["change"].replace(" ", "")
    assert change in ("plan.micro_batch=3", "plan.micro_batch=1") and told["smallest_change"]["bytes"] > 0
    again = train(tmp_path, spec, "", "--set", change)
    assert again.returncode == 0, again.stderr
    assert [step["step"] for step in steps_of(run_dir)] == [1, 2, 3, 4]


class Exhausted(nn.Module):
    """Raises what CUDA's allocator does, in a process's third training pass where its rank says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Dropout()
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        self.calls += self.training
        if self.calls == 6 and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")
        logits: torch.Tensor = self.inner(tokens)
        return logits


class Unbuilt(Dropout):
    """Finds no memory on rank 1, where its weights would be."""

    def __init__(self) -> None:
        super().__init__()
        if torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")


class Unread(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A data set of the user's whose sixth read finds no memory on rank 1: an error of Python's own, without a word."""

    items_per_sample, unit, vocab, fingerprint = SEQ_LEN, "tokens", VOCAB, "unread"

    def __init__(self) -> None:
        self.rows, self.reads = PaddedText(), 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads += 1
        if self.reads == 6 and torch.distributed.get_rank() == 1:
            raise MemoryError
        return {name: rows[0] for name, rows in self.rows.read(np.array([index])).items()}


def _without_supervisor(folder: str, where: str) -> dict[str, object]:
    """Return the error that this rank's run ends with, as plain data; rank 1 finds no memory at some place."""
    world = world_here()
    layout = Layout(dp_replicate=2)
    plan = Plan(layout, batch_samples=8, micro_batch=2, accumulation=2)
    model: Any = {"forward": Exhausted, "load": Unbuilt, "data": Dropout}[where]
    data: Any = Unread() if where == "data" else PaddedText()
    spec = make_spec(decoder_task(model=model, objective="next_token", data=data), plan)
    nan = math.nan
    brief = Brief(
        plan, 5, SEQ_LEN, "tokens", "cpu", 1, 1.0, nan, 1.0, nan, PlannedRecord(), smaller=(smaller("a", 1.0),)
    )
    try:
        training = Training(spec, brief, world, Path(folder))
        for batch in training:
            training.step(batch)
    except OutOfMemory as error:
        if world.rank == 1:  # as a script does whose error nobody catches
            (Path(folder) / "told.json").write_text(json.dumps(error.as_dict()))
            os.kill(os.getpid(), signal.SIGKILL)
        return error.as_dict()
    raise AssertionError("the run has come to its end")


@pytest.mark.parametrize("where", ["forward", "load", "data"])
def test_ranks_that_nobody_supervises_say_the_same(tmp_path: Path, where: str) -> None:
    """An allocator fails on rank 1 alone: in a pass, as its model is built, or in the user's own data set.

    Rank 0 sees a lost connection, and finds the cause in the world's store.
    """
    first, _ = run_ranks(_without_supervisor, 2, str(tmp_path), where, may_die=(1,))
    second = json.loads((tmp_path / "told.json").read_text())
    assert first == second and str(second["what"]).startswith(f"out of memory on rank 1 of 2, {TOLD[where]}")
    says = "MemoryError" if where == "data" else "2.00 GiB were asked for"
    assert says in str(second["because"]) and second["exit_code"] == 3 and second["evidence"]["phase"] == where
    if where == "load":
        return  # nothing is on record before a run is built
    (end,) = records_of(tmp_path, "run_ended")
    assert end["exit_code"] == 3 and end["error"]["evidence"]["rank"] == 1
    plan = Plan(Layout(dp_replicate=2), batch_samples=8, micro_batch=2, accumulation=2)
    assert settled_micro_batch(tmp_path, plan) == 1, "where it is the run's to settle, the next start has half"


def _no_memory(real: Any, rank: int) -> Any:
    """Return a function that finds no memory on one rank, and does what the real one does on others."""

    def called(*args: Any, **more: Any) -> Any:
        if torch.distributed.get_rank() == rank:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*args, **more)

    return called


def _in_an_agreed_call(folder: str, where: str) -> tuple[dict[str, object], str]:
    """Return the error that this rank's run ends with, and where its newest checkpoint is; rank 1 finds no memory."""
    world = world_here()
    plan = Plan(Layout(dp_replicate=2), batch_samples=8, micro_batch=2, accumulation=2)
    text = Path(folder) / "text.txt"
    if world.rank == 0:
        text.write_text("A sentence that is repeated until it makes a few samples. " * 40)
    world.wait()
    data = DataSpec(source=str(text), seq_len=SEQ_LEN, tokenizer="bytes", cache_dir=str(Path(folder) / "cache"))
    saved = CheckpointsSpec(asynchronous="on" if where == "beside" else "off")
    run = RunSpec(evaluate_every=None, checkpoint_every=Amount(1, "steps"), checkpoints=saved)
    model = ModelSpec("llama-1m", hidden=32, layers=2, heads=4, kv_heads=2, ffn=40)
    spec = make_spec(decoder_task(data=data, model=model), plan, run=run)
    nan = math.nan
    brief = Brief(plan, 50, SEQ_LEN, "tokens", "cpu", 1, 1.0, nan, 1.0, nan, PlannedRecord())
    if where == "open":
        sources._mapped = _no_memory(sources._mapped, 1)
    try:
        training = Training(spec, brief, world, Path(folder))
        for batch in training:
            if batch.step == 3 and where != "open":
                save._write_share = _no_memory(save._write_share, 1)
            training.step(batch)
    except OutOfMemory as error:
        newest = find_latest(Path(folder) / "checkpoints")
        if where == "beside" and world.rank == 1:  # as a script does whose error nobody catches
            (Path(folder) / "told.json").write_text(json.dumps(error.as_dict()))
            os.kill(os.getpid(), signal.SIGKILL)
        return error.as_dict(), newest.name if newest else ""
    raise AssertionError("the run has come to its end")


@pytest.mark.parametrize("where", ["open", "save", "beside"])
def test_what_ranks_agree_on_says_the_same_of_the_rank_without_memory(tmp_path: Path, where: str) -> None:
    """Rank 1 finds no memory as a text is opened, in a save, or in one beside training: all end with its report."""
    found = run_ranks(_in_an_agreed_call, 2, str(tmp_path), where, may_die=(1,) if where == "beside" else ())
    first, kept = found[0]
    second = json.loads((tmp_path / "told.json").read_text()) if where == "beside" else found[1][0]
    phase = "opening the data" if where == "open" else TOLD["save"]
    assert first == second and str(first["what"]).startswith(f"out of memory on rank 1 of 2, {phase}")
    assert first["exit_code"] == 3 and str(first["because"]).startswith("DefaultCPUAllocator: can't allocate memory")
    told: Any = first["evidence"]
    assert (told["rank"], told["phase"]) == (1, "data" if where == "open" else "save")
    if where == "open":
        assert not kept
        return  # nothing is built and on record yet
    step = told["step"]  # a save beside training may be that of the step before
    assert told["actual"]["weights"] > 0 and told["largest"] and step in ((3,) if where == "save" else (2, 3))
    assert kept.startswith(f"step-{step - 1:08d}") and not check_sound(tmp_path / "checkpoints" / kept).unchecked
    (end,) = records_of(tmp_path, "run_ended")
    assert end["exit_code"] == 3 and end["error"]["evidence"]["rank"] == 1


class NoRoom:
    """torch, where there is no memory for an empty tensor."""

    def __getattr__(self, name: str) -> Any:
        if name == "empty":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return getattr(torch, name)


def _copies_of_peers(folder: str) -> tuple[str, int]:
    """Return what is told, and of which rank, where rank 1 has no memory for the copy of rank 0's part."""
    rank = torch.distributed.get_rank()
    os.environ[PIECES_VARIABLE] = folder
    if rank == 1:
        peers.torch = NoRoom()  # type: ignore[assignment]
    copies = peers.PeerCopies(peers.Peers(rank, 1 - rank, (1 - rank,), 2))
    with pytest.raises(ExhaustedTogether) as told:
        copies.save(take_snapshot(1, {"weight": torch.ones(4)}, {}), torch.distributed.group.WORLD)
    return told.value.because, told.value.rank


def test_no_memory_for_the_copy_of_a_peer_is_no_peer_that_is_lost(tmp_path: Path) -> None:
    """It was told as one that stopped answering, and the peer waited for the copy to be taken."""
    told = run_ranks(_copies_of_peers, 2, str(tmp_path))
    assert told == [("rank 1: DefaultCPUAllocator: can't allocate memory", 1)] * 2


def test_what_nobody_can_tell_more_of_stays_as_it_was_told() -> None:
    """An agreed call within another: of the inner one's error the cause is left on the way to other ranks."""
    known = ExhaustedTogether("the checkpoint was not written", "rank 0: no memory")
    assert told_together(known, None, World(0, 1, 0, torch.device("cpu"))) is known


class ExhaustedWhenEvaluated(Dropout):
    """Finds no memory for logits of held-out samples."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        if not self.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")
        return super().forward(tokens)


def test_an_evaluation_that_a_loop_calls_says_the_same(tmp_path: Path) -> None:
    plan, nan = Plan(Layout(), batch_samples=8, micro_batch=4, accumulation=2), math.nan
    task = decoder_task(model=ExhaustedWhenEvaluated, objective="next_token", data=(PaddedText(), PaddedText()))
    spec = make_spec(task, plan, run=RunSpec(evaluate_every=None))
    brief = Brief(plan, 5, SEQ_LEN, "tokens", "cpu", 1, 1.0, nan, 1.0, nan, PlannedRecord())
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), tmp_path)
    with pytest.raises(OutOfMemory, match="out of memory on rank 0 of 1") as raised:
        training.evaluate()
    assert raised.value.exit_code == 3 and raised.value.evidence["asked_bytes"] == 2 * 2**30


def test_what_a_users_code_found_no_memory_for_is_told_as_such() -> None:
    def wrapped(wrapper: type[PacelineError], inner: Exception) -> BaseException:
        with pytest.raises(wrapper) as raised:
            raise wrapper("sample 3 cannot be read") from inner
        return raised.value

    bare, of_cuda = MemoryError(), torch.OutOfMemoryError("CUDA out of memory")
    assert exhausted_by(bare) is bare and exhausted_by(wrapped(DataError, bare)) is bare
    assert exhausted_by(wrapped(ConfigError, of_cuda)) is of_cuda
    assert exhausted_by(wrapped(ConfigError, ValueError("no"))) is None and exhausted_by(DataError("no")) is None
    assert exhausted_by(OutOfMemory("told already")) is None and exhausted_by(wrapped(OutOfMemory, bare)) is None
    assert (first_line(bare), first_line(RuntimeError("one\ntwo"))) == ("MemoryError", "one")


def test_what_an_allocator_says_is_read() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**50, dtype=torch.uint8)
    assert is_exhausted(real.value) and asked_bytes(real.value) == 2**50
    of_cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79")
    assert is_exhausted(of_cuda) and asked_bytes(of_cuda) == 5 * 2**29
    assert is_exhausted(MemoryError()) and asked_bytes(MemoryError()) is None
    assert not is_exhausted(RuntimeError("gloo: connection closed")) and not is_exhausted(ValueError("out of memory"))


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, other allocations: 1.00 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
        RuntimeError("unable to mmap 8192 bytes from file </torch_7>: Cannot allocate memory (12)"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=str,
)
def test_memory_is_known_as_exhausted_whichever_allocator_says_so(error: Exception) -> None:
    assert is_exhausted(error)
    assert tells_exhausted(describe(error)[0]), "of another process"


def test_an_error_of_another_process_tells_whether_its_memory_was_exhausted() -> None:
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(2**60, dtype=np.uint8)
    assert is_exhausted(of_numpy.value) and tells_exhausted(describe(of_numpy.value)[0])
    for kind in (OutOfMemory, ExhaustedTogether):
        assert tells_exhausted(kind("out of memory on rank 1 of a probe").as_dict())
    others = DataError("sample 3", "OSError: out of memory cards"), ValueError("out of memory"), KeyError(3)
    assert [tells_exhausted(describe(each)[0]) for each in others] == [False, False, False]


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


@pytest.mark.parametrize(("needed", "limit", "change"), [(900, 1000, "half"), (1000, 500, "quarter"), (1800, 600, ""),
                                                         (1700, 950, "half"), (1900, 950, "quarter")])  # fmt: skip
def test_the_smallest_change_that_fits_counts_how_far_the_forecast_was_off(
    needed: float, limit: float, change: str
) -> None:
    """Forecast: 100 bytes of weights and 800 of activations. At 1,700 needed, activations took twice as much."""
    kinds, plans = {"weights": 100.0, "activations": 800.0}, (smaller("half", 400.0), smaller("quarter", 310.0))
    found = smallest_that_fits(kinds, plans, needed, limit)
    assert (found.change if found else "") == change


def test_a_run_that_has_gone_on_with_a_smaller_micro_batch_is_told_of_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned with 8 and eased to 2, which runs out too: half of 2 is next, never 4, and 2's own forecast counts."""
    terms = [{"kind": "weights", "value": 100.0}, {"kind": "activations", "value": 800.0}]
    plans = tuple(
        SmallerPlan(f"plan.micro_batch = {size}", size, 8 // size, "none", "none",
                    {"weights": 100.0, "activations": 100.0 * size}, 1.0)
        for size in (4, 2, 1)
    )  # fmt: skip
    planned = Plan(Layout(), batch_samples=8, micro_batch=8, accumulation=1)
    nan = math.nan
    record = PlannedRecord(forecast={"memory": terms})
    brief = Brief(planned, 5, 4, "tokens", "cpu", 1, 1.0, nan, 1.0, nan, record, smaller=plans)
    world, error = World(0, 1, 0, torch.device("cpu")), torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(MemoryMeter, "now_bytes", lambda self: 550)  # of which activations are more than twice 2's own
    monkeypatch.setattr(exhausted, "free_bytes", lambda device: (0, "a test's limit"))

    def told(micro_batch: int) -> Any:
        plan = with_micro_batch(planned, micro_batch)
        return out_of_memory(error, ("forward", 3), brief, plan, world, MemoryMeter(world.device)).evidence

    eased = told(2)
    assert eased["micro_batch"] == 1 and eased["planned"] == {
        "weights": 100.0, "gradients": 0.0, "optimizer": 0.0, "activations_and_runtime": 200.0,
    }  # fmt: skip
    assert eased["smallest_change"]["change"] == "plan.micro_batch = 1" and eased["smallest_change"]["fits"]
    assert told(3)["planned"]["activations_and_runtime"] == 300.0, "one that was not priced, by its part of the plan's"
    assert told(8)["micro_batch"] == 4 and told(8)["smallest_change"]["change"] == "plan.micro_batch = 4"
    assert told(1)["micro_batch"] == 1 and told(1)["smallest_change"] is None


@pytest.mark.parametrize(("others", "asked_for"), [(130.0, 1.0), (0.0, 20.0), (1.0, 20.0), (120.0, 20.0)])
def test_memory_that_other_programs_hold_is_told_and_they_are_to_be_ended(
    monkeypatch: pytest.MonkeyPatch, others: float, asked_for: float
) -> None:
    """A run that was planned with 25 GiB of a device of 140, on which something else has taken 130."""
    cuda = FakeCuda(total=140 * GIB, now=5 * GIB, peak=5 * GIB, reserved=6 * GIB, others=round(others * GIB))
    cuda.installed(monkeypatch)
    monkeypatch.setattr(exhausted, "largest_live", lambda *_, **__: [])
    terms = [{"kind": "weights", "value": 5.0 * GIB}, {"kind": "activations", "value": 20.0 * GIB}]
    plan, nan = Plan(Layout(), batch_samples=8, micro_batch=2, accumulation=4), math.nan
    smaller_one = SmallerPlan("plan.micro_batch = 1", 1, 8, "none", "none", {"weights": 5.0 * GIB,
                              "activations": 10.0 * GIB}, 1.0)  # fmt: skip
    record = PlannedRecord(forecast={"memory": terms})
    brief = Brief(plan, 5, 4, "tokens", "cuda", 1, 1.0, nan, 1.0, nan, record, smaller=(smaller_one,))
    nvml = FakeNvml({})
    nvml.driver = False
    meter = MemoryMeter(cuda.device, nvml)
    error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked_for:.2f} GiB.")
    told = out_of_memory(error, ("forward", 3), brief, plan, World(0, 1, 0, cuda.device), meter)
    assert "bytes" not in told.because and "of the device's 140 GiB" in told.because
    known = others > 2  # a GiB more or less may be the process's own
    assert told.evidence["others_bytes"] > 0 if known else told.evidence["others_bytes"] == 0
    assert ("other programs hold" in told.because) == ("end the other programs" in told.try_) == known
    if known:
        # What is beside the allocator is assumed here: nobody tells whose it is.
        assert f"other programs hold {others:.0f}" in told.because
        assert "without them this plan fits by forecast" in told.try_ and "plan.micro_batch = 1" in told.try_


def test_the_error_travels_whole() -> None:
    error = OutOfMemory("what", "because", "try", {"rank": 1})
    again = pickle.loads(pickle.dumps(error))
    assert again.as_dict() == error.as_dict() and again.as_dict()["evidence"] == {"rank": 1}
    assert error.exit_code == 3 and not math.isnan(error.exit_code)
