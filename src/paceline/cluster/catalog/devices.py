"""The catalog in use: an accelerator's published figures as a Device, with links, power and price.

`file.py` reads the entries; what has no published figure comes from `assumed.py` and says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from paceline.cluster.catalog.assumed import (
    CUDA_LAUNCH_SECONDS,
    CUDA_RUNTIME_BYTES,
    NETWORK_BYTES_PER_SECOND,
    NETWORK_LATENCY_SECONDS,
    NODE_LATENCY_SECONDS,
)
from paceline.cluster.catalog.file import PRICE_CLASSES, Accelerator, Catalog, NodeType, load_catalog
from paceline.cluster.catalog.power import power_model
from paceline.config.other_words import choice_meant
from paceline.errors import ConfigError, suggestion
from paceline.spec.cluster import Cluster, ClusterSpec, Device, Figure, GroupRates, Link

# Collectives whose rates a mesh of links has for groups of fewer devices.
MESHED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def read_catalog() -> dict[str, Accelerator]:
    """Return the published catalog's accelerators by name."""
    return load_catalog().accelerators


def find_entry(name: str, catalog: Catalog | None = None) -> Accelerator:
    """Return the entry of a name in a catalog, the published one if none is given.

    Raises ConfigError with the nearest known name.
    """
    entries = (catalog or load_catalog()).accelerators
    if name not in entries:
        family = _of_one_chip(name, entries)
        raise ConfigError(
            f"cluster.device = '{name}' is not in the catalog",
            "a device is 'auto', 'cpu', 'cuda' or a name of the catalog",
            " or ".join(family) or choice_meant(name, ["auto", "cpu", "cuda", *entries]),
        )
    return entries[name]


def _of_one_chip(name: str, entries: Iterable[str]) -> list[str]:
    """Return the entries of the chip that a name begins with or holds: of "H100-SXM5-80GB" those of the H100.

    Those that share most of its other words stand alone.
    """
    if family := [known for known in entries if known.startswith(name.lower())]:
        return family
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    chips = {word for word in words if re.search(r"\d", word)}
    found = [known for known in entries if known.partition("-")[0] in chips]
    shared = {known: sum(any(word.startswith(part) for word in words) for part in known.split("-")) for known in found}
    return [known for known in found if shared[known] == max(shared.values())]


def find_node(entry: Accelerator, name: str, catalog: Catalog | None = None) -> NodeType:
    """Return the node type of that name, or the accelerator's standard system where the name is empty.

    Raises ConfigError for a node type that the accelerator does not come in.
    """
    if not name:
        return entry.node
    if name not in entry.nodes:
        known = (catalog or load_catalog()).nodes
        because = (
            f"{entry.name} comes in {', '.join(entry.nodes)}" if name in known else "the catalog has no such node type"
        )
        raise ConfigError(f"cluster.node = '{name}' with cluster.device = '{entry.name}'", because,
                          suggestion(name, entry.nodes))  # fmt: skip
    return entry.node_types[entry.nodes.index(name)]


def match_driver_name(reported: str, catalog: Catalog | None = None) -> Accelerator | None:
    """Return the entry whose driver name equals `reported`, or None: a near match would be a guess."""
    entries = (catalog or load_catalog()).accelerators.values()
    return next((entry for entry in entries if reported in entry.match), None)


def published_device(entry: Accelerator) -> Device:
    """Return the Device of a catalog entry, every figure published or assumed."""

    def figure(name: str, value: float) -> Figure:
        return Figure(value, "assumed" if name in entry.assumed else "published", entry.source)

    rates = tuple(name for name in entry.assumed if name == "sustained_share" or name.startswith("peak_flops."))
    return Device(
        name=entry.title,
        kind="cuda",
        memory_bytes=figure("memory_bytes", entry.memory_bytes),
        memory_bytes_per_second=figure("memory_bytes_per_second", entry.memory_bytes_per_second),
        matmul_flops={precision: ((0, rate),) for precision, rate in entry.peak_flops.items()},
        matmul_source="published",
        peak_flops=dict(entry.peak_flops),
        launch_seconds=CUDA_LAUNCH_SECONDS,
        runtime_bytes=CUDA_RUNTIME_BYTES
        if entry.runtime_bytes is None
        else figure("runtime_bytes", entry.runtime_bytes),
        sustained_share=entry.sustained_share,
        best_product=entry.best_product,
        assumed_rates=rates,
        rated_watts=entry.watts,
    )


