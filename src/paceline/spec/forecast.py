"""Forecast: what a plan will take in time, memory, money and energy, term by term, each with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

# What a device does in a term of time. `collectives` run inside forward and backward (tp, cp, ep); `sync` keeps weights
# and gradients in step over the data axes, and gathers for the update; `host` starts work that the device waits for.
TimeKind = Literal[
    "products", "attention", "elementwise", "recompute", "casts", "update", "collectives", "sends", "bubble", "sync",
    "offload", "host", "allocator", "data", "learnt",
]  # fmt: skip
# What a term of memory holds. `buffers` are copies and what collectives read and write; `cache` is what an allocator
# keeps beside them; `runtime` is what a process holds before any tensor.
MemoryKind = Literal[
    "weights", "gradients", "optimizer", "activations", "buffers", "cache", "runtime", "learnt",
]  # fmt: skip
Kind = TimeKind | MemoryKind | Literal["other"]
# The clock of a step that measures a term of time, as a journal's `seconds` name it; `none` measures bytes, terms of a
# whole run, and corrections of a sum.
Clock = Literal["data", "forward_backward", "reduce", "optimizer", "other", "none"]

Z80, Z95 = 1.2815515655446004, 1.959963984540054  # standard deviations to either side that hold 80 % and 95 %


@dataclass(frozen=True)
class Term:
    """One component of a forecast: a value, the formula it came from, and how its inputs are known.

    `source` is the weakest of its inputs' sources: measured, then published, then assumed. `kind` and `clock` say what
    a term is; its name is for people.
    """

    name: str
    value: float
    formula: str
    source: str
    law: str = ""  # the formula's name and where it was published
    low: float = math.nan  # the 80 % interval, and the 95 % one
    high: float = math.nan
    low95: float = math.nan
    high95: float = math.nan
    kind: Kind = "other"
    clock: Clock = "none"


@dataclass(frozen=True)
class Estimate:
    """A value with its 80 % and 95 % intervals. `source` is the weakest source among its terms; unknown is NaN."""

    value: float
    low: float
    high: float
    source: str
    low95: float = math.nan
    high95: float = math.nan


@dataclass(frozen=True)
class BillTerm:
    """Money, energy or carbon of a whole run: its 80 % and 95 % intervals, the formula with its figures, the source."""

    name: str
    unit: str
    value: float
    low: float
    high: float
    low95: float
    high95: float
    formula: str
    source: str


@dataclass(frozen=True)
class Forecast:
    """What one plan is expected to take.

    Time terms are seconds per step and add up to `step_seconds`; memory terms are bytes on the fullest device and
    add up to `peak_bytes`. Money is USD, energy kWh, carbon grams of CO2 equivalent, for the whole run.
    """

    step_seconds: Estimate
    time: tuple[Term, ...]
    peak_bytes: Estimate
    memory: tuple[Term, ...]
    tokens_per_second: float
    steps: int
    run_seconds: Estimate
    usd: Estimate
    kwh: Estimate
    carbon_g: Estimate
    model_flops_per_step: float  # 3 x forward FLOPs (causal attention), no recompute
    mfu: float  # model FLOPs over the devices' published peak; NaN where the peak is unknown
    bill: tuple[BillTerm, ...] = ()  # money, energy and carbon, term by term
    # Copies in other nodes' memory, which are made beside training: bytes of host memory (kind `other`), and seconds
    # per step that are not in `time`.
    copies: tuple[Term, ...] = ()
