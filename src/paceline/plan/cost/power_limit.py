"""The share of a published peak that a device sustains, by the power it may draw for it.

A peak is printed at a clock that large products do not keep: their clock falls until they draw what the device may.
Power goes with the clock and the square of the voltage (Weste & Harris 2011, CMOS VLSI Design, section 5.1). Where the
voltage falls with the clock, the clock goes with the cube root of watts per FLOP/s; where the voltage has reached its
floor, with watts per FLOP/s themselves. Devices work between the two: the square root. One generation's share therefore
tells of its other devices, and those of all generations of a device of none.

The tables say so too: the shares of three generations fall by powers of 0.4, 0.5 and 0.7 between each two of them. By
the cube root dense rows in fp8 of B200, GB200 and GB300, which no constant is fitted on, come out the longer the more
watts the chip has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.plan.cost.constants import Constants, family_of
from paceline.spec.cluster import Device

EXPONENT = 1 / 2
# Dense FLOP/s in 16 bits for each watt of the device whose steps the tables of a generation have: A100 SXM 80 GB, H100
# SXM, B200, by the catalog.
REFERENCES = {"ampere": 312e12 / 400, "hopper": 989.4e12 / 700, "blackwell": 2250e12 / 1000}

# The part of its printed rate that the best product of an A100 SXM reaches, whose power does not limit it: no device
# whose own best product nobody measured is taken to sustain more. 271.2 of 312 TFLOP/s (stas00/ml-engineering,
# compute/accelerator/README.md, read 2026-11-27). The share of the best generation, 0.77, is too little: whole steps of
# GeForce cards exceed it, by 0.79 of an RTX 4090 in bf16 (IST-DASLab/llmq, benchmarks/4090x1.md).
LARGEST = 271.2 / 312


def flops_per_watt(device: Device) -> float | None:
    """Return a published device's dense FLOP/s in 16 bits for each watt it may draw; None where one is not known."""
    peak = max((device.peak_flops.get(name, 0.0) for name in ("bf16", "fp16")), default=0.0)
    return peak / device.rated_watts if peak and device.rated_watts else None


def sustained_share(device: Device, constants: Constants) -> float:
    """Return the part of its published peak that a device's large products sustain: as stated, else by its power.

    Example: with 0.6 for H100 at 1.41 TFLOP/s a watt, one of 2.16 (H100 PCIe) has 0.6 x (1.41 / 2.16)^(1/2) = 0.48.
    No device sustains more than its best product, as it was measured, or else LARGEST.
    """
    if device.sustained_share:
        return device.sustained_share
    family, density, largest = family_of(device.name), flops_per_watt(device), device.best_product or LARGEST
    if density is None:
        return min(largest, constants.share_of(device.name))
    if family in REFERENCES:
        return min(largest, constants.share[family] * (REFERENCES[family] / density) ** EXPONENT)
    level = math.fsum(_level(name, share) for name, share in known(constants).items()) / max(1, len(known(constants)))
    return min(largest, math.exp(level) / density**EXPONENT) if known(constants) else constants.share_of(device.name)


def known(constants: Constants) -> dict[str, float]:
    """Return the shares of the generations that have a reference."""
    return {name: share for name, share in constants.share.items() if name in REFERENCES}


def _level(family: str, share: float) -> float:
    """Return the logarithm of a share at one FLOP/s a watt."""
    return math.log(share) + EXPONENT * math.log(REFERENCES[family])


def pooled(shares: Mapping[str, float], sources: Mapping[str, int]) -> dict[str, float]:
    """Return shares of the generations drawn towards what all of them say of each, the more the fewer tell of one.

    `sources` counts who measured a generation; of one that nobody did, the share is what the others say. Sources of one
    generation are taken to differ as much as generations do, so n sources have the weight n / (n + 1) against the law
    (the posterior mean of a random effect: Gelman et al. 2013, Bayesian Data Analysis, section 5.4).
    """
    weights = {name: sources.get(name, 0) / (sources.get(name, 0) + 1) for name in REFERENCES if name in shares}
    if not any(weights.values()):
        return dict(shares)
    levels = {name: _level(name, shares[name]) for name in weights}
    common = math.fsum(weights[name] * levels[name] for name in weights) / math.fsum(weights.values())
    found = {name: common + weights[name] * (levels[name] - common) for name in weights}
    drawn = {name: math.exp(level) / REFERENCES[name] ** EXPONENT for name, level in found.items()}
    return {**shares, **drawn}
