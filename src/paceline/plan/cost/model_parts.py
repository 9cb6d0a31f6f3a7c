"""The parts of a model that devices compute: the whole chain, or the blocks of the pipeline stages of one rank.

Blocks of one shape are counted, not listed: a part is a row of counts, one for each different block of the chain, so
that all parts of all plans are one matrix and pricing does not depend on the model's depth.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.plan.cost.columns import Columns, Flags, Floats, Ints
from paceline.spec.profile import BlockProfile, ModelProfile

# Collectives over tp of one forward pass, each of the whole stream, with the sequence split between regions: a gather
# before and a reduce-scatter after attention and after the feed-forward; the embedding's sum; the head's gather.
# The backward pass has the same with the two kinds swapped (Korthikanti et al. 2022, arXiv:2205.05198, figure 5).
TENSOR_COLLECTIVES = {"embedding": 1, "decoder": 4, "experts": 4, "module": 4, "head": 1, "norm": 0}

MODES = ("none", "selective", "full")  # of recompute of one block, from what keeps most to what keeps least
AGAIN = MODES[1:]  # those that run anything again


def largest_of(counts: Floats, values: Floats) -> Floats:
    """Return for every part the largest value of the shapes that it has blocks of, 0 without any.

    `counts` are (part x shape), `values` too, or one for each shape. Shape after shape: numpy takes some five times as
    long for the maximum along a last axis of so few.
    """
    found = np.zeros(len(counts))
    for shape in range(counts.shape[1]):
        np.maximum(found, np.where(counts[:, shape] > 0, values[..., shape], 0.0), out=found)
    return found


class Shapes:
    """The different blocks of a chain as columns, one entry for each, and where the chain has them."""

    def __init__(self, profile: ModelProfile) -> None:
        places: dict[BlockProfile, int] = {}
        self.profile = profile
        self.of_block = [places.setdefault(replace(block, name=""), len(places)) for block in profile.blocks]
        self.blocks = tuple(places)
        self.repeated_at = [index for index, block in enumerate(profile.blocks) if block.recomputable]
        self._columns: dict[str, Floats] = {}
        steps = np.eye(len(self.blocks))[self.of_block]
        self._before = np.concatenate([np.zeros((1, len(self.blocks))), np.cumsum(steps, axis=0)])

    def __getitem__(self, field: str) -> Floats:
        """Return a field of every different block."""
        if field not in self._columns:
            self._columns[field] = np.array([getattr(block, field) for block in self.blocks], dtype=np.float64)
        return self._columns[field]

    @cached_property
    def repeated(self) -> Floats:
        """1 for blocks that activation checkpointing applies to (they are also the units of sharding), else 0."""
        return self["recomputable"]

    @cached_property
    def collectives(self) -> Floats:
        """Collectives over tp of one forward pass of every different block."""
        return np.array([TENSOR_COLLECTIVES.get(block.kind, 0) for block in self.blocks], dtype=np.float64)

    @cached_property
    def is_head(self) -> Flags:
        """Whether a block computes the loss over a vocabulary."""
        return np.array([block.kind == "head" for block in self.blocks])

    @cached_property
    def all_counts(self) -> Floats:
        """How many there are of each different block in the whole chain."""
        return self._before[-1]

    def split(self, sizes: tuple[int, ...], ranks: int, modes: tuple[str, ...] = ()) -> Stages:
        """Return the different parts of `ranks` pipeline ranks: stage i has `sizes[i]` blocks, on rank i mod ranks.

        What comes before the repeated blocks belongs to the first stage, what comes after them to the last; these two
        may have no block else. `modes` are the modes of recompute of the repeated blocks, where they are settled.
        """
        begins = (*self.repeated_at, self.repeated_at[-1] + 1) if self.repeated_at else ()
        cuts = [0, *(begins[taken] for taken in itertools.accumulate(sizes[:-1])), len(self.profile.blocks)]
        pieces = np.diff(self._before[cuts], axis=0)
        counts = pieces.reshape(-1, ranks, pieces.shape[1]).sum(axis=0)
        tied = np.zeros(ranks)
        places = {block.name: index for index, block in enumerate(self.profile.blocks)}

        def rank_of(index: int) -> int:
            return int(np.searchsorted(cuts, index, side="right") - 1) % ranks

        for index, block in enumerate(self.profile.blocks):
            if block.tied_to and rank_of(index) != rank_of(places[block.tied_to]):
                tied[rank_of(index)] += self.profile.blocks[places[block.tied_to]].parameters
        settled = self._settled(modes, cuts, ranks)
        table = np.column_stack([counts, tied, *settled])
        different, first, which, number = np.unique(
            table,
            axis=0,
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        order = np.argsort(first)
        is_part = which.reshape(-1, 1) == order  # (rank x part)
        ahead = np.concatenate([np.zeros((1, len(order))), np.cumsum(is_part, axis=0)])
        shapes = counts.shape[1]
        return Stages(
            different[order, :shapes],
            different[order, shapes],
            first[order],
            number[order],
            ahead[first[order]].T.copy(),
            np.argmax(is_part, axis=1),
            settled[:, first[order]] if modes else None,
        )

    def _settled(self, modes: tuple[str, ...], cuts: list[int], ranks: int) -> Floats:
        """Return how many repeated blocks of every rank have each mode (mode x rank x shape); no mode without any."""
        shapes, chain = len(self.blocks), len(self.profile.blocks)
        if not modes:
            return np.zeros((0, ranks, shapes))
        steps = np.zeros((len(MODES), chain + 1, shapes))
        for index, mode in zip(self.repeated_at, modes, strict=True):
            steps[MODES.index(mode), index + 1, self.of_block[index]] = 1
        pieces = np.diff(np.cumsum(steps, axis=1)[:, cuts], axis=1)
        return pieces.reshape(len(MODES), -1, ranks, shapes).sum(axis=1)

    @cached_property
    def whole(self) -> Stages:
        """The whole chain as the one part there is."""
        zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
        return Stages(self.all_counts[None, :], np.zeros(1), zero, one, np.zeros((1, 1)), zero)


@dataclass(frozen=True)
class Stages:
    """The pipeline ranks of one split, equal ranks told once: a part is what the blocks of a rank are.

    Of 12 equal blocks and a head on 4 ranks, three ranks have the same part (3 blocks) and the last one another (3
    blocks and the head): two parts.
    """

    counts: Floats  # blocks of each shape in a part (part x shape)
    tied_parameters: Floats  # of a weight that a part uses and another part owns, such as a tied embedding
    first: Ints  # the first rank that has the part
    ranks: Ints  # how many ranks have the part
    before: Floats  # [a, b]: how many ranks with part a stand before the first rank with part b
    part_of: Ints  # the part of every rank
    settled: Floats | None = None  # blocks that have each mode of recompute (mode x part x shape), where it is given


@dataclass(frozen=True)
class Parts:
    """Parts of many plans, an entry each: how many blocks of each shape a part has, and sums over these blocks."""

    shapes: Shapes
    counts: Floats
    tied_parameters: Floats

    def take(self, chosen: Ints | Flags | slice) -> Parts:
        """Return the entries chosen."""
        return Parts(self.shapes, self.counts[chosen], self.tied_parameters[chosen])

    def total(self, field: str, *, repeated: bool = False) -> Floats:
        """Return the sum of a field over the blocks of every part, or over the repeated ones alone."""
        values = self.shapes[field]
        return self.counts @ (values * self.shapes.repeated if repeated else values)

    def number(self, chosen: Floats | Flags) -> Floats:
        """Return how many blocks a part has, each counted as often as `chosen` says of its shape."""
        return self.counts @ np.asarray(chosen, dtype=np.float64)

    @cached_property
    def parameters(self) -> Floats:
        """All parameters, shared ones once."""
        return self.tied_parameters + self.total("parameters")

    @cached_property
    def trained(self) -> Floats:
        """Parameters that are trained. A weight that another part owns is taken to be trained unless none there is."""
        owned = {block.tied_to for block in self.shapes.profile.blocks if block.tied_to}
        owners = [block for block in self.shapes.profile.blocks if block.name in owned]
        is_frozen = bool(owners) and all(block.frozen_parameters == block.parameters for block in owners)
        return self.parameters - self.total("frozen_parameters") - self.tied_parameters * is_frozen

    @cached_property
    def root_parameters(self) -> Floats:
        """Parameters outside the repeated blocks: one unit of sharding of its own."""
        return self.parameters - self.total("parameters", repeated=True)

    @cached_property
    def forward_only(self) -> Floats:
        """Parameters of models that only go forward."""
        return self.total("forward_only_parameters")

    @cached_property
    def forward_only_root(self) -> Floats:
        """Parameters outside the repeated blocks, of models that only go forward: they are gathered at once."""
        return self.forward_only - self.total("forward_only_parameters", repeated=True)

    @cached_property
    def forward_only_blocks(self) -> Floats:
        """Repeated blocks of models that only go forward."""
        return self.number(self.shapes.repeated * (self.shapes["forward_only_parameters"] > 0))

    @cached_property
    def forward_only_gathered(self) -> Floats:
        """Parameters, of models that only go forward, whole at once: those outside of blocks, and two blocks'."""
        inside = self.shapes["forward_only_parameters"] * self.shapes.repeated
        largest = largest_of(self.counts, inside)
        return np.minimum(self.forward_only, self.forward_only_root + 2 * largest)

    @cached_property
    def units(self) -> Floats:
        """Units of sharding: each repeated block, and the rest."""
        return self.number(self.shapes.repeated) + (self.root_parameters > 0)

    @cached_property
    def routers(self) -> Floats:
        """Blocks that have routed experts."""
        return self.number(self.shapes["routed_elements"] > 0)

    @cached_property
    def has_head(self) -> Flags:
        """Whether the loss is computed here."""
        return self.number(self.shapes.is_head) > 0

    def largest_unit(self, ep: Ints) -> Floats:
        """Return the parameters of the largest unit of sharding on a device that has one in `ep` of its experts."""
        return np.maximum(self.root_parameters, self.largest_block(ep))

    def largest_weight(self, ep: Ints) -> Floats:
        """Return the parameters of the largest matrix, that of all experts of a layer counted as one; or of a block."""
        largest = np.zeros(len(self.counts))
        for index, block in enumerate(self.shapes.blocks):
            experts = block.experts * math.prod(block.expert_widths) / ep if block.expert_widths else 0.0
            held = np.maximum(block.largest_weight or block.parameters - block.expert_parameters, experts)
            largest = np.maximum(largest, np.where(self.counts[:, index] > 0, held, 0.0))
        return largest

    def largest_block(self, ep: Ints) -> Floats:
        """Return the parameters of the largest repeated block on a device that has one in `ep` of its experts."""
        largest = np.zeros(len(self.counts))
        for index, block in enumerate(self.shapes.blocks):
            if block.recomputable:
                held = block.parameters - block.expert_parameters * (1 - 1 / ep)
                largest = np.maximum(largest, np.where(self.counts[:, index] > 0, held, 0.0))
        return largest


