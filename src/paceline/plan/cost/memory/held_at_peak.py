"""Quantities of every pipeline stage of every plan that several components of its peak memory are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.plan.cost.columns import Columns, Floats, Ints
from paceline.plan.cost.model_parts import Parts, largest_of
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.compute import updated_bytes


def in_flight(columns: Columns, rank: Ints) -> Floats:
    """Return how many micro-batches' activations a pipeline rank holds at most, in units of all its chunks.

    GPipe holds all; 1F1B as many as there are ranks from here on (Narayanan et al. 2021, arXiv:2104.04473, section
    2.2); interleaved, the warm-up chunks of torch.distributed.pipelining and one more.
    """
    ranks, count, chunks = columns.pp, columns.accumulation, columns.virtual_stages
    per_round = count // np.maximum(1, count // ranks)
    ahead = np.where(columns.scheduled("zero-bubble"), 1, 2)
    warm_up = np.minimum(count * chunks, (chunks - 1) * per_round + ahead * (ranks - 1 - rank))
    interleaved = np.minimum(count * chunks, warm_up + 1) / chunks
    several = np.where(columns.scheduled("1f1b"), np.minimum(count, ranks - rank), interleaved)
    flying: Floats = np.where(columns.scheduled("gpipe"), count, several).astype(np.float64)
    return np.where(ranks > 1, flying, 1.0)


@dataclass(frozen=True)
class HeldAtPeak:
    """What every different pipeline stage of every plan holds: columns of rows, not of plans."""

    sheet: Sheet

    @cached_property
    def plans(self) -> Columns:
        """The plan of every row."""
        rows = self.sheet.rows
        return self.sheet.columns.take(rows.plan) if len(rows.plan) > len(self.sheet.columns) else self.sheet.columns

    @cached_property
    def parts(self) -> Parts:
        """The part of every row."""
        return self.sheet.rows.parts

    @cached_property
    def size(self) -> int:
        """Bytes of a weight that is updated."""
        return updated_bytes(self.sheet)[0]

    @property
    def compute(self) -> int:
        """Bytes of a value in the compute dtype."""
        return self.sheet.rates.element_bytes

    @cached_property
    def parameters(self) -> Floats:
        """Parameters of a device before any sharding."""
        return self.parts.parameters / self.plans.tp

    @cached_property
    def trained(self) -> Floats:
        """The parameters that are trained."""
        return self.parts.trained / self.plans.tp

    @property
    def narrowed(self) -> Floats:
        """Bytes that frozen weights of two bytes spare a device."""
        spared = (self.size - 2) * self.parts.total("narrow_parameters")
        return spared / self.plans.tp / self.plans.held_degree

    @property
    def spread(self) -> Floats:
        """Parameters that are spread over all data ranks, whatever the others are."""
        is_spread = self.plans.common.frozen == "spread"
        return self.parts.forward_only if is_spread else np.zeros(len(self.plans))

    def rest_text(self, i: int) -> str:
        """Return what a formula says of frozen weights that are spread, or of two bytes; nothing without any."""
        spread, narrow = self.spread[i], self.parts.total("narrow_parameters")[i]
        text = f", {spread:,.0f} of them / {self.plans.data_degree[i]} data ranks" if spread else ""
        return text + (f", 2 B of {narrow:,.0f} frozen ones" if narrow else "")

    def trained_text(self, i: int) -> str:
        """Return the parameters with gradients and state, for a formula."""
        trained = self.parts.trained[i]
        return "parameters" if trained == self.parts.parameters[i] else f"{trained:,.0f} trained parameters"

    @cached_property
    def local_parameters(self) -> Floats:
        """Parameters of a device before any sharding, of the experts only its own."""
        experts = self.parts.total("expert_parameters")
        return self.parameters - experts * (1 - 1 / self.plans.ep) / self.plans.tp

    @property
    def local_trained(self) -> Floats:
        """Those of them that are trained."""
        return np.minimum(self.local_parameters, self.trained)

    @property
    def root(self) -> Floats:
        """Parameters outside of the repeated blocks that are gathered at once."""
        if not self.sheet.context.software.splits_root:
            return self.parts.root_parameters
        shapes = self.parts.shapes
        return largest_of(self.parts.counts, shapes["parameters"] * (1 - shapes.repeated))

    @property
    def largest_block(self) -> Floats:
        """Parameters of the largest repeated block, of which two are gathered beside them: in use, and on its way."""
        return self.parts.largest_block(self.plans.ep)

    @cached_property
    def flying(self) -> Floats:
        """Micro-batches whose activations are held at once."""
        return in_flight(self.plans, self.sheet.rows.first)

    def here(self, i: int) -> str:
        """Return how a device's share of the parameters is divided, ZeRO aside."""
        return self.sheet.held_text(int(self.sheet.rows.plan[i]))

    def over(self, i: int) -> str:
        """Return how the state is divided, for a formula."""
        shards, with_cp = self.plans.held_degree[i], " x cp" if self.plans.cp[i] > 1 else ""
        return self.here(i) + (f" / dp_shard{with_cp} {shards}" if shards > 1 else "")
