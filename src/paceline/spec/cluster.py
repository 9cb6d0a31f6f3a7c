"""Cluster: what the task runs on. Every figure carries its source: measured, published or assumed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.spec.survive.reliability import ReliabilitySpec

SOURCES = ("measured", "published", "assumed", "unknown")
# That a fused AdamW update in fp32 moves for each parameter: it reads w, g, m and v, and writes w, m and v.
FUSED_ADAMW_BYTES = 7 * 4
HERE = ("auto", "cpu", "cuda")  # devices of this machine
# What speaks of one kind of device, and holds for the one that it was stated beside alone.
OF_ONE_DEVICE = ("devices_per_node", "node", "figures", "price_usd_per_device_hour", "watts_per_device",
                 "memory_per_device")  # fmt: skip


@dataclass(frozen=True)
class ClusterSpec(Declared, table="cluster"):
    """The `[cluster]` table of a spec: which machines, how many, and at what price."""

    device: str = option("auto", "'auto' (this machine), 'cpu', 'cuda', or a catalog name such as 'h100-sxm'")
    devices: int = option(0, "number of devices (processes); 0 means every GPU, or one CPU device", minimum=0)
    devices_per_node: int = option(0, "devices that share a node; 0 means all, up to the catalog's node", minimum=0)
    node: str = option("", "a node type of the catalog, such as 'p5' (empty: the accelerator's standard system)")
    nodes_per_rack: int = option(0, "nodes that share a rack; 0 means unknown: racks are not told apart", minimum=0)
    catalog: str = option("", "a file that adds accelerators, node types and prices to the catalog")
    figures: dict[str, Any] = option(
        factory=dict, doc="single figures that replace the catalog's, such as { network_bytes_per_second = 25e9 }"
    )
    groups: dict[str, Any] = option(
        factory=dict, doc="groups of different devices: tables with `device`, `devices` and other options of this one"
    )
    price_class: str = option(
        "cheapest",
        "whose list price counts: that of hyperscalers, of specialised clouds, or the lowest",
        choices=("cheapest", "hyperscaler", "specialised"),
    )
    spot: bool = option(False, "take prices of devices that may be taken away")
    price_usd_per_device_hour: float | None = option(None, "overrides the catalog's price", minimum=0.0)
    watts_per_device: float | None = option(
        None, "overrides the power of a device and its share of the node, whether busy or waiting", minimum=0.0
    )
    pue: float | None = option(
        None, "power usage effectiveness of the building; unset counts what the nodes draw alone", minimum=1.0
    )
    region: str = option("", "where the electricity is from: an ISO 3166 code such as 'SE' (empty: unknown)")
    carbon_g_per_kwh: float | None = option(
        None, "carbon intensity of the electricity; overrides the region's average", minimum=0.0
    )
    memory_per_device: int = option(0, "overrides the memory of a device (0 keeps it)", quantity="bytes", minimum=0)
    probe: bool = option(True, "let `train` measure this machine once, before it plans on it for the first time")
    learn: bool = option(True, "let finished runs on this machine correct forecasts; false makes plans repeatable")
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
class GroupRates:
    """Measured collectives of groups of so many consecutive ranks, while all such groups did the same."""

    size: int
    hop_seconds: float
    collective_bytes_per_second: dict[str, float]  # as moved by a ring


@dataclass(frozen=True)
class Link:
    """One level of the link hierarchy between devices, for collectives that stay within it."""

    level: str  # "process" (ranks of one host without a fabric), "node" or "network"
    latency_seconds: Figure
    bytes_per_second: Figure  # one direction, per device
    # Measured rates per collective (all_reduce, all_gather, reduce_scatter), as moved by a ring; empty: not measured.
    collective_bytes_per_second: dict[str, float] = field(default_factory=dict)
    groups: tuple[GroupRates, ...] = ()  # of smaller groups than all ranks, by rising size; empty: not measured
    # Measured on CPUs, whose communication shares the cores with computing, beyond the seconds of collectives:
    unit_seconds: float = 0.0  # that a sharded unit adds to a micro-batch which reduces its gradients
    least_unit_seconds: float = 0.0  # the same of a unit that computes next to nothing
    kept_unit_seconds: float = 0.0  # that it adds to a micro-batch which keeps its gradients
    move_seconds: float = 0.0  # that a collective between layers adds
    work_seconds: float = 0.0  # of computing between two collectives, when both were measured


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
    head_width: int = 0  # of its attention; 0: not on record
    relative_drift: float = 0.0  # by how much the slower of two passes of the probe took longer


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
    matmul_source: str  # "published": rates are parts of published peaks, those of `assumed_rates` aside
    peak_flops: dict[str, float]  # published dense peak per precision, for MFU; empty means unknown
    launch_seconds: Figure  # host time to start one operator
    runtime_bytes: Figure  # what a process holds before any tensor of ours
    # Measured points `((sequence, FLOP/s), ...)` of causal attention, forward and backward; empty: not measured.
    attention_flops: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    # The same of narrower heads, and how wide the heads of both were; empty: one width stands for all.
    attention_narrow_flops: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    head_widths: tuple[int, ...] = ()
    sustained_share: float | None = None  # part of a published peak that wide products sustain; None: as fitted
    best_product: float | None = None  # part of it that the device's best product reached; None: not known
    rated_watts: float | None = None  # that a published device may draw; None: not known
    threads: int = 0  # threads of a CPU device; 0 for accelerators
    core_share: float = 1.0  # part of a core that a thread has while all devices compute, where they take turns
    optimizer_bytes_per_second: Figure | None = None  # rate of the fused update; None: the memory's
    picked_bytes_per_second: Figure | None = None  # of rows picked by index, there and back; None: as what is moved
    calibration: tuple[CalibrationStep, ...] = ()  # measured training steps; empty: not probed
    measured_peaks: bool = False  # products' rates are a probe's best bursts: training sustains a share of them
    # Of a published device, what no document was read for: "peak_flops.bf16" and the like, "sustained_share".
    assumed_rates: tuple[str, ...] = ()

    def rate_source(self, precision: str) -> str:
        """Return how the rate of products in a precision is known; "unknown" where there is none."""
        if precision not in self.matmul_flops:
            return "unknown"
        guessed = self.matmul_source == "published" and {f"peak_flops.{precision}", "sustained_share"} & {
            *self.assumed_rates
        }
        return "assumed" if guessed else self.matmul_source


@dataclass(frozen=True)
class Cluster:
    """Devices, the links between them, prices and power."""

    device: Device
    devices: int
    devices_per_node: int
    links: tuple[Link, ...]  # nearest first
    price_usd_per_device_hour: Figure
    watts_per_device: Figure  # under load, with the device's share of the node
    carbon_g_per_kwh: Figure
    date: str = ""  # when a probe measured it, ISO 8601
    host: str = ""
    waiting_watts_per_device: Figure | None = None  # while it does not compute; None: as under load
    pue: Figure | None = None  # None: not stated, what the nodes draw is all that is counted
    rails: int = 0  # planes of the network that a node's adapters lead into; 0: unknown
    nodes_per_rack: int = 0  # 0: unknown
    # Of devices that differ: for every device, in the order of ranks, its time for the same work over that of `device`,
    # the slowest of them; empty: all are alike.
    paces: tuple[float, ...] = ()
    fabric_devices: int = 0  # that the fast fabric joins, where it joins several nodes; 0: those of a node

    @property
    def domain(self) -> int:
        """Devices that reach each other over the nearest link: those of a node, or of several that a fabric joins."""
        return max(self.fabric_devices, self.devices_per_node)

    def link(self, group_size: int) -> Link:
        """Return the slowest link that a collective over `group_size` consecutive devices crosses."""
        return self.links[0] if group_size <= self.domain or len(self.links) == 1 else self.links[-1]
