"""Cluster: what the task runs on. Every figure carries its source: measured, published or assumed."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.cluster.reliability import ReliabilitySpec
from paceline.config.fields import option

SOURCES = ("measured", "published", "assumed", "unknown")


@dataclass(frozen=True)
class ClusterSpec:
    """The `[cluster]` table of a spec: which machines, how many, and at what price."""

    device: str = option("auto", "'auto' (this machine), 'cpu', 'cuda', or a catalog name such as 'h100-sxm'")
    devices: int = option(0, "number of devices (processes); 0 means every GPU, or one CPU device", minimum=0)
    devices_per_node: int = option(0, "devices that share a node; 0 means all, up to the catalog's node", minimum=0)
    price_usd_per_device_hour: float | None = option(None, "overrides the catalog's price", minimum=0.0)
    watts_per_device: float | None = option(None, "overrides the catalog's power under load", minimum=0.0)
    carbon_g_per_kwh: float | None = option(
        None, "carbon intensity of the electricity; unset means unknown", minimum=0.0
    )
    memory_per_device: int = option(0, "overrides the memory of a device (0 keeps it)", quantity="bytes", minimum=0)
    probe: bool = option(True, "let `train` measure this machine once, before it plans on it for the first time")
    reliability: ReliabilitySpec = option(
        factory=ReliabilitySpec, doc="how often machines fail, and what an interruption takes"
    )


@dataclass(frozen=True)
class Figure:
    """One number about a machine: its value in the unit its name says, and where it comes from."""

    value: float
    source: str
    note: str = ""


@dataclass(frozen=True)
class Link:
    """One level of the link hierarchy between devices, for collectives that stay within it."""

    level: str  # "process" (ranks of one host without a fabric), "node" or "network"
    latency_seconds: Figure
    bytes_per_second: Figure  # one direction, per device
    # Measured rates per collective (all_reduce, all_gather, reduce_scatter), as moved by a ring; empty: not measured.
    collective_bytes_per_second: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CalibrationStep:
    """One timed training step of a small decoder block, with the counts that a forecast of it needs.

    Counts are for the whole step's forward pass; the forecaster compares its own sum with `seconds`.
    """

    precision: str
    width: int
    sequence: int
    seconds: float
    relative_spread: float  # (90th - 10th percentile) / median of the repeats
    parameters: int
    matmul_flops: float
    attention_flops: float
    moved_elements: float
    operators: int


@dataclass(frozen=True)
class Device:
    """A device as the forecaster sees it.

    `matmul_flops` maps a precision to measured points `((width, FLOP/s), ...)` of square products in rising width,
    forward and backward, or one point `((0, FLOP/s),)` with the published dense peak.
    """

    name: str
    kind: str  # "cpu" or "cuda"
    memory_bytes: Figure
    memory_bytes_per_second: Figure
    matmul_flops: dict[str, tuple[tuple[int, float], ...]]
    matmul_source: str
    peak_flops: dict[str, float]  # published dense peak per precision, for MFU; empty means unknown
    launch_seconds: Figure  # host time to start one operator
    runtime_bytes: Figure  # what a process holds before any tensor of ours
    # Measured points `((sequence, FLOP/s), ...)` of causal attention, forward and backward; empty: not measured.
    attention_flops: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    sustained_share: float = 1.0  # part of a published peak that wide products sustain
    threads: int = 0  # threads of a CPU device; 0 for accelerators
    optimizer_bytes_per_second: Figure | None = None  # rate of the fused update; None: the memory's
    calibration: tuple[CalibrationStep, ...] = ()  # measured training steps; empty: not probed


@dataclass(frozen=True)
class Cluster:
    """Devices, the links between them, prices and power."""

    device: Device
    devices: int
    devices_per_node: int
    links: tuple[Link, ...]  # nearest first
    price_usd_per_device_hour: Figure
    watts_per_device: Figure
    carbon_g_per_kwh: Figure
    date: str = ""  # when a probe measured it, ISO 8601
    host: str = ""

    def link(self, group_size: int) -> Link:
        """Return the slowest link that a collective over `group_size` consecutive devices crosses."""
        return self.links[0] if group_size <= self.devices_per_node or len(self.links) == 1 else self.links[-1]
