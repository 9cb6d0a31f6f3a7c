"""Resolve a `[cluster]` table to a Cluster: this machine, probed or not, or a published accelerator. Torch-free."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cluster.catalog.assumed import (
    CPU_LINK,
    CPU_WATTS_PER_CORE,
    NETWORK_LATENCY_SECONDS,
    NO_PRICE,
    NODE_LATENCY_SECONDS,
    UNKNOWN,
    assumed_cpu,
    unknown_gpu,
)
from paceline.cluster.catalog.carbon import carbon_of
from paceline.cluster.catalog.devices import (
    find_entry,
    find_node,
    match_driver_name,
    published_device,
    published_links,
    published_price,
    published_watts,
    spot_remarks,
)
from paceline.cluster.catalog.file import Catalog, load_catalog
from paceline.cluster.here.cores import threads_not_heeded
from paceline.cluster.machine import Machine, read_machine, threads_per_device, torch_without_cuda, visible_gpus
from paceline.cluster.override import with_overrides
from paceline.cluster.probe.busy import BUSY_ERROR, busy_text, has_expired, reasons_of
from paceline.cluster.probe.duration import probe_seconds
from paceline.cluster.store import probe_command, probe_path, read_probe
from paceline.errors import ConfigError
from paceline.spec.cluster import (
    FUSED_ADAMW_BYTES,
    CalibrationStep,
    Cluster,
    ClusterSpec,
    Device,
    Figure,
    GroupRates,
    Link,
)
from paceline.units import plural

if TYPE_CHECKING:
    from paceline.cluster.probe.records import ProbeRecord, TimedBlock


def resolve_cluster(spec: ClusterSpec, probes: Path | None = None) -> tuple[Cluster, list[str]]:
    """Return the cluster a spec describes, and remarks on what was chosen or assumed.

    `probes` is the folder of stored probes; None means the user's cache. Raises ConfigError for unknown devices and
    for GPUs that this machine does not have.
    """
    if spec.groups:
        raise ConfigError(f"cluster.groups ({', '.join(spec.groups)}) here", "one kind of devices is looked at",
                          "the devices of one group in [cluster]")  # fmt: skip
    remarks: list[str] = []
    catalog = load_catalog(spec.catalog)
    if spec.device == "cpu":
        cluster = _this_cpu(spec, probes, remarks)
    elif spec.device in ("auto", "cuda"):
        gpus = visible_gpus()
        if gpus and torch_without_cuda():
            remarks.append("a GPU is present, but the installed torch is a CPU-only build and cannot use it")
            gpus = []
        if gpus:
            cluster = _this_gpu(spec, catalog, probes, remarks)
        elif spec.device == "auto":
            cluster = _this_cpu(spec, probes, remarks)
        else:
            raise ConfigError(
                "cluster.device = 'cuda' on a machine without a usable GPU",
                remarks[0] if remarks else "the driver reports no NVIDIA GPU to this process",
                'device = "cpu", or a catalog name such as "h100-sxm" to plan for another machine',
            )
    else:
        cluster = _published(spec, catalog, remarks)
    remarks += spot_remarks(spec, cluster, catalog)
    cluster = dataclasses.replace(cluster, carbon_g_per_kwh=carbon_of(spec.region), nodes_per_rack=spec.nodes_per_rack)
    return with_overrides(cluster, spec), remarks


def _this_cpu(spec: ClusterSpec, probes: Path | None, remarks: list[str]) -> Cluster:
    host = read_machine()
    devices = spec.devices or 1
    here = _per_node(spec, devices)
    threads = threads_per_device(host.cores, here)
    if here > host.cores:
        remarks.append(f"{here} CPU devices share {plural(host.cores, 'core')}: they will take turns")
    source = f"this machine's usable memory over {plural(here, 'device')}"
    memory = Figure(host.memory_bytes // here, "measured", source)
    cluster = Cluster(
        device=assumed_cpu(host.processor, threads, memory, min(1.0, host.cores / here)),
        devices=devices,
        devices_per_node=here,
        links=(CPU_LINK,),
        price_usd_per_device_hour=NO_PRICE,
        watts_per_device=Figure(
            CPU_WATTS_PER_CORE * host.cores / here, "assumed", f"{CPU_WATTS_PER_CORE:g} W per core under load"
        ),
        carbon_g_per_kwh=UNKNOWN,
        host=host.name,
    )
    cluster = _with_probe(cluster, host, "cpu", threads, probes, remarks)
    remarks += filter(None, [threads_not_heeded(threads, os.environ)])
    return cluster


def _this_gpu(spec: ClusterSpec, catalog: Catalog, probes: Path | None, remarks: list[str]) -> Cluster:
    gpus, host = visible_gpus(), read_machine()
    devices = spec.devices or len(gpus)
    here = _per_node(spec, devices)
    if here > len(gpus):
        raise ConfigError(
            f"cluster.devices = {devices} on a machine with {plural(len(gpus), 'GPU')}",
            f"the driver shows this process {plural(len(gpus), 'GPU')} named {gpus[0].name}",
            f"devices = {len(gpus)}, devices_per_node = {len(gpus)} for several machines like this one, or a catalog"
            " name as cluster.device to plan for another machine",
        )
    entry = match_driver_name(gpus[0].name, catalog)
    waiting: Figure | None = None
    rails = 0
    if entry is None:
        probe = probe_command("cuda", here)
        remarks.append(f"'{gpus[0].name}' is not in the catalog: its rates are unknown until `{probe}` has run")
        device, price, watts = unknown_gpu(gpus[0].name), NO_PRICE, UNKNOWN
        links: tuple[Link, ...] = (
            Link("node", NODE_LATENCY_SECONDS, UNKNOWN),
            Link("network", NETWORK_LATENCY_SECONDS, UNKNOWN),
        )
    else:
        node = find_node(entry, spec.node, catalog)
        device, links, rails = published_device(entry), published_links(entry, node), node.rails
        price = published_price(entry, spec.price_class, spec.spot, catalog)
        watts, waiting = published_watts(entry), published_watts(entry, busy=0.0)
    smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
    if smallest.memory_bytes:
        known = ("assumed", "of a slice, from its name") if smallest.is_slice else ("measured", "as the driver reports")
        device = dataclasses.replace(device, memory_bytes=Figure(smallest.memory_bytes, *known))
    names = tuple(dict.fromkeys(gpu.name for gpu in gpus))
    if len(names) > 1:
        remarks.append(
            f"this machine's GPUs differ ({', '.join(names)}): all count as the first, with the least memory of any;"
            " CUDA_VISIBLE_DEVICES chooses those of one kind"
        )
    cluster = Cluster(
        device, devices, here, links, price, watts, UNKNOWN,
        host=host.name, waiting_watts_per_device=waiting, rails=rails,
    )  # fmt: skip
    return _with_probe(cluster, host, "cuda", 0, probes, remarks, names)


def _published(spec: ClusterSpec, catalog: Catalog, remarks: list[str]) -> Cluster:
    entry = find_entry(spec.device, catalog)
    node = find_node(entry, spec.node, catalog)
    devices = spec.devices or 1
    per_node = _per_node(spec, devices, node.nodes_of(devices))
    links = published_links(entry, node)
    remarks.append(f"{entry.title} in {node.title}: published figures ({entry.source}); nothing was measured")
    if devices > per_node and links[1].bytes_per_second.source == "assumed":
        remarks.append(f"the network between nodes is assumed: {links[1].bytes_per_second.note}")
    return Cluster(
        device=published_device(entry),
        devices=devices,
        devices_per_node=per_node,
        links=links,
        price_usd_per_device_hour=published_price(entry, spec.price_class, spec.spot, catalog),
        watts_per_device=published_watts(entry),
        carbon_g_per_kwh=UNKNOWN,
        waiting_watts_per_device=published_watts(entry, busy=0.0),
        rails=node.rails,
        fabric_devices=node.joined(devices, per_node),
    )


def _per_node(spec: ClusterSpec, devices: int, usual: int = 0) -> int:
    """Return the devices of one node: the spec's, or what is usual (0: all on one). Nodes of a cluster are alike."""
    per_node = min(devices, spec.devices_per_node or usual or devices)
    if devices % per_node:
        raise ConfigError(
            f"cluster.devices = {devices} with {per_node} devices per node",
            "the nodes of a cluster are alike",
            f"devices = {devices - devices % per_node} or {devices + per_node - devices % per_node}",
        )
    return per_node


