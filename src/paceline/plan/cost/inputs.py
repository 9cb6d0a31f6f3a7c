"""What the cost formulas work on: the workload, the model's counts summed once, and the device's rates once looked up.

A search prices thousands of plans of one task on one cluster, so all that does not depend on the plan is computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from paceline.cluster.cluster import SOURCES, CalibrationStep, Cluster, Device, Figure
from paceline.plan.plan import Plan
from paceline.task.profile import BlockProfile, ModelProfile

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
STATE_VALUES = {"adamw": 2, "sgd": 1}  # optimizer state values per parameter: two moments; momentum

# Width at which products reach half of what wide ones sustain of a published peak (fitted with the shares in cluster/
# catalog.py on LLM Foundry's MPT table).
HALF_WIDTH = 150
# Attention's rate over what products sustain: FlashAttention-2 reaches 50 to 73 % of an A100's peak (Dao 2023,
# arXiv:2307.08691, figure 4) and about 35 % of an H100's (Shah et al. 2024, arXiv:2407.08608, section 1).
ATTENTION_OVER_PRODUCTS = 0.64
# Attention on a CPU nobody has probed, as a part of its rate of products; probed CPUs show 0.1 to 0.5.
CPU_ATTENTION_EFFICIENCY = 0.4
MEMORY_EFFICIENCY = 0.8  # of a published bandwidth, as streaming kernels reach it
ATTENTION_PASSES = 3.5  # forward 1, backward 2.5: the backward pass computes the scores again (FlashAttention-2)


def weakest(*sources: str) -> str:
    """Return the weakest of the sources: measured, published, assumed, unknown in falling strength."""
    return max(sources, key=SOURCES.index)


@dataclass(frozen=True)
class Counts:
    """Counts of one sample's forward pass over some blocks, products grouped by their width."""

    matmul: tuple[tuple[int, float], ...]  # (width, FLOPs)
    attention_flops: float
    moved_elements: float
    operators: int


def count(blocks: tuple[BlockProfile, ...]) -> Counts:
    """Return the sums over the blocks."""
    by_width: dict[int, float] = {}
    for block in blocks:
        if block.matmul_flops:
            by_width[block.matmul_width] = by_width.get(block.matmul_width, 0.0) + block.matmul_flops
    return Counts(
        tuple(sorted(by_width.items())),
        sum(block.attention_flops for block in blocks),
        sum(block.moved_elements for block in blocks),
        sum(block.operators for block in blocks),
    )


@dataclass(frozen=True)
class Rates:
    """A device's rates in one precision, and how far measured steps depart from the sum of parts."""

    device: Device
    precision: str

    @property
    def element_bytes(self) -> int:
        """Bytes of one value in the compute dtype."""
        return BYTES[self.precision]

    def product_rate(self, width: int) -> float:
        """Return FLOP/s of products of this width; NaN where unknown."""
        points = self.device.matmul_flops.get(self.precision, ())
        if self.device.matmul_source != "published":
            return interpolate(points, width)
        return interpolate(points, width) * self.device.sustained_share * width / (width + HALF_WIDTH)

    def attention_rate(self, sequence: int) -> float:
        """Return FLOP/s of causal attention over forward and backward; NaN where unknown."""
        measured = self.device.attention_flops.get(self.precision, ())
        if measured:
            return interpolate(measured, sequence)
        peak = max((rate for _, rate in self.device.matmul_flops.get(self.precision, ())), default=math.nan)
        return peak * (
            CPU_ATTENTION_EFFICIENCY
            if self.device.kind == "cpu"
            else ATTENTION_OVER_PRODUCTS * self.device.sustained_share
        )

    @cached_property
    def product_source(self) -> str:
        """How the rate of products is known."""
        return self.device.matmul_source if self.precision in self.device.matmul_flops else "unknown"

    @cached_property
    def attention_source(self) -> str:
        """How the rate of attention is known."""
        return "measured" if self.precision in self.device.attention_flops else weakest("assumed", self.product_source)

    @cached_property
    def memory_rate(self) -> float:
        """Bytes per second that memory-bound operators reach."""
        figure = self.device.memory_bytes_per_second
        return figure.value * (MEMORY_EFFICIENCY if figure.source == "published" else 1.0)

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
            return Rates(self.device, "fp32").calibration_ratios
        return tuple(ratio for step in steps if math.isfinite(ratio := self._ratio(step)) and ratio > 0)

    def _ratio(self, step: CalibrationStep) -> float:
        counts = Counts(((step.width, step.matmul_flops),), step.attention_flops, step.moved_elements, step.operators)
        modelled = (
            3 * self.product_seconds(counts)
            + self.attention_seconds(counts, step.sequence)
            + 3 * self.moving_seconds(counts)
            + 3 * counts.operators * self.device.launch_seconds.value
        )
        return (step.seconds - 28 * step.parameters / self.optimizer_rate.value) / modelled

    @cached_property
    def factor(self) -> float:
        """The calibration factor: geometric mean of the ratios, 1 where nothing was measured."""
        ratios = self.calibration_ratios
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 1.0

    @cached_property
    def relative_spread(self) -> float:
        """How much repeats and sizes of the calibration steps differ, as a relative half-width; 0 without them."""
        repeats = max((step.relative_spread / 2 for step in self.device.calibration), default=0.0)
        ratios = self.calibration_ratios
        return math.hypot(repeats, (max(ratios) / min(ratios)) ** 0.5 - 1 if ratios else 0.0)

    def product_seconds(self, counts: Counts) -> float:
        """Return seconds of one forward pass's products, before the calibration factor."""
        return sum(flops / self.product_rate(width) for width, flops in counts.matmul)

    def attention_seconds(self, counts: Counts, sequence: int) -> float:
        """Return seconds of attention, forward and backward, before the calibration factor."""
        if not counts.attention_flops:
            return 0.0
        return ATTENTION_PASSES * counts.attention_flops / self.attention_rate(sequence)

    def moving_seconds(self, counts: Counts) -> float:
        """Return seconds of one forward pass's memory-bound operators, before the calibration factor."""
        return counts.moved_elements * self.element_bytes / self.memory_rate


