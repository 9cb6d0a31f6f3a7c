"""A cluster from the plain data of a journal, so that a finished run can be forecast again on the machine it had."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.spec.cluster import CalibrationStep, Cluster, Device, Figure, GroupRates, Link

FIGURES = ("memory_bytes", "memory_bytes_per_second", "launch_seconds", "runtime_bytes", "optimizer_bytes_per_second",
           "picked_bytes_per_second")  # fmt: skip
PRICES = ("price_usd_per_device_hour", "watts_per_device", "carbon_g_per_kwh", "waiting_watts_per_device", "pue")


def cluster_from_dict(record: dict[str, Any]) -> Cluster:
    """Return the cluster that `dataclasses.asdict` took apart. Numbers that JSON lacks may be spelt as strings.

    Raises TypeError, KeyError or ValueError for what is no cluster of this version.
    """
    known = {field.name for field in dataclasses.fields(Cluster)}
    plain = {name: value for name, value in record.items() if name in known}
    return Cluster(
        **{
            **plain,
            "paces": tuple(float(pace) for pace in record.get("paces", ())),
            "device": _device(record["device"]),
            "links": tuple(_link(link) for link in record["links"]),
            **{name: _figure(record[name]) for name in PRICES if name in record},
        }
    )


def _device(record: dict[str, Any]) -> Device:
    def points(name: str) -> dict[str, tuple[tuple[int, float], ...]]:
        return {
            precision: tuple((int(size), float(rate)) for size, rate in row)
            for precision, row in record.get(name, {}).items()
        }

    known = {field.name for field in dataclasses.fields(Device)}
    return Device(
        **{
            **{name: value for name, value in record.items() if name in known},
            **{name: _figure(record[name]) for name in FIGURES if name in record},
            "matmul_flops": points("matmul_flops"),
            "attention_flops": points("attention_flops"),
            "attention_narrow_flops": points("attention_narrow_flops"),
            "head_widths": tuple(int(width) for width in record.get("head_widths", ())),
            "peak_flops": {name: float(rate) for name, rate in record["peak_flops"].items()},
            "calibration": tuple(CalibrationStep(**step) for step in record["calibration"]),
            "assumed_rates": tuple(str(name) for name in record.get("assumed_rates", ())),
        }
    )


def _link(record: dict[str, Any]) -> Link:
    figures = {name: _figure(record[name]) for name in ("latency_seconds", "bytes_per_second")}
    groups = tuple(GroupRates(**group) for group in record.get("groups", ()))
    return Link(**{**record, **figures, "groups": groups})


def _figure(record: dict[str, Any] | None) -> Any:
    return None if record is None else Figure(float(record["value"]), record["source"], record.get("note", ""))
