"""The catalog: published figures of accelerators, and what is assumed of a machine that was not probed.

`catalog.toml` holds what manufacturers print. This file turns an entry into a Device and its links, and keeps every
assumption that has no published figure in one visible place, each with its reason.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from importlib import resources

from paceline.cluster.cluster import Device, Figure, Link
from paceline.errors import ConfigError, suggestion

UNKNOWN = Figure(math.nan, "unknown")

# Latency of one hop of a ring collective: nccl-tests of the vTrain release, 8 A100 in a node, 1 MiB all-reduce in about
# 60 µs over 14 hops; networks add a switch and two adapters.
NODE_LATENCY_SECONDS = Figure(4e-6, "assumed", "per ring hop inside a node; nccl-tests on 8 x A100: 60 µs over 14 hops")
NETWORK_LATENCY_SECONDS = Figure(15e-6, "assumed", "per ring hop across nodes")
NETWORK_BYTES_PER_SECOND = 12.5e9  # per node: a 100 Gb/s adapter, where no standard system exists
CUDA_LAUNCH_SECONDS = Figure(7e-6, "assumed", "floor per kernel launch used by PyTorch's AutoParallel cost model")
CUDA_RUNTIME_BYTES = Figure(1.5e9, "assumed", "CUDA context, cuBLAS workspace and NCCL channels")

# CPU devices that nobody has probed: a current server core with AVX2 or AVX-512, fp32; the catalog cannot know more.
CPU_FP32_FLOPS_PER_CORE = 40e9
CPU_BF16_FLOPS_PER_CORE = 40e9  # no faster than fp32 unless the core has AMX or AVX-512 bf16, which a probe shows
CPU_FP64_FLOPS_PER_CORE = 20e9
CPU_MEMORY_BYTES_PER_SECOND_PER_CORE = 5e9
CPU_LAUNCH_SECONDS = Figure(4e-6, "assumed", "typical cost of one eager operator; `paceline probe` measures it")
CPU_RUNTIME_BYTES = Figure(350e6, "assumed", "a process that imported torch; `paceline probe` measures it")
CPU_LINK = Link(
    "process",
    Figure(60e-6, "assumed", "gloo between processes of one host; `paceline probe` measures it"),
    Figure(1.5e9, "assumed", "gloo between processes of one host; `paceline probe` measures it"),
)
CPU_WATTS_PER_CORE = 10.0
# Node power under load over the devices' TDP: MLPerf Training 4.0 power logs, 8 x H100: 6.8 to 7.9 kW a node (1.21 to
# 1.41), 8 x B200: 9.6 kW (1.2). It includes the host, its memory, adapters and fans.
NODE_POWER_OVER_TDP = 1.25


# The part of a published peak that wide dense products sustain. A100 with FSDP, 125M to 3B parameters, reaches 46 to
# 60 % over whole steps (LLM Foundry's MPT table), which takes 78 % in the products. Entries may state another share.
SUSTAINED_SHARE = 0.78


@dataclass(frozen=True)
class Entry:
    """One accelerator of the catalog, in SI units; None where the manufacturer prints nothing."""

    name: str
    title: str
    match: tuple[str, ...]  # names a driver reports
    memory_bytes: float
    memory_bytes_per_second: float
    peak_flops: dict[str, float]
    watts: float
    devices_per_node: int
    node_bytes_per_second: float
    node_fabric: str
    source: str
    network_bytes_per_second: float | None = None
    network_note: str = ""
    price_usd_per_hour: float | None = None
    price_note: str = ""
    sustained_share: float = SUSTAINED_SHARE


def read_catalog() -> dict[str, Entry]:
    """Return the catalog's entries by name."""
    text = resources.files("paceline.cluster").joinpath("catalog.toml").read_text("utf-8")
    return {
        name: Entry(name=name, **{**row, "match": tuple(row["match"])}) for name, row in tomllib.loads(text).items()
    }


def find_entry(name: str) -> Entry:
    """Return the entry of a catalog name. Raises ConfigError with the nearest known name."""
    catalog = read_catalog()
    if name not in catalog:
        family = [known for known in catalog if known.startswith(name.lower())]
        raise ConfigError(
            f"cluster.device = '{name}' is not in the catalog",
            "a device is 'auto', 'cpu', 'cuda' or a name of the catalog",
            " or ".join(family) or suggestion(name, ["auto", "cpu", "cuda", *catalog]),
        )
    return catalog[name]


def match_driver_name(reported: str) -> Entry | None:
    """Return the entry whose driver name equals `reported`, or None: a near match would be a guess."""
    return next((entry for entry in read_catalog().values() if reported in entry.match), None)


def published_device(entry: Entry) -> Device:
    """Return the Device of a catalog entry, every figure published or assumed."""
    return Device(
        name=entry.title,
        kind="cuda",
        memory_bytes=Figure(entry.memory_bytes, "published", entry.source),
        memory_bytes_per_second=Figure(entry.memory_bytes_per_second, "published", entry.source),
        matmul_flops={precision: ((0, rate),) for precision, rate in entry.peak_flops.items()},
        matmul_source="published",
        peak_flops=dict(entry.peak_flops),
        launch_seconds=CUDA_LAUNCH_SECONDS,
        runtime_bytes=CUDA_RUNTIME_BYTES,
        sustained_share=entry.sustained_share,
    )


def published_links(entry: Entry) -> tuple[Link, Link]:
    """Return the links inside a node and between nodes, nearest first."""
    if entry.network_bytes_per_second is not None:
        network = Figure(entry.network_bytes_per_second, "published", entry.network_note)
    else:
        network = Figure(
            NETWORK_BYTES_PER_SECOND / entry.devices_per_node, "assumed", "a 100 Gb/s adapter shared by the node"
        )
    inside = Link("node", NODE_LATENCY_SECONDS, Figure(entry.node_bytes_per_second, "published", entry.node_fabric))
    return inside, Link("network", NETWORK_LATENCY_SECONDS, network)


def published_watts(entry: Entry) -> Figure:
    """Return the power under load per device, with its share of the node."""
    return Figure(
        entry.watts * NODE_POWER_OVER_TDP,
        "assumed",
        f"{entry.watts:g} W TDP (published) x {NODE_POWER_OVER_TDP} for the node, from MLPerf power logs",
    )


def published_price(entry: Entry) -> Figure:
    """Return the list price per device and hour, or unknown."""
    if entry.price_usd_per_hour is None:
        return Figure(math.nan, "unknown", "no list price in the catalog: set cluster.price_usd_per_device_hour")
    return Figure(entry.price_usd_per_hour, "published", entry.price_note)


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


def assumed_cpu(name: str, threads: int, memory_bytes: Figure) -> Device:
    """Return the Device of `threads` cores nobody has probed; its rates are assumed."""
    note = f"{threads} threads; not probed: `paceline probe` measures it"
    return Device(
        name=name,
        kind="cpu",
        memory_bytes=memory_bytes,
        memory_bytes_per_second=Figure(threads * CPU_MEMORY_BYTES_PER_SECOND_PER_CORE, "assumed", note),
        matmul_flops={
            "fp32": ((0, threads * CPU_FP32_FLOPS_PER_CORE),),
            "bf16": ((0, threads * CPU_BF16_FLOPS_PER_CORE),),
            "fp64": ((0, threads * CPU_FP64_FLOPS_PER_CORE),),
        },
        matmul_source="assumed",
        peak_flops={},
        launch_seconds=CPU_LAUNCH_SECONDS,
        runtime_bytes=CPU_RUNTIME_BYTES,
        threads=threads,
    )
