"""A task on groups of different devices: unequal batches per replica, or unequal stages of one pipeline. Prices only.

Replicas: every group holds the model in a layout of its own and computes a share of the batch in proportion to its
speed; gradients are summed over the groups at the end of a step. Stages: every group holds a part of the model's chain
in proportion to its speed, and all samples pass all groups. Both ways a step ends when the slowest group does. A step
divides by the weight summed over all ranks, so uneven shares change no number of the training.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.cluster.groups import Group
from paceline.errors import DoesNotFit
from paceline.plan.cost.bill import bill, busy_share
from paceline.plan.cost.constants import read_constants
from paceline.plan.cost.rates import BYTES, Rates
from paceline.plan.placement.shares import share_out, split_by_speed
from paceline.plan.search.search import search
from paceline.plan.search.values import Values, goal_values
from paceline.spec.forecast import BillTerm, Estimate, Forecast
from paceline.spec.plan import Plan, PlanSpec
from paceline.spec.profile import BlockProfile, ModelProfile
from paceline.units import format_durations, format_usd

Shares = tuple[int, ...]
ROUNDS = 3  # how often shares follow the speeds that they themselves lead to


@dataclass(frozen=True)
class GroupPlan:
    """What a group does: its share of the batch or of the chain, and the plan and price of that alone."""

    group: str
    samples: int
    blocks: int
    plan: Plan
    forecast: Forecast


@dataclass(frozen=True)
class Uneven:
    """A way to use all groups: the parts, what joining them takes, and the price of the whole run."""

    strategy: str  # "replicas" or "stages"
    parts: tuple[GroupPlan, ...]
    joining_seconds: float  # per step: gradients summed over groups, or the pipeline's fill and drain
    joining_text: str
    step_seconds: Estimate
    run_seconds: Estimate
    bill: tuple[BillTerm, ...]  # money, energy and carbon, added up over the groups


@dataclass(frozen=True)
class Work:
    """A task as groups share it out."""

    profile: ModelProfile
    constraints: PlanSpec
    batch_samples: int
    steps: int
    optimizer: str = "adamw"

    def priced(self, group: Group, profile: ModelProfile, samples: int) -> tuple[Plan, Forecast]:
        """Return the group's best plan for a model and so many samples a step. Raises DoesNotFit."""
        found = search(profile, group.cluster, self.constraints, batch_samples=samples, steps=self.steps,
                       optimizer=self.optimizer)  # fmt: skip
        return found.best.plan, found.best.forecast


def plan_uneven(work: Work, groups: tuple[Group, ...]) -> tuple[tuple[Uneven, ...], tuple[str, ...]]:
    """Return the ways that fit, best first by the goal, and for each other the reason. Raises DoesNotFit for none."""
    ways: list[Uneven] = []
    refused: list[str] = []
    for strategy, make in (("replicas", _replicas), ("stages", _stages)):
        try:
            way = make(work, groups)
            _hold_limits(way, work.constraints)
            ways.append(way)
        except DoesNotFit as error:
            refused.append(f"{strategy}: {error.what}: {error.because}")
    if not ways:
        raise DoesNotFit(f"{work.profile.name} does not fit these groups", "; ".join(refused),
                         "more or larger devices, or unset constraints of [plan]")  # fmt: skip
    found = goal_values(_values(ways), work.constraints.goal.weights)
    return tuple(ways[place] for place in np.argsort(found, kind="stable")), tuple(refused)


def _hold_limits(way: Uneven, asked: PlanSpec) -> None:
    """Raise DoesNotFit where the groups together are beyond a deadline or a budget that each of them keeps alone."""
    usd = next(term.value for term in way.bill if term.name == "money")
    if asked.deadline is not None and way.run_seconds.value > asked.deadline:
        takes, most = format_durations(way.run_seconds.value, asked.deadline)
        raise DoesNotFit("the groups together", f"it takes {takes}: the deadline is {most}")
    if asked.budget_usd is not None and usd > asked.budget_usd:
        raise DoesNotFit(
            "the groups together", f"it costs {format_usd(usd)}: the budget is {format_usd(asked.budget_usd)}"
        )