@dataclass(frozen=True)
class PartRows:
    """Every different part of every plan: rows in the order of plans, `starts[i]` the first of plan i."""

    parts: Parts
    plan: Ints
    starts: Ints
    first: Ints  # the first pipeline rank that has the part
    ranks: Ints  # how many have it
    stages: tuple[Stages, ...]  # the different splits
    which: Ints  # the split of every plan

    def before(self, values: Floats, rows: Ints) -> Floats:
        """Return for every plan a sum over the ranks that stand before the first rank with the part in `rows`."""
        sums = np.zeros(len(self.starts))
        for index, stages in enumerate(self.stages):
            plans = np.flatnonzero(self.which == index)
            if len(stages.first) == 1:
                continue
            own = values[self.starts[plans][:, None] + np.arange(len(stages.first))]
            sums[plans] = np.einsum("ps,sp->p", own, stages.before[:, rows[plans] - self.starts[plans]])
        return sums

    def largest(self, values: Floats) -> Ints:
        """Return for every plan the row with the largest value; of equal values, or unknown ones, the first row."""
        most = np.maximum.reduceat(values, self.starts)[self.plan]
        places = np.arange(len(values))
        at = np.where((values == most) | np.isnan(most), places, len(values))
        return np.minimum.reduceat(at, self.starts)

    def ends(self, *, last: bool) -> Ints:
        """Return for every plan the row of its last pipeline rank, or of its first one."""
        lengths = np.diff(np.append(self.starts, len(self.plan)))
        found: Ints = self.starts + lengths - 1 if last else self.starts
        return found

    def sum(self, values: Floats) -> Floats:
        """Return for every plan the sum over its pipeline ranks."""
        return np.add.reduceat(values * self.ranks, self.starts)


