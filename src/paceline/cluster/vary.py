"""Vary: a cluster with one figure larger or smaller, such as links at half their rate, and all else unchanged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from paceline.spec.cluster import Cluster, Figure, Link
from paceline.units import format_rate


@dataclass(frozen=True)
class Varied:
    """A figure that can be varied: its name, what it bounds, and by a factor its value in words and the cluster."""

    name: str
    bounds: Literal["communication", "compute"]
    text: Callable[[float], str]
    cluster: Callable[[float], Cluster]


def varied_figures(cluster: Cluster, precision: str) -> tuple[Varied, ...]:
    """Return the rates of a cluster that a plan's time rests on and that are known."""
    device, found = cluster.device, []
    for place, name in _links(cluster).items():
        rate = cluster.links[place].bytes_per_second.value
        if math.isfinite(rate):
            found.append(
                Varied(
                    name,
                    "communication",
                    lambda factor, rate=rate: f"{rate * 8 * factor / 1e9:,.0f} Gb/s",  # type: ignore[misc]
                    lambda factor, place=place: with_link(cluster, place, factor),  # type: ignore[misc]
                )
            )
    memory = device.memory_bytes_per_second.value
    if math.isfinite(memory):
        found.append(
            Varied(
                "memory bandwidth",
                "compute",
                lambda factor: format_rate(memory * factor, "B"),
                lambda factor: with_memory_rate(cluster, factor),
            )
        )
    peak = max((rate for _, rate in device.matmul_flops.get(precision, ())), default=math.nan)
    if math.isfinite(peak):
        found.append(
            Varied(
                "matrix products",
                "compute",
                lambda factor: format_rate(peak * factor, "FLOP"),
                lambda factor: with_product_rate(cluster, factor),
            )
        )
    return tuple(found)


def _links(cluster: Cluster) -> dict[int, str]:
    """Return the places of links that plans of this cluster can cross, with their names."""
    if cluster.devices == 1:
        return {}
    if cluster.devices <= cluster.devices_per_node or len(cluster.links) == 1:
        return {0: "links between ranks" if cluster.device.kind == "cpu" else "links in a node"}
    inside = {0: "links in a node"} if cluster.devices_per_node > 1 else {}
    return {**inside, len(cluster.links) - 1: "links between nodes"}


def with_link(cluster: Cluster, place: int, factor: float) -> Cluster:
    """Return the cluster with the bandwidth of one of its links times a factor; latencies stay."""
    link = cluster.links[place]
    faster: Link = dataclasses.replace(
        link,
        bytes_per_second=_times(link.bytes_per_second, factor),
        collective_bytes_per_second={name: rate * factor for name, rate in link.collective_bytes_per_second.items()},
    )
    return dataclasses.replace(cluster, links=(*cluster.links[:place], faster, *cluster.links[place + 1 :]))


def with_memory_rate(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with devices whose memory bandwidth is times a factor, the optimizer's update with it."""
    device = cluster.device
    optimizer = device.optimizer_bytes_per_second
    faster = dataclasses.replace(
        device,
        memory_bytes_per_second=_times(device.memory_bytes_per_second, factor),
        optimizer_bytes_per_second=_times(optimizer, factor) if optimizer else None,
    )
    return dataclasses.replace(cluster, device=faster)


def with_product_rate(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with devices whose products and attention compute times a factor, in every precision."""
    device = cluster.device
    faster = dataclasses.replace(
        device,
        matmul_flops=_rates(device.matmul_flops, factor),
        attention_flops=_rates(device.attention_flops, factor),
        attention_narrow_flops=_rates(device.attention_narrow_flops, factor),
        peak_flops={precision: rate * factor for precision, rate in device.peak_flops.items()},
    )
    return dataclasses.replace(cluster, device=faster)


def _times(figure: Figure, factor: float) -> Figure:
    return dataclasses.replace(figure, value=figure.value * factor)


def _rates(rates: dict[str, tuple[tuple[int, float], ...]], factor: float) -> dict[str, tuple[tuple[int, float], ...]]:
    return {precision: tuple((size, rate * factor) for size, rate in points) for precision, points in rates.items()}
