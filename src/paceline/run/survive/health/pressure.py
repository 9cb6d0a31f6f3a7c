"""Memory pressure: where a device's memory gets short during a run, all ranks go on with half the micro-batch.

Ranks compare what they use between two steps: after the first steps of a start, at every check, and before a batch
whose longest sample is longer than any before, where the data say their lengths. What is computed stays the same: the
step's gradient is the sum over all rows of the global batch, however many pass at once.
"""

from __future__ import annotations

import dataclasses

from paceline.plan.feasible.micro_batch import with_micro_batch
from paceline.plan.placement.recut import keeps_passes
from paceline.run.loop.resume import RunIdentity
from paceline.run.loop.under_plan import UnderPlan
from paceline.run.memory.free_memory import free_bytes
from paceline.run.memory.on_gpu import allocator_bytes
from paceline.run.memory.spent import MemoryMeter, held_bytes
from paceline.run.process.world import World
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.records.decided import MICRO_BATCH
from paceline.spec.journal.settled import conditions_of, settled_micro_batch
from paceline.spec.plan import Plan
from paceline.units import format_bytes, plural

LOOKS_EVERY = 100  # steps, in a run without checks
GROWN = 1.02  # of what was used at the last decision: more is a growth, and no noise


class MemoryPressure:
    """Looks at what the ranks use of their memory, and decides on the micro-batch."""

    def __init__(self, world: World, under: UnderPlan, meter: MemoryMeter, part: float) -> None:
        """`part` of a device's memory in use is too much."""
        self._world, self._under, self._meter, self._part = world, under, meter, part
        self._retries, self._acted_at, self._longest = self._alloc_retries(), 0, 0

    def growth(self, longest: int, coming: int) -> float:
        """Return how many times as long the samples of the coming batch are as those of any before, 1 where none is.

        `longest` is the length of the longest sample of the step that was made, `coming` of the one that comes.
        """
        before = max(self._longest, longest)
        self._longest = max(before, coming)
        return self._longest / before if before else 1.0

    def decided(self, step: int, growth: float = 1.0) -> tuple[Plan | None, list[DecisionRecord]]:
        """Return the plan to go on with, and why. None where all stays as it is. Every rank calls it alike.

        `growth` is how many times as long the coming samples are: what is no weight, gradient or state of the optimizer
        grows so.
        """
        used, retries = self._meter.recent_bytes(), self._alloc_retries()
        limit = self._meter.now_bytes() + free_bytes(self._world.device)[0]
        again, self._retries = retries - self._retries, retries
        built = self._under.built
        held = min(used, sum(held_bytes(built.model, built.optimizer).values())) if growth > 1.0 else used
        ahead = held + (used - held) * growth
        # A CPU's heap keeps what it had: only what is used beyond the last time says that it was not enough.
        part = ahead / limit if used > self._acted_at or growth > 1.0 else 0.0
        most, any_again = self._world.maximum([part, float(again)])
        if most < self._part and not any_again:
            return None, []
        told = self._world.gather((part, used, again, held / limit))
        rank = max(range(len(told)), key=lambda each: (told[each][2] > 0, told[each][0]))
        fullest, bytes_used, emptied, part_held = told[rank]
        now = self._under.plan
        evidence = {"step": step, "rank": rank, "used_bytes": bytes_used, "part": fullest, "limit": self._part,
                    "allocator_retries": emptied, "conditions": conditions_of(now), "growth": growth}  # fmt: skip
        because = f"after step {step} rank {rank} uses {format_bytes(bytes_used)}, "
        because += f"{fullest:.0%} of its memory" if growth <= 1.0 else (
            f"and would use {fullest:.0%} of its memory in the next step, whose longest sample is {growth:.3g} times as"
            " long as any before")  # fmt: skip
        because += f", and its allocator was emptied {plural(emptied, 'time')}" if emptied else ""
        plan, share = self._smaller(now), (fullest - part_held) / 2
        while growth > 1.0 and plan is not None and part_held + share >= self._part and (less := self._smaller(plan)):
            plan, share = less, share / 2
        if plan is None:
            return None, []
        self._acted_at = round(GROWN * max(each[1] for each in told))
        self._meter.begin_anew()
        evidence["micro_batch"] = plan.micro_batch
        decision = DecisionRecord(MICRO_BATCH, now.micro_batch, plan.micro_batch, because, evidence)
        return plan, [decision]

    def _smaller(self, plan: Plan) -> Plan | None:
        """Return the plan with half its micro-batch; None where more passes would help nothing, or are not the same."""
        if plan.micro_batch == 1 or keeps_passes(plan) or self._under.sees_whole_batch:
            return None
        changed = with_micro_batch(plan, plan.micro_batch // 2)
        return dataclasses.replace(changed, rows=plan.rows)

    def _alloc_retries(self) -> int:
        """Return how often CUDA's allocator has had to empty its cache for want of memory."""
        device = self._world.device
        return allocator_bytes(device).retries if device.type == "cuda" else 0


def as_settled(run: RunIdentity, plan: Plan, world: World) -> Plan:
    """Return the plan with the micro-batch that the run has settled on so far, where it is the run's to settle.

    Every rank calls it.
    """
    if not run.spec.plan.confirms:
        return plan
    settled: int | None = world.share(settled_micro_batch(run.dir, plan) if world.is_first else None)
    return plan if settled is None else with_micro_batch(plan, settled)
