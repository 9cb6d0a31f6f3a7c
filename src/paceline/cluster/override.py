"""Figures that the spec itself states, in place of what the catalog, the driver or the probe says."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.cluster.catalog.file import PRECISIONS
from paceline.config.values import literal
from paceline.errors import ConfigError, suggestion
from paceline.spec.cluster import Cluster, ClusterSpec, Device, Figure, Link

DEVICE_FIGURES = ("memory_bytes_per_second", "launch_seconds", "runtime_bytes")
LINK_FIGURES = ("node_bytes_per_second", "node_latency_seconds", "network_bytes_per_second", "network_latency_seconds")
OTHER_FIGURES = ("sustained_share", "waiting_watts", "peak_flops")
FIGURES = (*DEVICE_FIGURES, *LINK_FIGURES, *OTHER_FIGURES)


def with_overrides(cluster: Cluster, spec: ClusterSpec) -> Cluster:
    """Return the cluster with the figures that the spec states. Raises ConfigError for figures that there are not."""
    changes: dict[str, Any] = {}
    if spec.price_usd_per_device_hour is not None:
        changes["price_usd_per_device_hour"] = _stated(spec.price_usd_per_device_hour)
    if spec.watts_per_device is not None:
        changes |= {"watts_per_device": _stated(spec.watts_per_device), "waiting_watts_per_device": None}
    if spec.carbon_g_per_kwh is not None:
        changes["carbon_g_per_kwh"] = _stated(spec.carbon_g_per_kwh)
    if spec.pue is not None:
        changes["pue"] = _stated(spec.pue)
    if spec.memory_per_device:
        changes["device"] = dataclasses.replace(cluster.device, memory_bytes=_stated(spec.memory_per_device))
    return _with_figures(dataclasses.replace(cluster, **changes), spec.figures)


def with_tf32(cluster: Cluster) -> Cluster:
    """Return the cluster with fp32 products at the published TF32 rate, the same where none is known.

    A probe measures fp32 products without TF32, and none with it: what it measured stays.
    """
    device = cluster.device
    if device.kind != "cuda" or "tf32" not in device.matmul_flops:
        return cluster
    points = {**device.matmul_flops, "fp32": device.matmul_flops["tf32"]}
    peaks = (
        {**device.peak_flops, "fp32": device.peak_flops["tf32"]} if "tf32" in device.peak_flops else device.peak_flops
    )
    assumed = tuple(name for name in device.assumed_rates if name != "peak_flops.fp32")
    if "peak_flops.tf32" in assumed:
        assumed = (*assumed, "peak_flops.fp32")
    device = dataclasses.replace(device, matmul_flops=points, peak_flops=peaks, assumed_rates=assumed)
    return dataclasses.replace(cluster, device=device)


def _stated(value: float) -> Figure:
    return Figure(float(value), "published", "from the spec")


def _with_figures(cluster: Cluster, figures: dict[str, object]) -> Cluster:
    """Return the cluster with the single figures of `[cluster.figures]`."""
    for name, value in figures.items():
        if name not in FIGURES:
            raise ConfigError(f"cluster.figures.{name} is no figure of a cluster",
                              f"there are {', '.join(FIGURES)}", suggestion(name, FIGURES))  # fmt: skip
        if name == "peak_flops":
            cluster = dataclasses.replace(cluster, device=_with_peaks(cluster.device, value))
            continue
        number = _positive(name, value)
        if name == "sustained_share" and number > 1:
            raise ConfigError(
                f"cluster.figures.sustained_share = {literal(value)}",
                "it is the part of a peak that wide products sustain, 1 at most",
                f"{number / 100:g}" if number <= 100 else "0.6",
            )
        if name in LINK_FIGURES:
            cluster = dataclasses.replace(cluster, links=_with_link(cluster.links, name, number))
        elif name == "waiting_watts":
            cluster = dataclasses.replace(cluster, waiting_watts_per_device=_stated(number))
        else:
            changes: dict[str, Any] = {name: number if name == "sustained_share" else _stated(number)}
            device = _without_assumed(cluster.device, {name})
            cluster = dataclasses.replace(cluster, device=dataclasses.replace(device, **changes))
    return cluster


def _with_link(links: tuple[Link, ...], name: str, number: float) -> tuple[Link, ...]:
    """Return the links with a stated latency or rate; what a probe measured of that link's collectives gives way."""
    level, _, what = name.partition("_")
    if level == "network" and len(links) == 1:
        links = (*links, dataclasses.replace(links[0], level="network"))
    index = len(links) - 1 if level == "network" else 0
    changes: dict[str, Any] = {what: _stated(number)}
    if what == "bytes_per_second":
        changes |= {"collective_bytes_per_second": {}, "groups": ()}
    return (*links[:index], dataclasses.replace(links[index], **changes), *links[index + 1 :])


def _with_peaks(device: Device, rates: object) -> Device:
    """Return the device with stated peaks: for utilisation, and for products too where nobody has measured those."""
    if not isinstance(rates, dict) or not rates:
        raise ConfigError(f"cluster.figures.peak_flops = {literal(rates)}", "it holds a rate for each precision",
                          "peak_flops = { bf16 = 989e12 }")  # fmt: skip
    stated = {precision: _positive(f"peak_flops.{precision}", rate) for precision, rate in rates.items()}
    unknown = [precision for precision in stated if precision not in PRECISIONS]
    if unknown:
        raise ConfigError(f"cluster.figures.peak_flops.{unknown[0]} is not a precision",
                          f"rates stand under {', '.join(PRECISIONS)}", suggestion(unknown[0], PRECISIONS))  # fmt: skip
    device = _without_assumed(device, {f"peak_flops.{precision}" for precision in stated})
    peaks = {**device.peak_flops, **stated}
    if device.matmul_source == "measured":
        return dataclasses.replace(device, peak_flops=peaks)
    points = {**device.matmul_flops, **{precision: ((0, rate),) for precision, rate in stated.items()}}
    source = "published" if device.matmul_source == "unknown" else device.matmul_source
    return dataclasses.replace(device, peak_flops=peaks, matmul_flops=points, matmul_source=source)


def _without_assumed(device: Device, stated: set[str]) -> Device:
    """Return the device with the stated rates no longer assumed."""
    kept = tuple(name for name in device.assumed_rates if name not in stated)
    return dataclasses.replace(device, assumed_rates=kept)


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(
            f"cluster.figures.{name} = {literal(value)}", "a figure is a positive number in SI units", "25e9"
        )
    return float(value)