def is_unprobed(cluster: Cluster) -> bool:
    """Return whether the cluster is this machine and `paceline probe` has not measured it."""
    return bool(cluster.host) and cluster.devices == cluster.devices_per_node and not cluster.date


def _with_probe(
    cluster: Cluster,
    host: Machine,
    kind: str,
    threads: int,
    probes: Path | None,
    remarks: list[str],
    names: tuple[str, ...] = (),
) -> Cluster:
    """Return the cluster with the figures of this host's stored probe, where there is one.

    A host may have GPUs of several kinds, of which this process sees those of `names`. What one node measured is for
    all of them, which are alike; of CPUs the link between nodes is another one than that inside.
    """
    here = cluster.devices_per_node
    command = probe_command(kind, here)
    path = probe_path(host.name, kind, here, threads, probes)
    record, because = read_probe(path, host.processor, names, command)
    if record is None:
        remarks.append(
            because
            or f"not probed: `{command}` measures {here} x {kind} in about "
            f"{probe_seconds(kind, devices=here):.0f} s and narrows this"
        )
        return cluster
    if has_expired(record):
        remarks.append(
            f"not probed: the probe of {record['date']} was made while the machine was busy and counts no more"
        )
        return cluster
    if busy := reasons_of(record):
        remarks.append(busy_text(busy))
    return apply_probe(cluster, record)


