"""Tables of what a step is made of, and of what runs cost: collectives, layers, power, energy of whole runs.

Each function takes the rows of a table and returns the relative error of every scored row, with reasons for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.backtest.machine import Machines
from paceline.backtest.price import collective_seconds, layer_seconds, plan_of_layer, watts_per_device
from paceline.backtest.schema import CollectiveRow, LayerRow, Origin, PowerRow, WholeRunRow
from paceline.plan.cost.constants import Constants
from paceline.spec.profile import ModelProfile
from paceline.task.profile.transformer import TransformerShape

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allgather/reducescatter": "all_gather",
    "alltoall": "all_to_all",
    "p2p": "send",
}
# Bus bandwidth shows the link's rate for a perfect ring: bytes x this x (n - 1) / n / seconds (nccl-tests).
BUS_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
WAITS = "devices of several nodes wait as in the power model's calibration"
LARGE_MESSAGE_BYTES = 2**28  # where a table states a bandwidth without a size


@dataclass(frozen=True)
class Compared:
    """One row's forecast beside its measurement, in the unit named, and the row's marks."""

    row: Origin
    forecast: float
    measured: float
    unit: str
    marks: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """The relative error."""
        return self.forecast / self.measured - 1


def compare_collectives(
    rows: Sequence[CollectiveRow], machines: Machines, constants: Constants | None = None
) -> tuple[list[Compared], list[tuple[Origin, str]]]:
    """Return collectives' seconds, forecast and measured. A bus bandwidth is turned to seconds by its definition."""
    found: list[Compared] = []
    unscored: list[tuple[Origin, str]] = []
    for row in rows:
        result = _unreadable(row) or _collective(row, machines, constants)
        if isinstance(result, str):
            unscored.append((row, result))
        else:
            found.append(result)
    return found, unscored


def _unreadable(row: Origin) -> str:
    return f"unreadable: {row.problem}" if row.problem else ""


def _collective(row: CollectiveRow, machines: Machines, constants: Constants | None) -> Compared | str:
    name = COLLECTIVES.get(row.collective.lower())
    size = row.group_size or (row.nodes or 1) * (row.devices_per_node or 0)
    if name is None:
        return f"{row.collective} is no collective"
    if size < 2:
        return "the size of the group is not stated"
    marks = []
    total = row.message_bytes
    if total is None:
        total = float(LARGE_MESSAGE_BYTES)
        marks.append("message of 256 MiB assumed")
    if name == "send":
        measured = row.time_us * 1e-6 if row.time_us else total / ((row.busbw_gb_s or 0.0) * 1e9 or float("nan"))
    elif row.time_us:
        measured = row.time_us * 1e-6
    elif row.busbw_gb_s and total:
        measured = BUS_FACTORS[name] * (size - 1) / size * total / (row.busbw_gb_s * 1e9)
    else:
        return "neither time nor bandwidth is stated"
    per_node = row.devices_per_node if (row.nodes or 1) > 1 else size
    devices = max(size, (row.nodes or 1) * (row.devices_per_node or size))
    cluster, assumed = machines.cluster(row.accelerator, devices, per_node, row.network, row.network)
    if cluster is None:
        return assumed[0]
    forecast = collective_seconds(cluster, name, size, total, constants)
    return Compared(row, forecast, measured, "seconds", (*marks, *assumed))


def compare_layers(rows: Sequence[LayerRow], machines: Machines) -> tuple[list[Compared], list[tuple[Origin, str]]]:
    """Return the seconds of one layer's forward and backward pass, of a GPT layer with unfused attention."""
    found: list[Compared] = []
    unscored: list[tuple[Origin, str]] = []
    for row in rows:
        stated = row.hidden and row.heads and row.seq_len and row.micro_batch and row.tp and row.combined_ms
        if row.problem or not stated:
            unscored.append((row, _unreadable(row) or "the layer's shape or time is not stated"))
            continue
        assert row.hidden and row.heads and row.seq_len and row.micro_batch and row.tp and row.combined_ms
        cluster, marks = machines.cluster(row.accelerator, row.tp)
        if cluster is None:
            unscored.append((row, marks[0]))
            continue
        plan = plan_of_layer(row.tp, row.micro_batch, row.recompute or "none", "fp16")
        profile = _one_layer(row.hidden, row.heads, row.seq_len)
        seconds = layer_seconds(profile, cluster, plan, row.sp != 0)
        found.append(Compared(row, seconds, row.combined_ms * 1e-3, "seconds", tuple(marks)))
    return found, unscored


def _one_layer(hidden: int, heads: int, seq_len: int) -> ModelProfile:
    shape = TransformerShape(
        name="one layer", layers=1, hidden=hidden, ffn=4 * hidden, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=1, seq_len=seq_len, flash=False, dropout=True,
    )  # fmt: skip
    whole = shape.profile()
    return ModelProfile(whole.name, whole.blocks[1:2], seq_len, whole.source)


def compare_power(rows: Sequence[PowerRow], machines: Machines) -> tuple[list[Compared], list[tuple[Origin, str]]]:
    """Return watts per device, node included, in the steady part of training."""
    found: list[Compared] = []
    unscored: list[tuple[Origin, str]] = []
    for row in rows:
        watts = row.node_steady_w_per_device
        if not watts and row.node_power_steady_w and row.devices_per_node:
            watts = row.node_power_steady_w / row.devices_per_node
        entry, mark = machines.entry(row.accelerator)
        if row.problem or not watts or entry is None:
            unscored.append((row, _unreadable(row) or (mark if watts else "no steady power is stated")))
            continue
        nodes = row.nodes_measured or 1
        marks = (*filter(None, [mark, row.measurement_type]), *([WAITS] if nodes > 1 else []))
        found.append(Compared(row, watts_per_device(entry.name, nodes), watts, "watts per device", marks))
    return found, unscored


def compare_runs(rows: Sequence[WholeRunRow], machines: Machines) -> tuple[list[Compared], list[tuple[Origin, str]]]:
    """Return the energy of whole runs in MWh: device-hours as stated times the forecast power, and the stated PUE."""
    found: list[Compared] = []
    unscored: list[tuple[Origin, str]] = []
    for row in rows:
        entry, mark = machines.entry(row.accelerator)
        reason = _unreadable(row) or ("" if row.energy_mwh else "no energy is stated")
        reason = reason or ("" if row.device_hours else "no device-hours are stated")
        if reason or entry is None:
            unscored.append((row, reason or mark))
            continue
        assert row.energy_mwh and row.device_hours
        several = (
            not row.n_devices or row.n_devices > entry.devices_per_node
        )  # runs that publish their energy are large
        watts = watts_per_device(entry.name, 2 if several else 1)
        forecast = row.device_hours * watts * (row.pue or 1.0) / 1e6
        marks = [*filter(None, [mark]), *([WAITS] if several else [])]
        if re.search(r"GPU-only", row.notes):
            marks.append("measured without the node")
        found.append(Compared(row, forecast, row.energy_mwh, "MWh", tuple(marks)))
    return found, unscored