def interpolate(points: tuple[tuple[int, float], ...], at: float) -> float:
    """Return the rate at a size between measured points, linear in the logarithms; beyond them the end points hold.

    NaN for no points; the value itself for a single one.
    """
    if not points:
        return math.nan
    below = max((point for point in points if point[0] <= at), default=points[0])
    above = min((point for point in points if point[0] >= at), default=points[-1])
    if below[0] == above[0] or below[0] <= 0:
        return below[1]
    share = math.log(at / below[0]) / math.log(above[0] / below[0])
    return math.exp(math.log(below[1]) * (1 - share) + math.log(above[1]) * share)


@dataclass(frozen=True)
class Context:
    """A task on a cluster: all that a plan's price depends on besides the plan."""

    profile: ModelProfile
    cluster: Cluster
    batch_samples: int
    steps: int
    optimizer: str = "adamw"

    def rates(self, precision: str) -> Rates:
        """Return the device's rates in a precision; looked up once."""
        if precision not in self._rates:
            self._rates[precision] = Rates(self.cluster.device, precision)
        return self._rates[precision]

    @cached_property
    def _rates(self) -> dict[str, Rates]:
        return {}

    @cached_property
    def all_counts(self) -> Counts:
        """Counts of the whole model."""
        return count(self.profile.blocks)

    @cached_property
    def recomputable_counts(self) -> Counts:
        """Counts of the blocks that activation checkpointing applies to."""
        return count(self.recomputable)

    @cached_property
    def recomputable(self) -> tuple[BlockProfile, ...]:
        """The blocks that activation checkpointing applies to; they are also the units of sharding."""
        return tuple(block for block in self.profile.blocks if block.recomputable)

    @cached_property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        return self.profile.parameters

    @cached_property
    def root_parameters(self) -> int:
        """Parameters outside the repeated blocks: one unit of sharding of its own."""
        return self.parameters - sum(block.parameters for block in self.recomputable)

    @cached_property
    def units(self) -> int:
        """Units of sharding: each repeated block, and the rest."""
        return len(self.recomputable) + (1 if self.root_parameters else 0)

    @cached_property
    def largest_unit(self) -> int:
        """Parameters of the largest unit of sharding."""
        return max([block.parameters for block in self.recomputable] + [self.root_parameters])

    def gathered_share(self, plan: Plan) -> float:
        """Return the part of the parameters that sharding gathers: where experts are spread, not others' experts."""
        return 1 - self.profile.expert_parameters / self.parameters * (1 - 1 / plan.layout.ep)

    def device_samples(self, plan: Plan) -> int:
        """Return the samples per step on the device with the largest part of the batch."""
        return -(-self.batch_samples // plan.layout.data_degree)
