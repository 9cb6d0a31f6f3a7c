"""What a run sets in its processes: torch's own switches and CUDA's variables, nothing that the user has set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from paceline.cluster.here import prepare
from paceline.cluster.here.prepare import bind_rank, environment_for, prepare_process
from paceline.spec.run import RunSpec
from paceline.spec.survive.health import HealthSpec


@pytest.fixture
def switches_kept() -> Iterator[None]:
    kept = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )
    yield
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = kept[1], kept[2]
    torch.use_deterministic_algorithms(kept[3])
    torch.set_num_threads(kept[4])


UNHEARD = HealthSpec(hangs=False)
RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}


@pytest.mark.parametrize(
    ("run", "kind", "environ", "added"),
    [
        (RunSpec(), "cuda", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **RECORDER}),
        (RunSpec(health=UNHEARD), "cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {}),
        (RunSpec(health=UNHEARD), "cuda", {"PYTORCH_ALLOC_CONF": ""}, {}),
        (RunSpec(expandable_segments=False), "cuda", {}, RECORDER),
        (RunSpec(expandable_segments=False), "cuda", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {}),
        (RunSpec(expandable_segments=False, deterministic=True), "cuda", RECORDER,
         {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        (RunSpec(expandable_segments=False, deterministic=True, health=UNHEARD), "cuda",
         {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {}),
        (RunSpec(deterministic=True), "cpu", {}, {}),
    ],
)  # fmt: skip
def test_the_environment_of_a_process(run: RunSpec, kind: str, environ: dict[str, str], added: dict[str, str]) -> None:
    assert environment_for(run, kind, environ) == added


def test_errors_of_nccl_are_left_to_a_supervisor_that_hears_of_hangs() -> None:
    """What torch does of an error would end a survivor, or keep it from the next world for as long as a dump takes."""
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    run = RunSpec(expandable_segments=False)
    assert environment_for(run, "cuda", {}, supervised=True) == {**RECORDER, **own}
    chosen = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    assert environment_for(run, "cuda", {**RECORDER, **chosen}, supervised=True) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    unheard = RunSpec(expandable_segments=False, health=UNHEARD)
    assert environment_for(unheard, "cuda", {}, supervised=True) == {}, "then torch's own time-outs are all there is"
    assert environment_for(run, "cpu", {}, supervised=True) == {}


def test_what_is_not_asked_for_is_not_touched(switches_kept: None) -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    assert prepare_process(RunSpec(), "cpu", {}) == []
    assert torch.get_float32_matmul_precision() == "medium" and torch.backends.cudnn.benchmark


def test_switches_are_set_and_told_with_their_price(switches_kept: None) -> None:
    environ: dict[str, str] = {}
    run = RunSpec(tf32=True, cudnn_benchmark=True, deterministic=True, bind="off")
    told = {one.what: one for one in prepare_process(run, "cuda", environ)}
    assert list(told) == ["allocator", "run.tf32", "run.cudnn_benchmark", "run.deterministic"]
    assert all(one.because for one in told.values()) and "TF32 rate" in told["run.tf32"].because
    assert "what it costs: not measured on cuda" in told["run.deterministic"].because
    chosen = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert environ == {**chosen, **RECORDER}
    assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.benchmark and torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)


@dataclass
class Device:
    """What torch tells of a GPU."""

    pci_domain_id: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, switches_kept: None) -> dict[str, object]:
    """A machine of two nodes with four cores and two GPUs each; `bound` is what the process was bound to."""
    state: dict[str, object] = {"bound": None, "allowed": set(range(8))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: state["allowed"])
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(prepare, "bind_process", lambda cores: state.update(bound=list(cores)))
    monkeypatch.setattr(prepare, "memory_nodes", lambda: [[0, 1, 2, 3], [4, 5, 6, 7]])
    monkeypatch.setattr(prepare, "node_of_device", lambda address: {"0000:3b:00.0": 1}.get(address, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: Device(pci_bus_id=0x3B if number == 0 else 0x5E)
    )
    return state


def test_a_rank_is_bound_near_its_gpu(machine: dict[str, object]) -> None:
    (told,) = bind_rank(RunSpec(), 0, 3)
    assert machine["bound"] == [4, 5, 6, 7] and torch.get_num_threads() == 4
    assert (told.what, told.before, told.after) == ("cores", "8 cores", "4-7")
    bind_rank(RunSpec(), 2, 3)
    assert machine["bound"] == [2, 3], "two ranks share the other node"


@pytest.mark.parametrize(
    ("bind", "ranks", "allowed", "is_bound"),
    [
        ("auto", 2, 8, True),
        ("auto", 2, 4, False),  # srun has given this task its cores
        ("on", 2, 4, True),
        ("off", 2, 8, False),
        ("auto", 1, 8, False),
    ],
)
def test_when_ranks_are_bound(machine: dict[str, object], bind: str, ranks: int, allowed: int, is_bound: bool) -> None:
    machine["allowed"] = set(range(allowed))
    told = bind_rank(RunSpec(bind=bind), 0, ranks)
    assert (machine["bound"] is not None) == bool(told) == is_bound


def test_one_visible_device_each_tells_nothing_of_the_others(
    machine: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    bind_rank(RunSpec(), 1, 2)
    assert machine["bound"] == [4, 5, 6, 7], "spread over the nodes in order"