Known = dict[tuple[tuple[int, ...], int, tuple[str, ...]], Stages]
PLACES = 1 << 20  # more than there are splits, lists of modes, and ranks


def rows_of(columns: Columns, shapes: Shapes, known: Known) -> PartRows:
    """Return the different parts of every plan. `known` keeps the stages of each (split, ranks, modes)."""
    keys = ((columns.settled + 1) * PLACES + columns.split + 1) * PLACES + columns.pp
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    found = []
    for index in first:
        place, settled, ranks = (int(values[index]) for values in (columns.split, columns.settled, columns.pp))
        sizes = columns.splits[place] if place >= 0 else ()
        modes = columns.blocks[settled] if settled >= 0 else ()
        if (sizes, ranks, modes) not in known:
            given = place >= 0 or modes
            known[sizes, ranks, modes] = shapes.split(sizes, ranks, modes) if given else shapes.whole
        found.append(known[sizes, ranks, modes])
    numbers = np.array([len(stages.first) for stages in found])
    offsets = np.cumsum(numbers) - numbers
    lengths = numbers[which]
    starts = np.cumsum(lengths) - lengths
    plan = np.repeat(np.arange(len(columns)), lengths)
    at = np.arange(len(plan)) - starts[plan] + offsets[which][plan]
    return PartRows(
        Parts(
            shapes,
            np.concatenate([stages.counts for stages in found])[at],
            np.concatenate([stages.tied_parameters for stages in found])[at],
        ),
        plan,
        starts,
        np.concatenate([stages.first for stages in found])[at],
        np.concatenate([stages.ranks for stages in found])[at],
        tuple(found),
        which,
    )