def published_links(entry: Accelerator, node: NodeType | None = None) -> tuple[Link, Link]:
    """Return the links inside a node and between nodes, nearest first; of the standard system where `node` is None."""
    node = node or entry.node
    rate = node.network_bytes_per_second
    if rate is not None:
        known = "assumed" if "adapter_bytes_per_second" in node.assumed else "published"
        network = Figure(rate, known, f"{node.title}: {node.source}; for {node.devices} devices")
    else:
        host = node.devices_per_host or node.devices
        shared = f"a {NETWORK_BYTES_PER_SECOND * 8 / 1e9:g} Gb/s adapter shared by the {host} devices of a host"
        network = Figure(NETWORK_BYTES_PER_SECOND / host, "assumed", shared)
    known = "assumed" if "fabric_bytes_per_second" in node.assumed else "published"
    groups = tuple(
        GroupRates(int(size), NODE_LATENCY_SECONDS.value, dict.fromkeys(MESHED, rate))
        for size, rate in sorted(node.fabric_groups.items(), key=lambda pair: int(pair[0]))
    )
    fabric = Figure(node.fabric_bytes_per_second, known, node.fabric)
    inside = Link("node", NODE_LATENCY_SECONDS, fabric, groups=groups)
    return inside, Link("network", NETWORK_LATENCY_SECONDS, network)


def published_watts(entry: Accelerator, busy: float = 1.0) -> Figure:
    """Return watts per device with its share of the node while the device computes for a share `busy` of the time."""
    if entry.watts is None:
        return Figure(math.nan, "unknown", f"no power of {entry.title} is published: set cluster.watts_per_device")
    ratio = power_model().over_tdp(busy)
    what = entry.watts_note or "thermal design power"
    known = "assumed" if "watts" in entry.assumed else "published"
    note = f"{entry.watts:g} W ({what}, {known}) x {ratio:.3f} for a node that {'computes' if busy else 'waits'}"
    return Figure(entry.watts * ratio, "assumed", f"{note}, fitted on MLPerf power logs")


def published_price(
    entry: Accelerator, price_class: str = "cheapest", spot: bool = False, catalog: Catalog | None = None
) -> Figure:
    """Return the lowest list price per device and hour of a class ('cheapest': of any), or unknown with the reason."""
    offers = [price for price in (catalog or load_catalog()).prices if price.accelerator == entry.name]
    classes = PRICE_CLASSES if price_class == "cheapest" else (price_class,)
    fitting = [price for price in offers if price.price_class in classes and price.spot == spot]
    if not fitting:
        asked = (
            f"{'spot' if spot else 'list'} price{'' if price_class == 'cheapest' else f' of a {price_class} provider'}"
        )
        known = "; ".join(f"${price.usd_per_device_hour:g} {price.price_class}, {price.text}" for price in offers)
        because = f"; known: {known}" if known else ""
        return Figure(math.nan, "unknown", f"no {asked} in the catalog: set cluster.price_usd_per_device_hour{because}")
    best = min(fitting, key=lambda price: price.usd_per_device_hour)
    return Figure(best.usd_per_device_hour, "published", best.text)


def spot_remarks(spec: ClusterSpec, cluster: Cluster, catalog: Catalog) -> list[str]:
    """Return what is to be said of the catalog's spot prices: one that is no saving, and preemption nobody stated."""
    entry = next((each for each in catalog.accelerators.values() if each.title == cluster.device.name), None)
    if not spec.spot or spec.price_usd_per_device_hour is not None or entry is None:
        return []
    remarks, spot = [], cluster.price_usd_per_device_hour
    firm = published_price(entry, spec.price_class, False, catalog)
    if spot.value >= firm.value:
        remarks.append(
            f"spot saves nothing: ${spot.value:g} per device and hour ({spot.note}), and ${firm.value:g} on demand"
            f" ({firm.note}); cluster.spot = false"
        )
    if spec.reliability.preemption_hours_per_node is None:
        remarks.append(
            "spot nodes are taken away, and how often is not stated, so it is in neither time nor money:"
            " cluster.reliability.preemption_hours_per_node = 24, say"
        )
    return remarks
