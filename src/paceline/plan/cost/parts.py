"""The part of a model that one device computes: the whole chain, or the blocks of its pipeline stages.

Blocks of one shape are counted, not listed, so that pricing a plan does not depend on the model's depth.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from paceline.task.profile import BlockProfile, ModelProfile

# Collectives over tp of one forward pass, each of the whole stream, with the sequence split between regions: a gather
# before and a reduce-scatter after attention and after the feed-forward; the embedding's sum; the head's gather.
# The backward pass has the same with the two kinds swapped (Korthikanti et al. 2022, arXiv:2205.05198, figure 5).
TENSOR_COLLECTIVES = {"embedding": 1, "decoder": 4, "experts": 4, "module": 4, "head": 1, "norm": 0}


@dataclass(frozen=True)
class Counts:
    """Counts of one sample's forward pass over some blocks, products grouped by their width."""

    matmul: tuple[tuple[int, float], ...]  # (width, FLOPs)
    attention_flops: float
    moved_elements: float
    operators: int


def count(blocks: Iterable[BlockProfile]) -> Counts:
    """Return the sums over the blocks."""
    blocks = tuple(blocks)
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
class Part:
    """Some blocks of a chain. `tied_parameters` are those of a shared weight whose owner is in another part."""

    blocks: tuple[BlockProfile, ...]
    tied_parameters: int = 0

    @cached_property
    def shapes(self) -> tuple[tuple[BlockProfile, int], ...]:
        """The different blocks, and how many there are of each."""
        counted = Counter(dataclasses.replace(block, name="") for block in self.blocks)
        return tuple(counted.items())

    @cached_property
    def counts(self) -> Counts:
        """Counts of all blocks."""
        return count(self.blocks)

    @cached_property
    def recomputable_counts(self) -> Counts:
        """Counts of the blocks that activation checkpointing applies to."""
        return count(self.recomputable)

    @cached_property
    def recomputable(self) -> tuple[BlockProfile, ...]:
        """The blocks that activation checkpointing applies to; they are also the units of sharding."""
        return tuple(block for block in self.blocks if block.recomputable)

    @cached_property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        return self.tied_parameters + sum(block.parameters for block in self.blocks)

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of routed experts."""
        return sum(block.expert_parameters for block in self.blocks)

    @cached_property
    def root_parameters(self) -> int:
        """Parameters outside the repeated blocks: one unit of sharding of its own."""
        return self.parameters - sum(block.parameters for block in self.recomputable)

    @cached_property
    def units(self) -> int:
        """Units of sharding: each repeated block, and the rest."""
        return len(self.recomputable) + (1 if self.root_parameters else 0)

    def largest_unit(self, ep: int = 1) -> float:
        """Return the parameters of the largest unit of sharding on a device that has one in `ep` of its experts."""
        held = (block.parameters - block.expert_parameters * (1 - 1 / ep) for block, _ in self._repeated)
        return max([*held, self.root_parameters])

    @cached_property
    def _repeated(self) -> tuple[tuple[BlockProfile, int], ...]:
        return tuple((block, number) for block, number in self.shapes if block.recomputable)

    @cached_property
    def tensor_collectives(self) -> tuple[int, int]:
        """Collectives over tp of one forward pass: all of them, and those that recompute runs again."""
        every = sum(TENSOR_COLLECTIVES.get(block.kind, 0) * number for block, number in self.shapes)
        return every, sum(TENSOR_COLLECTIVES.get(block.kind, 0) * number for block, number in self._repeated)

    @cached_property
    def kv_elements(self) -> float:
        """Keys and values of one sample over all blocks."""
        return sum(block.kv_elements for block in self.blocks)

    @cached_property
    def attentions(self) -> int:
        """Blocks that have keys and values."""
        return sum(1 for block in self.blocks if block.kv_elements)

    @cached_property
    def routed_elements(self) -> float:
        """Elements of one sample sent to routed experts over all blocks."""
        return sum(block.routed_elements for block in self.blocks)

    @cached_property
    def routers(self) -> int:
        """Blocks that have routed experts."""
        return sum(1 for block in self.blocks if block.routed_elements)

    @cached_property
    def has_head(self) -> bool:
        """Whether the loss is computed here."""
        return any(block.kind == "head" for block in self.blocks)


@dataclass(frozen=True)
class Stage:
    """The part of a pipeline rank, with the first rank that has a part of this shape and how many ranks do."""

    part: Part
    first: int
    ranks: int


def whole(profile: ModelProfile) -> Part:
    """Return all blocks as one part."""
    return Part(profile.blocks)


def split_stages(profile: ModelProfile, stages: tuple[int, ...], ranks: int) -> tuple[Stage, ...]:
    """Return the different parts of `ranks` pipeline ranks: stage i has `stages[i]` blocks, on rank i mod ranks.

    What comes before the repeated blocks belongs to the first stage, what comes after them to the last.
    """
    cuts = [0]
    repeated = [index for index, block in enumerate(profile.blocks) if block.recomputable]
    cuts += [repeated[taken] for taken in itertools.accumulate(stages[:-1])]
    cuts.append(len(profile.blocks))
    pieces = [profile.blocks[begin:end] for begin, end in itertools.pairwise(cuts)]
    found: dict[object, Stage] = {}
    owners = {block.name: block for block in profile.blocks}
    for rank in range(ranks):
        blocks = tuple(block for piece in pieces[rank::ranks] for block in piece)
        names = {block.name for block in blocks}
        tied = sum(owners[block.tied_to].parameters for block in blocks if block.tied_to and block.tied_to not in names)
        part = Part(blocks, tied)
        key = (frozenset(part.shapes), tied)
        seen = found.get(key)
        found[key] = Stage(seen.part, seen.first, seen.ranks + 1) if seen else Stage(part, rank, 1)
    return tuple(found.values())
