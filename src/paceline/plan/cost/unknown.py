"""Figures that a forecast rests on and nobody measured, and how much wider they make the forecast's interval.

The half-widths that came with the constants are those of tables left out of the fit, of chips, precisions and programs
that other tables have. What no table had adds to them, in quadrature of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.cost.constants import Constants, family_of
from paceline.spec.forecast import Z80, Z95

# 80 % half-widths, as logarithms. Of chips: shares of published peaks of the fitted generations lie between 0.43 and
# 0.78, a fifth about the 0.65 that others are taken to have; memory and links are guessed as well. Of programs and
# precisions: chosen so that intervals of tables whose source is left out hold what they say; the development tables are
# among those, so they were looked at.
CHIP, PRECISION, PROGRAM = 0.30, 0.08, 0.05
# Of a program that is not named, or of which no convention is known: a 7B in bf16 on A100s makes 36 % of the peak in
# one (LLM360's Amber, arXiv:2312.06550) and 68 % in another (fms-fsdp's README): logarithms 0.32 off their middle.
UNNAMED = 0.30
# Of a generation that a single source measured: sources of one differ as much as generations do (power_limit.pooled),
# so half of the variance is left.
ONE_SOURCE = CHIP * math.sqrt(1 / 2)
# Of a peak that no document was read for: what the model's error of assumed figures has beyond that of published ones
# (intervals.TIME_ERROR), in quadrature of logarithms.
PEAK = 0.36
# Of a step's parts that wait for links, and for the host's launches: how good a network is and how fast a host, no row
# of a table tells. Whatever source is left out, the other tables' errors grow with both parts, most with launches: a
# fifth of the rows that hardly do anything else are off by more than 0.74 (docs/log.md, 2026-11-25).
COMMUNICATING, LAUNCHING = 0.3, 0.8
# Of a mixture of experts: how evenly tokens spread over them, and how a program moves and multiplies these, no column
# tells. In five rounds of blind rows intervals held 90 % of 445 dense rows and 68 % of 81 of mixtures, which are 82 %
# with it (docs/log.md, 2026-11-27). Fitted tables have twelve such rows, so spreads are fitted without it.
EXPERTS = 0.25
PER_DOUBLING = 0.02  # beyond the largest number of devices that was fitted

ONCE = "one source"  # what is known of a chip whose generation was measured once
READ_NOWHERE = "peak"
ROUTED = "experts"


@dataclass(frozen=True)
class Widths:
    """Half-widths of a step time's 80 % and 95 % intervals as logarithms, and why they are as wide."""

    narrow: float
    wide: float
    because: str

    def of_step(self, communicating: float, launching: float) -> Widths:
        """Return the half-widths of a step of which these parts wait for links, and for launches.

        Example: beside 0.18, a step that waits a fifth for links and a tenth for launches has
        sqrt(0.18^2 + 0.06^2 + 0.08^2) = 0.206.
        """
        more = math.hypot(COMMUNICATING * communicating, LAUNCHING * launching)
        return Widths(math.hypot(self.narrow, more), math.hypot(self.wide, more * Z95 / Z80), self.because)


def time_widths(
    constants: Constants,
    device: str,
    precision: str,
    program: str,
    devices: int,
    assumed: Sequence[str] = (),
    *,
    experts: bool = False,
) -> Widths:
    """Return how wide the intervals of a published device's step time are, with what of its rates is `assumed`.

    `experts` is whether the model is a mixture of them. A share of the peak that is assumed was chosen after one source
    at most. `program` is empty where none is known.

    Example: with 0.20 of the fit, a chip of no fitted generation has sqrt(0.20^2 + 0.30^2) = 0.36.
    """
    seen, found = constants.seen, [(constants.time_80, "")]
    if seen is None:
        return Widths(constants.time_80, constants.time_95, "")
    family = family_of(device)
    if family not in seen.families:
        found.append((CHIP, "chip"))
    elif family in seen.once or "sustained_share" in assumed:
        found.append((ONE_SOURCE, ONCE))
    if f"peak_flops.{precision}" in assumed:
        found.append((PEAK, READ_NOWHERE))
    if precision not in seen.precisions:
        found.append((PRECISION, "precision"))
    if program not in seen.programs:
        found.append((PROGRAM if program else UNNAMED, "program"))
    if experts:
        found.append((EXPERTS, ROUTED))
    if devices > seen.devices:
        found.append((PER_DOUBLING * math.log2(devices / seen.devices), "scale"))
    narrow = math.hypot(*(width for width, _ in found))
    wide = math.hypot(constants.time_95, *(width * Z95 / Z80 for width, _ in found[1:]))
    return Widths(narrow, wide, _words([what for _, what in found[1:]]))


def _words(unknown: list[str]) -> str:
    by_one, unread, routed = ONCE in unknown, READ_NOWHERE in unknown, ROUTED in unknown
    unknown = [what for what in unknown if what not in (ONCE, READ_NOWHERE, ROUTED)]
    known = [f"this {what}" for what in ("chip", "program") if what not in unknown and not (by_one and what == "chip")]
    never = [f"this {what}" for what in unknown]
    words = [f"{' and '.join(known)} measured"] if known else []
    words += ["this chip's generation by one source"] if by_one else []
    words += ["this chip's peak read nowhere"] if unread else []
    words += [f"{' and '.join(never)} never"] if never else []
    return ", ".join([*words, *(["how tokens spread over experts unknown"] if routed else [])])