def _values(ways: Sequence[Uneven]) -> Values:
    """Return what the ways take of everything that a goal may name."""
    billed = [{term.name: term.value for term in way.bill} for way in ways]
    return Values(
        time=np.array([way.step_seconds.value for way in ways]),
        memory=np.array([max(part.forecast.peak_bytes.value for part in way.parts) for way in ways]),
        **{name: np.array([bill[name] for bill in billed]) for name in ("money", "energy", "carbon")},
        risk=np.zeros(len(ways)),  # each part's own search has weighed it
    )


def _replicas(work: Work, groups: tuple[Group, ...]) -> Uneven:
    if work.batch_samples < len(groups):
        raise DoesNotFit("a batch for every group", f"{work.batch_samples} samples for {len(groups)} groups",
                         "a larger global batch")  # fmt: skip

    def parts_of(shares: Shares) -> list[GroupPlan]:
        priced = [work.priced(group, work.profile, share) for group, share in zip(groups, shares, strict=True)]
        blocks = work.profile.repeated_blocks
        return [
            GroupPlan(group.name, share, blocks, *done)
            for group, share, done in zip(groups, shares, priced, strict=True)
        ]

    starts = [_at_least_one(work.batch_samples, [_peak(group) for group in groups])]
    parts = _balanced(starts, parts_of, list, lambda speeds: _at_least_one(work.batch_samples, speeds))
    # Each group's devices exchange an even part of the gradients with the other groups, in a ring of groups.
    size = len(groups)
    wire = 2 * (size - 1) / size * 4 * work.profile.trained_parameters
    joining = wire / _between_bytes_per_second(groups)
    text = (
        f"gradients summed over {size} groups, {wire:.3g} B through the narrowest group's network, not hidden (assumed)"
    )
    return _way("replicas", work, groups, parts, joining, text)


