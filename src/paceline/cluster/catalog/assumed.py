"""What is assumed of machines that were not probed and of figures that nobody prints, each with its reason."""

from __future__ import annotations

import dataclasses
import math

from paceline.spec.cluster import Device, Figure, Link

UNKNOWN = Figure(math.nan, "unknown")
NO_PRICE = Figure(math.nan, "unknown", "set cluster.price_usd_per_device_hour")

# Latency of one hop of a ring collective: nccl-tests of the vTrain release, 8 A100 in a node, 1 MiB all-reduce in about
# 60 µs over 14 hops; networks add a switch and two adapters.
NODE_LATENCY_SECONDS = Figure(4e-6, "assumed", "per ring hop inside a node; nccl-tests on 8 x A100: 60 µs over 14 hops")
NETWORK_LATENCY_SECONDS = Figure(15e-6, "assumed", "per ring hop across nodes")
NETWORK_BYTES_PER_SECOND = 12.5e9  # per host: a 100 Gb/s adapter, where no standard system exists
CUDA_LAUNCH_SECONDS = Figure(7e-6, "assumed", "floor per kernel launch used by PyTorch's AutoParallel cost model")
CUDA_RUNTIME_BYTES = Figure(1.5e9, "assumed", "CUDA context, cuBLAS workspace and NCCL channels")

# CPU devices that nobody has probed: a core with AVX2 or AVX-512, which reaches 55 to 155 GFLOP/s; the catalog cannot
# know more. With these figures the intervals of what is assumed hold 79 to 93 % of the rows of eight grids that were
# measured on AMD and Intel server processors from 2026-11-25 on, where those of before held 26 to 48 %
# (2026-11-29). Of others, laptops among them, nothing was measured.
CPU_FP32_FLOPS_PER_CORE = 80e9
CPU_BF16_FLOPS_PER_CORE = 80e9  # no faster than fp32 unless the core has AMX or AVX-512 bf16, which a probe shows
CPU_FP64_FLOPS_PER_CORE = 40e9
CPU_MEMORY_BYTES_PER_SECOND_PER_CORE = 12e9
CPU_LAUNCH_SECONDS = Figure(10e-6, "assumed", "of an operator in a training step; `paceline probe` measures it")
CPU_RUNTIME_BYTES = Figure(260e6, "assumed", "a process that imported torch; `paceline probe` measures it")
CPU_LINK = Link(
    "process",
    Figure(1e-3, "assumed", "gloo between processes that compute; `paceline probe` measures it"),
    Figure(0.8e9, "assumed", "gloo between processes of one host; `paceline probe` measures it"),
)
CPU_WATTS_PER_CORE = 10.0


def unknown_gpu(reported: str) -> Device:
    """Return the Device of a GPU that the catalog does not hold: everything that is not known is unknown."""
    return Device(
        name=reported,
        kind="cuda",
        memory_bytes=UNKNOWN,
        memory_bytes_per_second=UNKNOWN,
        matmul_flops={},
        matmul_source="unknown",
        peak_flops={},
        launch_seconds=CUDA_LAUNCH_SECONDS,
        runtime_bytes=CUDA_RUNTIME_BYTES,
    )


def assumed_cpu(name: str, threads: int, memory_bytes: Figure, core_share: float = 1.0) -> Device:
    """Return the Device of so many threads that nobody has probed; its rates are assumed.

    `core_share` is the part of a core that each has while all devices compute: rates are those of what it has.
    """
    cores, launch = threads * core_share, CPU_LAUNCH_SECONDS
    shared = "" if core_share == 1 else f" on {cores:.3g} core{'' if cores == 1 else 's'}"
    note = f"{threads} threads{shared}; not probed: `paceline probe` measures it"
    return Device(
        name=name,
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_second=Figure(cores * CPU_MEMORY_BYTES_PER_SECOND_PER_CORE, "assumed", note),
        matmul_flops={
            "fp32": ((0, cores * CPU_FP32_FLOPS_PER_CORE),),
            "bf16": ((0, cores * CPU_BF16_FLOPS_PER_CORE),),
            "fp64": ((0, cores * CPU_FP64_FLOPS_PER_CORE),),
        },
        matmul_source="assumed",
        peak_flops={},
        launch_seconds=dataclasses.replace(launch, value=launch.value / core_share),
        runtime_bytes=CPU_RUNTIME_BYTES,
        threads=threads,
        core_share=core_share,
    )
