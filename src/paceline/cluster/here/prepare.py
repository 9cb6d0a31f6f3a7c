"""How a rank's process uses its machine, as the run asks: kernels, the allocator of CUDA, cores. Before CUDA starts.

What is changed is told, with its price, for the journal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from paceline.cluster.here.cores import bind_process, is_bound, memory_nodes, node_of_device, split_cores
from paceline.cluster.here.determinism import deterministic_price
from paceline.cluster.here.waiting import SPIN_TURNS, SPIN_VARIABLE, waiting
from paceline.errors import ConfigError
from paceline.spec.run import RunSpec

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"  # one of the two that NVIDIA documents as deterministic, and 24 MiB

RECORDER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name
RECORDER_ENTRIES = "2000"  # collectives in the flight recorder's ring: torch's own default since 2.13

# For an error of NCCL's torch ends the process, and waits for dumps before. A survivor whose supervisor gives the word
# is to meet the others again: with torch's ways it stood for 15 s and was ended (torch 2.11 on an H200, 2026-11-27).
LEFT_TO_SUPERVISOR = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}

TF32_PRICE = (
    "fp32 products of CUDA run at the TF32 rate of the catalog, 2 to 16 times that of fp32; of a factor's 23 bits 10 "
    "are read, so that fp32 proofs, which are made on a CPU, do not hold for them"
)
BENCHMARK_PRICE = (
    "cuDNN tries its convolutions for every new shape and keeps the fastest, which may be another one, with sums in "
    "another order, at the next start"
)
DETERMINISTIC_GAIN = (
    "the same step gives the same bits on the same devices; scatters and index sums are slower, some operators have no "
    "such kernel and end in an error, and cuBLAS keeps 24 MiB"
)
EXPANDABLE_PRICE = (
    "CUDA's allocator grows segments in place of leaving holes between them, so that freed pieces are "
    "used again; memory cannot be handed to other processes"
)


WAITING_GAIN = (
    "threads that wait for each other give their cores away soon: beside another program that computes, a step takes "
    "many times as long where they hold them, and on idle cores as long"
)


@dataclass(frozen=True)
class Switched:
    """Something that was set in this process; the fields are those of a decision in the journal."""

    what: str
    before: object
    after: object
    because: str


def environment_for(run: RunSpec, kind: str, environ: Mapping[str, str], supervised: bool = False) -> dict[str, str]:
    """Return what a process on devices of this kind needs in its environment and does not have; nothing on a CPU.

    What the user has set stays. A `supervised` process is told of lost peers, and watched for hangs where the run asks.
    """
    if kind != "cuda":
        return {}
    found = {}
    if run.expandable_segments and not any(name in environ for name in ALLOCATOR_VARIABLES):
        found[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    if run.deterministic and WORKSPACE_VARIABLE not in environ:
        found[WORKSPACE_VARIABLE] = WORKSPACE
    if run.health.hangs and not any(name in environ for name in RECORDER_VARIABLES):
        found[RECORDER_VARIABLES[0]] = RECORDER_ENTRIES
    if run.health.hangs and supervised:
        found |= {name: value for name, value in LEFT_TO_SUPERVISOR.items() if name not in environ}
    return found


def device_index(local_rank: int, visible: int) -> int:
    """Return which of the devices that a process sees it computes on, of `visible` many.

    Slurm and Kubernetes may show every task a device of its own, which is then number 0 whatever the local rank.
    Raises ConfigError where several are visible and there are more ranks than devices.
    """
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    raise ConfigError(
        f"local rank {local_rank} has no device",
        f"{visible} are visible on this node (CUDA_VISIBLE_DEVICES counts), and every rank needs one of its own",
        f"at most {visible} ranks a node, or one visible device for each task",
    )


def prepare_process(
    run: RunSpec, kind: str, environ: MutableMapping[str, str] = os.environ, supervised: bool = False
) -> list[Switched]:
    """Set what a run asks of this process before CUDA starts, and return what was changed."""
    added = environment_for(run, kind, environ, supervised)
    environ.update(added)
    found = [
        Switched("allocator", None, added[name], EXPANDABLE_PRICE) for name in ALLOCATOR_VARIABLES if name in added
    ]
    return [*found, *_set_kernels(run, kind)]


def told_waiting(threads: int, environ: Mapping[str, str] = os.environ) -> list[Switched]:
    """Return how the compute threads of this process wait for each other, unless the user has chosen that.

    Who starts a process chooses. A script that has loaded torch before its run begins can only be told.
    """
    if threads == 1:
        return []
    if waiting(environ):
        because = (
            f"{WAITING_GAIN}. Too late where torch is loaded already: start python with {SPIN_VARIABLE}={SPIN_TURNS}"
        )
        return [Switched(SPIN_VARIABLE, None, None, because)]
    if environ.get(SPIN_VARIABLE) != str(SPIN_TURNS):
        return []
    return [Switched(SPIN_VARIABLE, None, environ[SPIN_VARIABLE], WAITING_GAIN)]


def _set_kernels(run: RunSpec, kind: str) -> list[Switched]:
    """Choose the kernels of this process. They are torch's own switches, and change nothing on a CPU but determinism.

    What the run leaves off stays as the user's program has set it.
    """
    if not (run.tf32 or run.cudnn_benchmark or run.deterministic):
        return []
    import torch

    found = []
    if run.tf32:
        found.append(Switched("run.tf32", torch.get_float32_matmul_precision(), "high", TF32_PRICE))
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if run.cudnn_benchmark:
        found.append(Switched("run.cudnn_benchmark", torch.backends.cudnn.benchmark, True, BENCHMARK_PRICE))
        torch.backends.cudnn.benchmark = True
    if run.deterministic:
        before = torch.are_deterministic_algorithms_enabled()
        because = f"{DETERMINISTIC_GAIN}; what it costs: {deterministic_price(kind)}"
        found.append(Switched("run.deterministic", before, True, because))
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = run.cudnn_benchmark
    return found


def bind_rank(run: RunSpec, local_rank: int, ranks_here: int) -> list[Switched]:
    """Give a rank on a GPU its part of the cores, unless it is alone or has been given some, and return what changed.

    `ranks_here` are on this machine. The rank's device is set already: CUDA may start here.
    """
    if run.bind == "off" or not hasattr(os, "sched_getaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    if run.bind == "auto" and (ranks_here < 2 or is_bound(allowed, os.cpu_count() or 1)):
        return []
    import torch

    cores = split_cores(allowed, memory_nodes(), _nodes_of_devices(ranks_here), local_rank)
    bind_process(cores)
    torch.set_num_threads(len(cores))
    because = f"{ranks_here} ranks share this machine, and each computes beside its device; run.bind = off leaves it"
    return [Switched("cores", f"{len(allowed)} cores", _shown(cores), because)]


def _nodes_of_devices(ranks_here: int) -> list[int | None]:
    """Return the memory node of each local rank's device, where every rank sees all devices and torch knows them."""
    import torch

    if torch.cuda.device_count() < ranks_here:
        return [None] * ranks_here
    return [node_of_device(_address(torch.cuda.get_device_properties(number))) for number in range(ranks_here)]


def _address(properties: object) -> str:
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if not all(isinstance(number, int) for number in numbers):
        return ""
    domain, bus, device = numbers
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _shown(cores: Sequence[int]) -> str:
    """Return cores as the kernel lists them: "0-3,8"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)