def _stages(work: Work, groups: tuple[Group, ...]) -> Uneven:
    profile = work.profile
    links = _links(profile)
    if len(links) < len(groups):
        raise DoesNotFit("a stage for every group", f"{len(links)} blocks for {len(groups)} groups", "fewer groups")
    costs = [math.fsum(block.matmul_flops + block.attention_flops for block in link) or 1.0 for link in links]

    def pieces(sizes: Shares) -> list[list[tuple[BlockProfile, ...]]]:
        return [links[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def parts_of(sizes: Shares) -> list[GroupPlan]:
        parts = []
        for group, piece in zip(groups, pieces(sizes), strict=True):
            blocks = tuple(block for link in piece for block in link)
            done = work.priced(group, _chain(profile, blocks), work.batch_samples)
            parts.append(GroupPlan(group.name, work.batch_samples, sum(block.recomputable for block in blocks), *done))
        return parts

    def done_by(sizes: Shares) -> list[float]:
        edges = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return [math.fsum(costs[first:last]) for first, last in edges]

    starts = [split_by_speed(costs, [measure(group) for group in groups]) for measure in (_peak, _memory)]
    parts = _balanced(starts, parts_of, done_by, lambda speeds: split_by_speed(costs, speeds))
    rounds = min(part.plan.accumulation for part in parts)
    filling = (math.fsum(part.forecast.step_seconds.value for part in parts) - _slowest(parts)) / rounds
    stream = max((block.input_elements for block in profile.blocks), default=0.0) * BYTES[parts[0].plan.precision]
    sending = 2 * work.batch_samples * stream / _between_bytes_per_second(groups)
    text = f"filling and draining {len(groups)} stages of {rounds} micro-batches, and sends between groups (assumed)"
    return _way("stages", work, groups, parts, filling + sending, text)


def _balanced(
    starts: Sequence[Shares],
    parts_of: Callable[[Shares], list[GroupPlan]],
    work_of: Callable[[Shares], Sequence[float]],
    shares_by: Callable[[list[float]], Shares],
) -> list[GroupPlan]:
    """Return the parts of which the slowest is fastest, shares following the speeds that they themselves lead to.

    The first of `starts` that fits is followed. Raises DoesNotFit where none does.
    """
    best: list[GroupPlan] = []
    because: DoesNotFit | None = None
    for shares in dict.fromkeys(starts):
        for _ in range(ROUNDS):
            try:
                parts = parts_of(shares)
            except DoesNotFit as error:
                because = because or error
                break
            if not best or _slowest(parts) < _slowest(best):
                best = parts
            seconds = [part.forecast.step_seconds.value for part in parts]
            if not all(math.isfinite(second) for second in seconds):
                break  # rates are unknown: there is nothing to share by
            following = shares_by([done / second for done, second in zip(work_of(shares), seconds, strict=True)])
            if following == shares:
                break
            shares = following
        if best:
            return best
    assert because is not None
    raise because


def _memory(group: Group) -> float:
    """Return the bytes of a group's devices together, to share by where shares by speed do not fit."""
    size = group.cluster.device.memory_bytes.value
    return group.cluster.devices * size if math.isfinite(size) else 1.0


def _peak(group: Group) -> float:
    """Return the FLOP/s that a group's devices are listed with together, to start sharing from; 1 where unknown."""
    device = group.cluster.device
    rates = [Rates(device, precision).large_product_rate for precision in device.matmul_flops]
    return group.cluster.devices * max(rates, default=1.0)


def _between_bytes_per_second(groups: tuple[Group, ...]) -> float:
    """Return the rate between groups: that of the group with the narrowest network, all of its devices together."""
    rates = (group.cluster.devices * group.cluster.links[-1].bytes_per_second.value for group in groups)
    return read_constants().network_link_share * min(rates)


def _links(profile: ModelProfile) -> list[tuple[BlockProfile, ...]]:
    """Return the chain cut before every repeated block but the first: what comes before and after belongs to an end."""
    cuts = [index for index, block in enumerate(profile.blocks) if block.recomputable]
    edges = [0, *cuts[1:], len(profile.blocks)]
    return [profile.blocks[first:last] for first, last in itertools.pairwise(edges)]


def _chain(profile: ModelProfile, blocks: tuple[BlockProfile, ...]) -> ModelProfile:
    """Return the profile of some blocks; a weight whose owner is elsewhere is held here too."""
    here = {block.name for block in blocks}
    owners = {block.name: block for block in profile.blocks}
    held = tuple(
        dataclasses.replace(block, tied_to="", parameters=block.parameters + owners[block.tied_to].parameters)
        if block.tied_to and block.tied_to not in here
        else block
        for block in blocks
    )
    return dataclasses.replace(profile, blocks=held)


def _at_least_one(total: int, speeds: list[float]) -> tuple[int, ...]:
    """Return shares by speed with a sample for every group: a group without one would be no part of the run."""
    shares = list(share_out(total, speeds))
    for index in [index for index, share in enumerate(shares) if share == 0]:
        shares[shares.index(max(shares))] -= 1
        shares[index] = 1
    return tuple(shares)


def _slowest(parts: list[GroupPlan]) -> float:
    return max((part.forecast.step_seconds.value for part in parts), default=math.inf)


def _way(
    strategy: str, work: Work, groups: tuple[Group, ...], parts: list[GroupPlan], joining: float, text: str
) -> Uneven:
    """Return the way with its price: a step is the slowest group's, and joining; every group is paid for all of it."""
    slowest = max((part.forecast.step_seconds for part in parts), key=lambda step: step.value)
    step = Estimate(slowest.value + joining, slowest.low + joining, slowest.high + joining, "assumed")
    run = Estimate(step.value * work.steps, step.low * work.steps, step.high * work.steps, "assumed")
    bills = []
    for group, part in zip(groups, parts, strict=True):
        busy = busy_share(part.forecast.time) * part.forecast.step_seconds.value / step.value
        bills.append(bill(group.cluster, run, busy))
    return Uneven(strategy, tuple(parts), joining, text, step, run, _added(groups, bills))


def _added(groups: tuple[Group, ...], bills: list[tuple[BillTerm, ...]]) -> tuple[BillTerm, ...]:
    """Return the groups' bills added up; the ends of intervals add too, since all groups err in the same direction."""
    added = []
    for terms in zip(*bills, strict=True):
        sums = {name: math.fsum(getattr(term, name) for term in terms) for name in
                ("value", "low", "high", "low95", "high95")}  # fmt: skip
        formula = "; ".join(f"{group.name}: {term.formula}" for group, term in zip(groups, terms, strict=True))
        unknown = [term for term in terms if not math.isfinite(term.value)]
        source = "unknown" if unknown else "assumed"
        added.append(BillTerm(terms[0].name, terms[0].unit, **sums, formula=formula, source=source))
    return tuple(added)