def apply_probe(cluster: Cluster, record: ProbeRecord) -> Cluster:
    """Return the cluster with a probe's figures, tagged as measured, in place of published and assumed ones."""
    links = cluster.links
    if "link" in record and (cluster.devices == cluster.devices_per_node or len(links) > 1):
        links = (_probed_link(links[0], record), *links[1:])
    device = _probed_device(cluster.device, record)
    if "device_memory_bytes" in record and device.memory_bytes.source in ("assumed", "unknown"):
        device = dataclasses.replace(device, memory_bytes=_measured(record["device_memory_bytes"], "as torch reports"))
    return dataclasses.replace(cluster, device=device, links=links, date=record["date"])


def _measured(value: float, note: str = "") -> Figure:
    return Figure(float(value), "measured", note)


def _points(rows: dict[str, list[list[float]]]) -> dict[str, tuple[tuple[int, float], ...]]:
    return {precision: tuple((int(size), float(flops)) for size, flops in row) for precision, row in rows.items()}


def _probed_products(device: Device, record: ProbeRecord) -> Device:
    """Return a device with what a probe measured of products, and the steps that calibrate the sum of its parts.

    Of a CPU, all of it. An accelerator does in a burst what its power does not let it sustain: an H200 of 989 printed
    TFLOP/s reached 820 in the probe, and some 550 in training (2026-11-27). So a published peak stays, whose fitted
    share is what training sustains, and a GPU that the catalog does not hold has the best burst for a peak.
    """
    if device.kind == "cpu":
        steps = tuple(_calibration_step(step, record) for step in record["calibration"])
        return dataclasses.replace(
            device, matmul_flops=_points(record["matmul"]), matmul_source="measured", calibration=steps
        )
    if device.matmul_source == "published":
        return device
    best = _points({name: [[0, max(rate for _, rate in points)]] for name, points in record["matmul"].items()})
    return dataclasses.replace(device, matmul_flops=best, matmul_source="measured", measured_peaks=True)


def _calibration_step(step: TimedBlock, record: ProbeRecord) -> CalibrationStep:
    least = 2 * BUSY_ERROR if reasons_of(record) else 0.0  # the spread that they are taken to have
    return CalibrationStep(
        step["precision"],
        step["width"],
        step["sequence"],
        step["seconds"],
        max(step["spread"], least),
        step["parameters"],
        step["matmul_flops"],
        step["attention_flops"],
        step["moved_elements"],
        step["operators"],
        step.get("head_width", 0),
        max(step.get("drift", 0.0), least),
    )


def _probed_device(device: Device, record: ProbeRecord) -> Device:
    """Return a device with what a probe measured of computing and of memory."""
    return dataclasses.replace(
        _probed_products(device, record),
        memory_bytes_per_second=_measured(record["memory"]["triad"], "triad, all devices at once"),
        attention_flops=_points(record["attention"]),
        attention_narrow_flops=_points(record.get("attention_narrow", {})),
        head_widths=tuple(record.get("head_widths", ())),
        launch_seconds=_measured(record["launch_seconds"], "of one operator of a training step, whatever its size"),
        runtime_bytes=_measured(record["runtime_bytes"], "resident memory before any tensor of ours"),
        picked_bytes_per_second=_measured(record["memory"]["picked"], "rows picked by index, there and back")
        if "picked" in record["memory"]
        else None,
        optimizer_bytes_per_second=_measured(
            record["optimizer_bytes_per_second"], f"fused AdamW, {FUSED_ADAMW_BYTES} B per parameter"
        ),
    )


def _probed_link(link: Link, record: ProbeRecord) -> Link:
    """Return the link of the lowest level with what a probe measured of exchanges between ranks."""
    probed = record["link"]
    rates = probed["bytes_per_second"]
    return Link(
        link.level,
        _measured(probed["hop_seconds"], "per ring hop, from the all-reduce of one number"),
        _measured(rates["all_reduce"], "ring bandwidth of all-reduce, 4 and 16 MiB"),
        {name: float(rate) for name, rate in rates.items()},
        tuple(
            GroupRates(group["size"], float(group["hop_seconds"]), group["bytes_per_second"])
            for group in probed.get("groups", ())
        ),
        unit_seconds=probed.get("unit_seconds", 0.0),
        least_unit_seconds=probed.get("least_unit_seconds", 0.0),
        kept_unit_seconds=probed.get("kept_unit_seconds", 0.0),
        move_seconds=probed.get("move_seconds", 0.0),
        work_seconds=probed.get("work_seconds", 0.0),
    )
