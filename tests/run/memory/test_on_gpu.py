"""A GPU's peak is what the device must hold for a process: its tensors, and what the process holds beside them."""

from __future__ import annotations

import os

import pytest
import torch
from devices import on_every_device
from fake_cuda import GIB, UUID, FakeCuda
from fake_nvml import FakeGpu, FakeNvml, NVMLError
from tests_shared import decoder_task, plan_of, run_steps

from paceline.cluster.catalog.assumed import CUDA_RUNTIME_BYTES
from paceline.run.memory.free_memory import free_bytes
from paceline.run.memory.on_gpu import MOST_BESIDE
from paceline.run.memory.spent import MemoryMeter, spent_on
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout

ASSUMED = int(CUDA_RUNTIME_BYTES.value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda().installed(monkeypatch)


def _meter(cuda: FakeCuda, processes: dict[int, int | None] | None = None, **gpu: object) -> MemoryMeter:
    """Return a meter; without `processes` no library of the driver's is there."""
    if processes is None:
        nvml = FakeNvml({})
        nvml.driver = False
    else:
        nvml = FakeNvml({f"GPU-{UUID}": FakeGpu(processes=processes, **gpu)})  # type: ignore[arg-type]
    return MemoryMeter(cuda.device, nvml)


def test_the_peak_counts_what_no_tensor_is(cuda: FakeCuda) -> None:
    meter = _meter(cuda)
    cuda.now = 2 * GIB
    cuda.take(3 * GIB)
    assert meter.peak_bytes() == 5 * GIB + cuda.beside
    assert meter.now_bytes() == 2 * GIB + cuda.beside
    free, _ = free_bytes(cuda.device)
    assert meter.now_bytes() + free == cuda.total, "what is used and what is left make up the device"


def test_workspaces_that_come_later_are_seen_and_the_driver_is_seldom_asked(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [100.0]
    monkeypatch.setattr("paceline.run.memory.on_gpu.time.monotonic", lambda: passed[0])
    meter = _meter(cuda)
    before = meter.peak_bytes()
    for _ in range(1000):
        meter.peak_bytes()
    assert cuda.asked == 1
    cuda.beside += GIB
    passed[0] += 2.0
    assert meter.peak_bytes() == before + GIB
    cuda.beside -= GIB
    passed[0] += 2.0
    assert meter.peak_bytes() == before + GIB, "a peak that was there stays"


def test_a_peak_begun_anew_is_of_what_comes(cuda: FakeCuda) -> None:
    meter = _meter(cuda)
    cuda.now = GIB
    cuda.take(9 * GIB)
    first = meter.peak_bytes()
    meter.begin_anew()
    cuda.beside = GIB  # a group of ranks was left
    cuda.take(2 * GIB)
    assert meter.recent_bytes() == 3 * GIB + GIB
    assert meter.peak_bytes() == first


def test_a_neighbour_on_the_device_is_not_counted(cuda: FakeCuda) -> None:
    """Two ranks share a GPU: what is beside one's allocator holds all of the other."""
    cuda.take(GIB)
    cuda.others = 2 * GIB
    own = cuda.reserved + cuda.beside
    assert _meter(cuda, {os.getpid(): own, 77: cuda.others}).peak_bytes() == GIB + cuda.beside
    assert _meter(cuda, {os.getpid(): own}).peak_bytes() == GIB + cuda.beside + cuda.others, "which nobody tells apart"


@pytest.mark.parametrize("processes", [None, {}, {77: 130 * GIB}, {"own": None}])
def test_where_nobody_tells_whose_it_is_the_last_known_counts(
    cuda: FakeCuda, processes: dict[object, int | None] | None
) -> None:
    listed = None if processes is None else {os.getpid() if p == "own" else p: u for p, u in processes.items()}
    cuda.others = 130 * GIB
    late = _meter(cuda, listed)  # type: ignore[arg-type]
    assert late.peak_bytes() == ASSUMED
    cuda.others = 0
    early = _meter(cuda, listed)  # type: ignore[arg-type]
    assert early.peak_bytes() == cuda.beside
    cuda.others = 130 * GIB
    assert early.now_bytes() == cuda.beside != ASSUMED


def test_a_large_process_of_its_own_is_known_by_the_drivers_list(cuda: FakeCuda) -> None:
    cuda.beside = MOST_BESIDE + GIB
    assert _meter(cuda, {os.getpid(): cuda.beside}).peak_bytes() == cuda.beside


def test_a_list_that_is_refused_is_asked_for_once(cuda: FakeCuda) -> None:
    refuses = {"nvmlDeviceGetComputeRunningProcesses": NVMLError(3, "Not Supported")}
    meter = _meter(cuda, {os.getpid(): 5 * GIB}, refuses=refuses)
    assert meter.peak_bytes() == cuda.beside
    refuses.clear()
    cuda.beside += 10
    assert meter.now_bytes() == cuda.beside


@on_every_device
def test_what_memory_is_spent_on_adds_up_to_the_peak(device: str) -> None:
    world = join_world(device)
    meter = MemoryMeter(world.device)
    _, built = run_steps(decoder_task(), plan_of(Layout()), 2, world)
    spent, peak = spent_on(built.model, built.optimizer, meter, world.maximum)
    assert sum(spent.values()) == pytest.approx(peak) and min(spent.values()) >= 0
    assert ("runtime" in spent) == (device == "cuda")
    if device == "cuda":
        assert peak >= torch.cuda.max_memory_allocated() + spent["runtime"] and spent["runtime"] > 100 << 20
        free, _ = free_bytes(world.device)
        assert meter.now_bytes() + free <= torch.cuda.mem_get_info()[1] + (1 << 20)


def test_the_fullest_ranks_runtime_stands_by_itself(cuda: FakeCuda) -> None:
    """The CPU's twin of a GPU's record: a model on the CPU, metered as if on a device."""
    _, built = run_steps(decoder_task(), plan_of(Layout()), 2, join_world("cpu"))
    cuda.now = 100 << 20
    cuda.take(GIB)
    spent, peak = spent_on(built.model, built.optimizer, _meter(cuda), lambda values: values)
    assert list(spent) == ["weights", "gradients", "optimizer", "activations_and_buffers", "runtime"]
    assert spent["runtime"] == cuda.beside and sum(spent.values()) == peak == (100 << 20) + GIB + cuda.beside
