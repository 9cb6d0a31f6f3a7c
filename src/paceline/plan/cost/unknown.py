"""Figures that a forecast rests on and nobody measured, and how much wider they make the forecast's interval.

The half-widths that came with the constants are those of tables left out of the fit, of chips, precisions and programs
that other tables have. What no table had adds to them, in quadrature of logarithms: all of it upwards, since what
nobody knows of makes steps longer, and a part of it downwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.plan.cost.constants import Constants, family_of
from paceline.spec.forecast import Z80, Z95

# 80 % half-widths upwards, as logarithms. All but those of chips, precisions, single sources, unread peaks, experts and
# scale are fitted on what blind rows missed when they were first scored, 1,100 rows of 172 sources in eleven rounds, by
# their interval score, each source as eight rows at most (docs/log.md, 2026-11-29). These figures are rounded from fits
# with and without the last two rounds.
CHIP, PRECISION, PROGRAM = 0.30, 0.08, 0.35
# Of a program that is not named, or of which no convention is known: a 7B in bf16 on A100s makes 36 % of the peak in
# one (LLM360's Amber, arXiv:2312.06550) and 68 % in another (fms-fsdp's README): logarithms 0.32 off their middle.
UNNAMED = 0.35
# The part of it that goes downwards: a tenth of those rows took less than 0.8 of what was forecast, and a tenth took
# more than 2.2 times as long.
DOWNWARDS = 0.30
# Of a generation that a single source measured: sources of one differ as much as generations do (power_limit.pooled),
# so half of the variance is left.
ONE_SOURCE = CHIP * math.sqrt(1 / 2)
# Of a peak that no document was read for: what the model's error of assumed figures has beyond that of published ones
# (intervals.TIME_ERROR), in quadrature of logarithms.
PEAK = 0.36
# Of a step's parts that wait for links, and for the host's launches: how good a network is and how fast a host, no row
# of a table tells. Nor where launches are all but hidden: `STARTING` goes with what they would take by themselves,
# since a slower host is waited for. Of rows that launch for more than half of their step intervals held 33 % without
# it.
COMMUNICATING, LAUNCHING, STARTING = 1.00, 0.80, 1.20
# Of rows that leave open what was computed again or in which micro-batches: they are taken to be the fastest that fit.
OPEN = 0.40
# Of a mixture of experts: how evenly tokens spread over them, and how a program moves and multiplies these, no column
# tells.
EXPERTS = 0.45
# Of what a stranger's program holds of memory and no table measured. Blind rows that print memory, 188 of 31 sources,
# were first off by 20 % in the median, four in five of them by up to 34 %, most of them short.
HELD = 0.30
PER_DOUBLING = 0.02  # beyond the largest number of devices that was fitted

ONCE = "one source"  # what is known of a chip whose generation was measured once
READ_NOWHERE = "peak"
ROUTED = "experts"


@dataclass(frozen=True)
class Widths:
    """Half-widths of a step time's 80 % and 95 % intervals as logarithms, and why they are as wide.

    `below` are those downwards, where they are others than those upwards.
    """

    narrow: float
    wide: float
    because: str
    below: tuple[float, float] | None = None

    @property
    def downwards(self) -> tuple[float, float]:
        """The half-widths of the 80 % and the 95 % interval downwards."""
        return self.below or (self.narrow, self.wide)

    def of_step(
        self, communicating: float, launching: float, starting: float = 0.0, *, is_open: bool = False
    ) -> Widths:
        """Return the half-widths of a step of which these parts wait for links, and for launches.

        `starting` is what launching would take by itself, as a part of the step. `is_open` is whether nobody says in
        which micro-batches it ran, or what it computed again.

        Example: beside 0.18, a step that waits a fifth for links and takes the host a tenth to start, all of it hidden,
        has sqrt(0.18^2 + 0.20^2 + 0.12^2) = 0.295 upwards, and with three tenths of that 0.193 downwards.
        """
        more = math.hypot(
            COMMUNICATING * communicating, LAUNCHING * launching, STARTING * min(1.0, starting), OPEN * is_open
        )
        narrow, wide = self.downwards
        below = math.hypot(narrow, DOWNWARDS * more), math.hypot(wide, DOWNWARDS * more * Z95 / Z80)
        return Widths(math.hypot(self.narrow, more), math.hypot(self.wide, more * Z95 / Z80), self.because, below)


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

    Example: with 0.20 of the fit, a chip of no fitted generation has sqrt(0.20^2 + 0.30^2) = 0.36 upwards, and
    sqrt(0.20^2 + 0.09^2) = 0.22 downwards.
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
    more = math.hypot(*(width for width, _ in found[1:]))
    below, above = (
        (math.hypot(constants.time_80, part * more), math.hypot(constants.time_95, part * more * Z95 / Z80))
        for part in (DOWNWARDS, 1.0)
    )
    return Widths(*above, _words([what for _, what in found[1:]]), below)


def held_widths(widths: tuple[float, float], constants: Constants, program: str) -> tuple[float, float]:
    """Return the half-widths of memory's 80 % and 95 % intervals of a program, of those of programs that were fitted.

    `program` is empty where none is known.

    Example: beside 0.12, a program that no table measured has sqrt(0.12^2 + 0.30^2) = 0.32.
    """
    if constants.seen is None or program in constants.seen.programs:
        return widths
    return math.hypot(widths[0], HELD), math.hypot(widths[1], HELD * Z95 / Z80)


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
