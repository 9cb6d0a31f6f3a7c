"""The device's rates as the cost formulas use them: measured of a CPU that was probed, else shares of peaks.

Of an accelerator, probed or not, a product takes its arithmetic at the share of the peak that large ones sustain, and
the part of moving its operands that arithmetic does not hide: the fewer rows or columns a product has, the less work
there is for each element moved (Williams et al. 2009, the roofline, doi:10.1145/1498765.1498785, with a soft corner).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from paceline.plan.cost import power_limit
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.constants import Constants, read_constants
from paceline.spec.cluster import FUSED_ADAMW_BYTES, SOURCES, CalibrationStep, Device, Figure

# Bytes of an activation. With fp8 and fp4 only the operands of products are cast; what is kept and moved stays in bf16.
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 2, "fp4": 2}

LOW = ("fp8", "fp4")  # of the operands of products alone

# Attention on a CPU nobody has probed, as a part of its rate of products; probed CPUs show 0.1 to 0.5.
CPU_ATTENTION_EFFICIENCY = 0.4
# Rows of operands that do not begin at multiples of so many bytes keep products off the matrix units (NVIDIA, Matrix
# Multiplication Background User's Guide, section 4.1). Fused attention pads its heads.
ALIGNED_BYTES = 16
# The part of printed fp32 FLOP/s that products off the matrix units reach: 51.8 of 67 TFLOP/s, as the probe of an H200
# has it (torch 2.11, 2026-11-27).
PLAIN_SHARE = 0.77
LEAST_NARROWNESS = 0.5  # heads wider than those that were measured are taken to be at most twice as fast
ATTENTION_PASSES = 3.5  # forward 1, backward 2.5: the backward pass computes the scores again (FlashAttention-2)


def weakest(*sources: str) -> str:
    """Return the weakest of the sources: measured, published, assumed, unknown in falling strength."""
    return max(sources, key=SOURCES.index)


@dataclass(frozen=True)
class Rates:
    """A device's rates in one precision, and how far measured steps depart from the sum of parts."""

    device: Device
    precision: str
    constants: Constants = field(default_factory=read_constants)

    @property
    def element_bytes(self) -> int:
        """Bytes of one value in the compute dtype."""
        return BYTES[self.precision]

    @property
    def by_shares(self) -> bool:
        """Whether rates are shares of peaks, of published ones or of what a probed GPU reaches in bursts."""
        return self.device.matmul_source == "published" or self.device.measured_peaks

    @cached_property
    def peak(self) -> float:
        """The largest known FLOP/s of products; NaN where unknown."""
        return max((rate for _, rate in self.device.matmul_flops.get(self.precision, ())), default=math.nan)

    @cached_property
    def large_product_rate(self) -> float:
        """FLOP/s that large products sustain in training; NaN where unknown."""
        return self.peak * (self.sustained_share if self.by_shares else 1.0)

    @cached_property
    def sustained_share(self) -> float:
        """The part of its peak that large products sustain: as stated, else as its power allows.

        A measured peak is the best product's in a burst, which is LARGEST of what would be printed at most.
        """
        share = power_limit.sustained_share(self.device, self.constants)
        return share / power_limit.LARGEST if self.device.measured_peaks else share

    def product_seconds_per_flop(self, width: Floats, rows: Floats, split: Floats) -> Floats:
        """Return the seconds of a FLOP in products of `rows` rows whose two widths' geometric mean is `width`.

        `split` devices share every product: each has one of its two widths divided.
        """
        if not self.by_shares:
            points = self.device.matmul_flops.get(self.precision, ())
            return 1 / interpolate(points, np.round(width / np.sqrt(split)))
        per_flop = self.element_bytes / 2 * ((1 + split) / np.maximum(width, 1) + 1 / rows)
        return 1 / self.large_product_rate + self.constants.operand_traffic * per_flop / self.memory_rate

    def product_rate(self, width: int) -> float:
        """Return FLOP/s of long products of this width; NaN where unknown."""
        return float(1 / self.product_seconds_per_flop(np.array(float(width)), np.array(math.inf), np.array(1.0)))

    def attention_rate(self, sequence: int, head_width: float = 0.0) -> float:
        """Return FLOP/s of fused causal attention over forward and backward; NaN where unknown.

        `head_width` 0 stands for heads as they were measured.
        """
        measured = self.device.attention_flops.get(self.precision, ())
        if measured:
            return float(interpolate(measured, np.array(sequence))) / self._narrowness(sequence, head_width)
        if self.device.kind == "cpu":
            return self.peak * CPU_ATTENTION_EFFICIENCY
        if self.precision in LOW:
            return Rates(self.device, "bf16", self.constants).attention_rate(sequence)
        return self.large_product_rate * self.constants.attention_of(self.device.name)

    def _narrowness(self, sequence: int, head_width: float) -> float:
        """Return the seconds of a FLOP in attention of heads of this width over those of the heads that were measured.

        A score takes `a + b d` seconds: its softmax whatever the width d, its products in proportion (Dao 2023,
        arXiv:2307.08691, section 3.1). Example: heads of 32 that take 1.4 times as long for each FLOP as those of 64
        make it 1.8 times at 21 and 0.8 times at 128.
        """
        narrow = self.device.attention_narrow_flops.get(self.precision, ())
        if not narrow or not head_width:
            return 1.0
        wide, half = self.device.head_widths
        at = np.array([size for size, _ in narrow])
        slower = interpolate(self.device.attention_flops[self.precision], at) / np.array([rate for _, rate in narrow])
        ratio = float(interpolate(tuple(zip(at.tolist(), slower.tolist(), strict=True)), np.array(sequence)))
        return max(LEAST_NARROWNESS, 1 + (ratio - 1) * (wide / head_width - 1) / (wide / half - 1))

    @cached_property
    def product_source(self) -> str:
        """How the rate of products is known."""
        return self.device.rate_source(self.precision)

    @cached_property
    def attention_source(self) -> str:
        """How the rate of attention is known."""
        return "measured" if self.precision in self.device.attention_flops else weakest("assumed", self.product_source)

    @cached_property
    def memory_rate(self) -> float:
        """Bytes per second that memory-bound operators reach."""
        figure = self.device.memory_bytes_per_second
        is_printed = figure.source == "published" or (figure.source == "assumed" and self.by_shares)
        return figure.value * (self.constants.memory_share if is_printed else 1.0)

    @property
    def memory_source(self) -> str:
        """How that rate is known."""
        return self.device.memory_bytes_per_second.source

    @cached_property
    def launch_seconds(self) -> Figure:
        """The host's time to start one operator."""
        figure = self.device.launch_seconds
        if self.by_shares and figure.source != "measured":
            return Figure(self.constants.launch_seconds, "assumed", "fitted")
        return figure

    @cached_property
    def optimizer_rate(self) -> Figure:
        """Bytes per second of the fused update."""
        figure = self.device.optimizer_bytes_per_second
        return figure or Figure(self.memory_rate, self.device.memory_bytes_per_second.source)

    @cached_property
    def calibration_ratios(self) -> tuple[float, ...]:
        """Measured over modelled time of each calibration step, in this precision, or fp32's where it has none."""
        steps = [step for step in self.device.calibration if step.precision == self.precision]
        if not steps and self.precision != "fp32":
            return Rates(self.device, "fp32", self.constants).calibration_ratios
        return tuple(ratio for step in steps if math.isfinite(ratio := self.ratio_of(step)) and ratio > 0)

    def ratio_of(self, step: CalibrationStep) -> float:
        """Return a calibration step's measured time over the sum of its parts, the optimizer's update aside."""
        per_flop = self.product_seconds_per_flop(np.array(step.width), np.array(step.sequence), np.array(1.0))
        modelled = (
            3 * step.matmul_flops * float(per_flop)
            + ATTENTION_PASSES * step.attention_flops / self.attention_rate(step.sequence, step.head_width)
            + 3 * step.moved_elements * self.element_bytes / self.memory_rate
            + 3 * step.operators * self.device.launch_seconds.value
        )
        return (step.seconds - FUSED_ADAMW_BYTES * step.parameters / self.optimizer_rate.value) / modelled

    @cached_property
    def factor(self) -> float:
        """The calibration factor: geometric mean of the ratios, 1 where nothing was measured."""
        ratios = self.calibration_ratios
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0

    @cached_property
    def size_spread(self) -> float:
        """How much the calibration factors of different sizes differ, as a relative half-width; 0 without them."""
        ratios = self.calibration_ratios
        return (max(ratios) / min(ratios)) ** 0.5 - 1 if ratios else 0.0

    def spread_of(self, seconds: Floats) -> Floats:
        """Return how far a step of so many seconds may be off by chance, as a relative half-width; 0 without a probe.

        Repeats of a single call differ by themselves; a step is the sum of many, so its part of that is less by the
        square root of how many of a calibration step's length it holds. How far two passes of the probe differed is
        the machine's pace, which a step has all along.

        Example: calls of 0.1 s that spread by 20 %, in passes 6 % apart: a step of 1.6 s is within 2.5 and 3 %, 3.9.
        """
        found = np.zeros(np.shape(seconds))
        for step in self.device.calibration:
            calls = np.maximum(1.0, seconds / step.seconds)
            found = np.maximum(found, np.hypot(step.relative_spread / 2 / np.sqrt(calls), step.relative_drift / 2))
        return found

    def spread_of_step(self, seconds: float) -> float:
        """Return how far one step of so many seconds may be off by chance: `spread_of` of a single number."""
        return float(self.spread_of(np.array(seconds)))

    def unfused_seconds_per_flop(self, head_width: float, sequence: int) -> float:
        """Return the seconds of a FLOP in attention's two products where scores are written: narrow ones."""
        if self.precision in LOW:
            return Rates(self.device, "bf16", self.constants).unfused_seconds_per_flop(head_width, sequence)
        if not self.by_shares:
            return 1 / self.attention_rate(sequence)
        per_flop = self.element_bytes / 2 * (1 / head_width + 2 / sequence)
        moving = self.constants.operand_traffic * per_flop / self.memory_rate
        plain = self.device.matmul_flops.get("fp32")
        if plain and round(head_width) * self.element_bytes % ALIGNED_BYTES:
            return 1 / (self.sustained_share * plain[-1][1]) + moving
        return 1 / self.large_product_rate + moving

    @cached_property
    def unaligned_seconds(self) -> float:
        """Seconds that a FLOP takes longer in products whose operands' rows are not aligned: at plain fp32's rate.

        Of GPUs in precisions of two bytes; fp32 has no matrix units to be kept off, but for TF32.
        """
        plain = self.device.matmul_flops.get("fp32")
        if not plain or not self.by_shares or self.device.kind == "cpu" or self.element_bytes != 2:
            return 0.0
        rate = plain[-1][1] * (1.0 if self.device.measured_peaks else PLAIN_SHARE)
        longer = 1 / rate - 1 / self.large_product_rate
        return max(0.0, longer) if math.isfinite(longer) else 0.0

    @property
    def beyond_picking_seconds(self) -> float:
        """Seconds that picking an element by index takes in each of three passes beyond reading and writing it.

        Of a CPU alone: the probe picks so few rows that an accelerator would be timed at starting its kernels.
        Example: 4 B at 11 GB/s, there and back, are 0.12 ns a pass; reading and writing 8 B at 80 GB/s are 0.1 of them.
        """
        figure = self.device.picked_bytes_per_second
        if figure is None or not figure.value or self.device.kind != "cpu":
            return 0.0
        return max(0.0, self.element_bytes / figure.value / 3 - 2 * self.seconds_per_element)

    @property
    def seconds_per_element(self) -> float:
        """Seconds in which memory-bound operators read or write one element."""
        return self.element_bytes / self.memory_rate


def interpolate(points: tuple[tuple[int, float], ...], at: Floats) -> Floats:
    """Return the rate at sizes between measured points, linear in the logarithms; beyond them the end points hold.

    NaN for no points; the value itself for a single one.
    """
    if not points:
        return np.full(np.shape(at), np.nan)
    if len(points) == 1:
        return np.full(np.shape(at), points[0][1])
    sizes, rates = np.log(np.array(points)).T
    found: Floats = np.exp(np.interp(np.log(np.maximum(at, 1e-9)), sizes, rates))
    return found
