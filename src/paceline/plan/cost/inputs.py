"""What the cost formulas work on: the workload, the model's parts summed once, and the device's rates once looked up.

A search prices thousands of plans of one task on one cluster, so all that does not depend on the plan is computed here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from paceline.cluster.cluster import Cluster
from paceline.plan.cost.parts import Counts, Part, Stage, split_stages, whole
from paceline.plan.cost.rates import Rates
from paceline.plan.cost.recompute import again_seconds, block_modes
from paceline.plan.cost.ring import Ring, ring
from paceline.plan.plan import Plan
from paceline.plan.split import split_by_cost
from paceline.task.profile import BlockProfile, ModelProfile


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
    def whole(self) -> Part:
        """The whole model as one part."""
        return whole(self.profile)

    @cached_property
    def all_counts(self) -> Counts:
        """Counts of the whole model."""
        return self.whole.counts

    @property
    def recomputable(self) -> bool:
        """Whether there are blocks that activation checkpointing applies to."""
        return bool(self.whole.recomputable)

    @cached_property
    def stream_elements(self) -> float:
        """Elements of what one sample passes from block to block."""
        return max((block.input_elements for block in self.profile.blocks), default=0.0)

    def device_samples(self, plan: Plan) -> int:
        """Return the samples per step on the device with the largest part of the batch."""
        return -(-self.batch_samples // plan.layout.data_degree)

    def stages(self, plan: Plan) -> tuple[Stage, ...]:
        """Return the different parts of the plan's pipeline ranks: one, the whole model, without a pipeline."""
        ranks = plan.layout.pp
        if ranks == 1:
            return self._one_stage
        sizes = plan.stages or self.split(ranks * plan.virtual_stages)
        key = (sizes, ranks)
        if key not in self._stages:
            self._stages[key] = split_stages(self.profile, sizes, ranks)
        return self._stages[key]

    def split(self, stages: int) -> tuple[int, ...]:
        """Return the repeated blocks of each of so many stages, split by cost; () where there are too few blocks."""
        if stages not in self._splits:
            self._splits[stages] = split_by_cost(self.profile, stages)
        return self._splits[stages]

    @cached_property
    def _one_stage(self) -> tuple[Stage, ...]:
        return (Stage(self.whole, 0, 1),)

    @cached_property
    def _stages(self) -> dict[tuple[tuple[int, ...], int], tuple[Stage, ...]]:
        return {}

    @cached_property
    def _splits(self) -> dict[int, tuple[int, ...]]:
        return {}

    def ring(self, plan: Plan, axis: str) -> Ring:
        """Return the ring of the groups along an axis of the plan's layout, on the links that they really cross."""
        group = plan.layout.group(axis)
        if group not in self._rings:
            self._rings[group] = ring(self.cluster, *group)
        return self._rings[group]

    @cached_property
    def _rings(self) -> dict[tuple[int, int], Ring]:
        return {}

    def slowest(self, plan: Plan) -> Part:
        """Return the part that computes longest: it sets the pace of the others."""
        stages = self.stages(plan)
        if len(stages) == 1:
            return stages[0].part
        return max(stages, key=lambda stage: self.busy_seconds(stage.part, plan)).part

    def heaviest(self, plan: Plan) -> Part:
        """Return the part with the most parameters."""
        return max((stage.part for stage in self.stages(plan)), key=lambda part: part.parameters)

    def busy_seconds(self, part: Part, plan: Plan) -> float:
        """Return the seconds that one sample's arithmetic takes on a device of this part, recompute included."""
        key = (id(part), *_recompute_key(plan))
        if key not in self._busy:
            rates, tp = self.rates(plan.precision), plan.layout.tp
            sequence = self.profile.tokens_per_sample
            seconds = 3 * rates.product_seconds(part.counts, tp)
            seconds += (rates.attention_seconds(part.counts, sequence) + 3 * rates.moving_seconds(part.counts)) / tp
            for mode, again in self.by_mode(plan, part).items():
                seconds += again_seconds(again.counts, plan, mode, rates, sequence)
            self._busy[key] = rates.factor * seconds / plan.layout.cp
        return self._busy[key]

    @cached_property
    def _busy(self) -> dict[tuple[Hashable, ...], float]:
        return {}

    def by_mode(self, plan: Plan, part: Part) -> dict[str, Part]:
        """Return the part's repeated blocks by their mode of recompute; modes that no block has are left out."""
        key = (id(part), *_recompute_key(plan))
        if key not in self._by_mode:
            modes = block_modes(part.recomputable, plan, self.rates(plan.precision), self.profile.tokens_per_sample)
            groups: dict[str, list[BlockProfile]] = {}
            for mode, block in zip(modes, part.recomputable, strict=True):
                groups.setdefault(mode, []).append(block)
            self._by_mode[key] = {mode: Part(tuple(blocks)) for mode, blocks in groups.items()}
        return self._by_mode[key]

    @cached_property
    def _by_mode(self) -> dict[tuple[Hashable, ...], dict[str, Part]]:
        return {}

    def with_blocks(self, plan: Plan) -> Plan:
        """Return the plan with the mode of every repeated block in it, where a memory budget decides on them.

        The budget is that of each pipeline rank's own blocks.
        """
        if plan.recompute != "budget":
            return plan
        repeated = [block for block in self.profile.blocks if block.recomputable]
        sizes = (plan.stages or self.split(plan.layout.pp * plan.virtual_stages)) if plan.layout.pp > 1 else ()
        stages = _runs(sizes or (len(repeated),))
        found = [""] * len(repeated)
        for rank in range(plan.layout.pp):
            held = [index for stage in stages[rank :: plan.layout.pp] for index in stage]
            blocks, rates = [repeated[index] for index in held], self.rates(plan.precision)
            modes = block_modes(blocks, plan, rates, self.profile.tokens_per_sample)
            for index, mode in zip(held, modes, strict=True):
                found[index] = mode
        return dataclasses.replace(plan, recompute_blocks=tuple(found))


def _runs(sizes: tuple[int, ...]) -> list[range]:
    """Return consecutive ranges of these lengths."""
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _recompute_key(plan: Plan) -> tuple[Hashable, ...]:
    """Return all of a plan that decides what a block computes again, and keeps of one sample."""
    layout = plan.layout
    asked = (plan.recompute, plan.recompute_budget, plan.recompute_save, plan.offloads_activations)
    return (layout.tp, layout.cp, plan.precision, *asked)
