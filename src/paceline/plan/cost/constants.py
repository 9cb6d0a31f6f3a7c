"""The constants of the cost formulas: few numbers with a physical meaning, fitted once on published measurements.

They stand in `plan/constants.toml` with their hash, the files they were fitted on and the date. They speak of published
devices; where a machine was probed, what was measured takes their place.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.document import packaged_toml

# What a device's name says of its generation. Products and attention of one generation reach like shares of their peak.
FAMILIES = {
    "ampere": ("A100", "A800", "A10", "A40", "A6000", "A30"),
    "hopper": ("H100", "H800", "H200", "H20", "GH200"),
    "blackwell": ("B200", "B100", "B300", "GB200", "GB300"),
}

ABOUT = ("files", "date", "seen")
BY_FAMILY = ("share", "attention")  # constants that every generation has its own of


@dataclass(frozen=True)
class FittedOn:
    """What the fit's tables had: a forecast of anything else is less sure."""

    families: tuple[str, ...]
    precisions: tuple[str, ...]
    programs: tuple[str, ...]
    devices: int  # the most of a row
    once: tuple[str, ...] = ()  # families that a single source measured


@dataclass(frozen=True)
class Constants:
    """Constants of the cost formulas. Shares are parts of what a manufacturer prints; times are seconds."""

    share: dict[str, float] = field(default_factory=dict)  # of the dense peak that large products sustain, by family
    attention: dict[str, float] = field(default_factory=dict)  # fused attention's rate over that of large products
    operand_traffic: float = 0.0  # part of the time to move a product's operands that its arithmetic does not hide
    unfused_moves: float = 0.0  # what a block's separate kernels move, over what fused ones do
    unfused_launches: float = 0.0  # and how many there are
    memory_share: float = 0.0  # of the memory's bandwidth that kernels reach
    launch_seconds: float = 0.0  # of the host, to start one operator
    node_link_share: float = 0.0  # of a link's bandwidth that collectives reach inside a node
    network_link_share: float = 0.0  # and between two nodes
    collective_seconds: float = 0.0  # of starting a collective
    pipeline_wait_seconds: float = 0.0  # of a tensor collective beside a pipeline, per rank, in programs that wait so
    flush_seconds: float = 0.0  # of emptying a full allocator's cache and filling it again, once a micro-batch
    node_hop_seconds: float = 0.0  # latency of a ring's hop inside a node
    network_hop_seconds: float = 0.0  # and between nodes
    overlap: float = 0.0  # of the communication of the data axes that computing can hide
    fixed_seconds: float = 0.0  # of a step whatever its size
    allocator_share: float = 0.0  # what the caching allocator keeps unused, per doubling of tp or pp
    time_80: float = 0.0  # half-widths of intervals, as log ratios of measured over forecast
    time_95: float = 0.0
    memory_80: float = 0.0
    memory_95: float = 0.0
    files: tuple[str, ...] = ()  # the calibration files
    date: str = ""
    seen: FittedOn | None = None  # None: intervals say nothing of what is unknown

    def share_of(self, device_name: str) -> float:
        """Return the share of its peak that a device's large products sustain; of others, that of its like."""
        return self.share[family_of(device_name)]

    def attention_of(self, device_name: str) -> float:
        """Return a device's rate of fused attention over that of its large products."""
        return self.attention[family_of(device_name)]

    @property
    def sha256(self) -> str:
        """The hash over all values, names and order aside."""
        values = {name: value for name, value in asdict(self).items() if name not in ABOUT[:2]}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def constants_text(constants: Constants) -> str:
    """Return constants as the text of `plan/constants.toml`."""
    values = asdict(constants)
    families = {name: values.pop(name) for name in BY_FAMILY}
    about = {name: values.pop(name) for name in ABOUT}
    spread = {name: values.pop(name) for name in ("time_80", "time_95", "memory_80", "memory_95")}
    lines = [
        "# Fitted by `paceline backtest FILES --fit constants.toml` (backtest/fitting/fit.py); cost/constants.py says",
        "# what each is. Never edited by hand: a test holds the hash against the values.",
        "",
        "[about]",
        f'date = "{about["date"]}"',
        f'sha256 = "{constants.sha256}"',
        f"files = {json.dumps(about['files'])}",
    ]
    tables = [*families.items(), ("constants", values), ("spread", spread)]
    tables += [("seen", about["seen"])] if about["seen"] else []
    for title, table in tables:
        lines += ["", f"[{title}]", *(f"{name} = {_toml(value)}" for name, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: float | tuple[str, ...]) -> str:
    return json.dumps(value) if isinstance(value, tuple) else repr(value)


def family_of(device_name: str) -> str:
    """Return the generation that a device's name tells, or "other"."""
    words = device_name.replace("-", " ").split()
    return next((family for family, names in FAMILIES.items() if any(name in words for name in names)), "other")


def _seen(record: dict[str, Any]) -> FittedOn:
    named = {name: tuple(record.get(name, ())) for name in ("families", "precisions", "programs", "once")}
    return FittedOn(**named, devices=record["devices"])


@functools.cache
def read_constants() -> Constants:
    """Return the constants that came with this version."""
    record = packaged_toml("paceline.plan", "constants.toml")
    about = record.get("about", {})
    return Constants(
        **{name: record[name] for name in BY_FAMILY},
        **record["constants"],
        **record["spread"],
        files=tuple(about.get("files", ())),
        date=about.get("date", ""),
        seen=_seen(record["seen"]) if "seen" in record else None,
    )
