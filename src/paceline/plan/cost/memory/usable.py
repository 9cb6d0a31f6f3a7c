"""Whether plans have room on a device, and what it costs where they hardly do.

A caching allocator keeps freed blocks. Before it gives up, PyTorch's gives them back and asks again (its notes on CUDA
semantics, "Memory management"): all that it keeps does not decide whether a plan fits, but emptying it takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component, only, total
from paceline.plan.cost.memory.peak_memory import memory_components
from paceline.plan.cost.sheet import Sheet
from paceline.spec.cluster import SOURCES, Cluster
from paceline.spec.forecast import Term

HEADROOM = 0.05  # of a device's memory, kept free: allocator rounding, other processes, evaluation


def usable_bytes(cluster: Cluster) -> float:
    """Return the bytes of a device that a plan may fill."""
    return cluster.device.memory_bytes.value * (1 - HEADROOM)


def needed(sheet: Sheet, columns: Sequence[Component]) -> Floats:
    """Return the bytes that a device must have for every plan: all columns of memory, but a cache that is given back.

    An allocator gives its cache back where memory runs out, except on a CPU (`gives_back`).
    """
    found: Floats = total(columns)
    return found - total(only(columns, "cache")) if gives_back(sheet.context.cluster) else found


def needed_terms(cluster: Cluster, memory: Sequence[Term]) -> list[Term]:
    """Return a plan's terms of memory, each with the bytes of it that a device must have."""
    free = gives_back(cluster)
    return [replace(term, value=0.0) if free and term.kind == "cache" else term for term in memory]


def gives_back(cluster: Cluster) -> bool:
    """Return whether an allocator gives its cache back where memory runs out; a CPU's heap keeps it."""
    return cluster.device.kind != "cpu"


def flush_components(sheet: Sheet) -> list[Component]:
    """Return what emptying the allocator's cache takes, of plans that would cache more than the device holds."""
    if not sheet.context.software.flushes:
        return []
    each, columns = sheet.context.constants.flush_seconds, sheet.columns
    full = total(memory_components(sheet)) > usable_bytes(sheet.context.cluster)
    return [
        Component(
            "allocator flushes",
            "allocator",
            np.where(full, columns.accumulation * each, 0.0),
            SOURCES.index("assumed"),
            lambda i: f"{columns.accumulation[i]} micro-batches x {each:.3g} s",
            "caching allocator",
            full,
            "forward_backward",
        )
    ]
