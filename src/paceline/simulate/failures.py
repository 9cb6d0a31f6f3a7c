"""Failures: published counts of what interrupts training, by component, turned into rates.

A rate is a count over devices x hours, so it holds for other numbers of devices where failures are independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from paceline.errors import ConfigError, suggestion
from paceline.spec.reliability import ReliabilitySpec

HOURS_PER_DAY = 24.0


@dataclass(frozen=True)
class Cause:
    """One reason for interruptions. `evicts`: a node must be replaced; `planned`: announced, so nothing is lost."""

    name: str
    component: str  # gpu, host, network, software, unknown
    per_device_hour: float
    evicts: bool = True
    planned: bool = False


@dataclass(frozen=True)
class FailureRates:
    """What interrupts a job: causes with their rates, where these are from, and how they are known."""

    name: str
    causes: tuple[Cause, ...]
    text: str
    source: str  # published, assumed, unknown

    @property
    def unexpected_per_device_hour(self) -> float:
        """The rate of all unexpected causes together."""
        return sum(cause.per_device_hour for cause in self.causes if not cause.planned)

    @property
    def mtbf_hours_per_device(self) -> float:
        """Mean hours between unexpected interruptions by one device; infinite where there are none."""
        rate = self.unexpected_per_device_hour
        return 1 / rate if rate else math.inf


# Dubey et al. 2024, arXiv:2407.21783, table 5 and section 3.3.4: 54 days on 16,384 H100, 419 unexpected interruptions
# and 47 planned ones. Counts are the table's; its percentages are not used (148 of 419 are 35.3 %, it says 30.1 %).
# Which causes need another node is not in the paper: assumed from the component.
_LLAMA3_COUNTS = (
    ("faulty GPU", "gpu", 148, True),
    ("GPU HBM3 memory", "gpu", 72, True),
    ("software bug", "software", 54, False),
    ("network switch or cable", "network", 35, True),
    ("unplanned host maintenance", "host", 32, True),
    ("GPU SRAM memory", "gpu", 19, True),
    ("GPU system processor", "gpu", 17, True),
    ("NIC", "host", 7, True),
    ("NCCL watchdog timeout", "unknown", 7, False),
    ("silent data corruption", "gpu", 6, True),
    ("GPU thermal interface and sensor", "gpu", 6, True),
    ("SSD", "host", 3, True),
    ("power supply", "host", 3, True),
    ("server chassis", "host", 2, True),
    ("IO expansion board", "host", 2, True),
    ("dependency", "software", 2, False),
    ("CPU", "host", 2, True),
    ("system memory", "host", 2, True),
)
_LLAMA3_PLANNED, _LLAMA3_DEVICES, _LLAMA3_DAYS = 47, 16384, 54
DEVICES_PER_NODE = 8  # of all clusters in the studies


def _llama3() -> FailureRates:
    device_hours = _LLAMA3_DEVICES * _LLAMA3_DAYS * HOURS_PER_DAY
    causes = tuple(
        Cause(name, component, count / device_hours, evicts) for name, component, count, evicts in _LLAMA3_COUNTS
    )
    planned = Cause("planned maintenance", "host", _LLAMA3_PLANNED / device_hours, evicts=False, planned=True)
    text = "419 unexpected and 47 planned interruptions, 54 days, 16,384 H100, Dubey et al. 2024, arXiv:2407.21783"
    return FailureRates("llama3", (*causes, planned), text, "published")


def _single(name: str, per_device_hour: float, text: str, cause: str = "hardware failure") -> FailureRates:
    return FailureRates(name, (Cause(cause, "unknown", per_device_hour),), text, "published")


def _studies() -> Mapping[str, FailureRates]:
    node_days = DEVICES_PER_NODE * HOURS_PER_DAY
    week = 7 * HOURS_PER_DAY
    rsc = "failures per 1,000 node-days of 8 A100, Kokolis et al. 2025, arXiv:2410.21680"
    opt = "2 machines a day of those with 992 A100, OPT-175B chronicles, 7 January 2022"
    bloom = "1 to 2 failures a week on some 400 A100, BigScience's account of BLOOM, July 2022"
    studies = (
        _llama3(),
        _single("meta-rsc1", 6.50e-3 / node_days, f"6.50 {rsc} (RSC-1)"),
        _single("meta-rsc2", 2.34e-3 / node_days, f"2.34 {rsc} (RSC-2)"),
        _single("opt-175b", 2 / HOURS_PER_DAY / 992, opt),
        _single("bloom", 1.5 / week / 400, bloom),
    )
    return MappingProxyType({study.name: study for study in studies})


STUDIES = _studies()
UNKNOWN = FailureRates("unknown", (), "no published failure rate", "unknown")

# Studies that speak of a device of the catalog. Others are unknown until a spec names a study or a rate.
DEVICE_STUDIES = (("h100", "llama3"), ("a100", "meta-rsc1"))


def failure_rates(device: str, failures: str = "auto", mtbf_hours_per_device: float | None = None) -> FailureRates:
    """Return the rates for a device of this name: the study asked for or the device's own, scaled to a stated rate.

    `device` is a name such as "NVIDIA H100 SXM5 80GB". With a stated mean time between failures, the shares of causes
    are those of the study (Llama 3's where the device has none), and planned interruptions are left out. Unknown rates
    have no causes and the source "unknown". Raises ConfigError for an unknown study.
    """
    if failures not in ("auto", "none", *STUDIES):
        raise ConfigError(
            f"unknown failure rates '{failures}'", "no published study has that name", suggestion(failures, STUDIES)
        )
    if failures == "none":
        return FailureRates("none", (), "no failures, as the spec says", "assumed")
    words = device.lower()
    own = next((study for part, study in DEVICE_STUDIES if part in words), None)
    base = STUDIES[own or "llama3"] if failures == "auto" else STUDIES[failures]
    if mtbf_hours_per_device is not None:
        return _scaled(base, mtbf_hours_per_device)
    if failures == "auto" and own is None:
        return FailureRates(UNKNOWN.name, (), f"{UNKNOWN.text} of {device}", UNKNOWN.source)
    return base


def rates_of(device: str, reliability: ReliabilitySpec) -> FailureRates:
    """Return the failure rates that a spec's table means for a device; the source is "unknown" where there are none."""
    return failure_rates(device, reliability.failures, reliability.mtbf_hours_per_device)


def _scaled(base: FailureRates, mtbf_hours: float) -> FailureRates:
    factor = base.mtbf_hours_per_device / mtbf_hours
    causes = tuple(
        Cause(cause.name, cause.component, cause.per_device_hour * factor, cause.evicts)
        for cause in base.causes
        if not cause.planned
    )
    text = f"one interruption in {mtbf_hours:,.0f} device-hours, from the spec; shares of causes as in {base.name}"
    return FailureRates("spec", causes, text, "published")
