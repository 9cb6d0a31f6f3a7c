"""What the cost formulas work on: a task to be priced, and the sheet on which the plans of a search are.

A search prices hundreds of thousands of plans of one task on one cluster. All that does not depend on the plan is
computed once, in the PricedTask; what several terms need of the plans, once for all of them, in the Sheet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.plan.cost.columns import Columns, Floats, Ints, columns_of
from paceline.plan.cost.memory.recompute import MODE_OF, fill_budget, modes_in_order
from paceline.plan.cost.model_parts import MODES, Known, PartRows, Parts, largest_of, rows_of
from paceline.plan.cost.on_cluster import TaskOnCluster
from paceline.plan.cost.time.block_factors import block_factors, sheet_plan
from paceline.plan.cost.time.block_seconds import BlockSeconds
from paceline.plan.cost.time.ring import Rings, ring
from paceline.plan.feasible.split import split_by_cost
from paceline.plan.learn.task_measurement import TaskMeasurement, measured_profile
from paceline.spec.plan import Plan


@dataclass(frozen=True)
class PricedTask(TaskOnCluster):
    """A task on a cluster, with what is looked up and worked out once for all plans of a search."""

    def factors(self, precision: str) -> Floats:
        """Return measured over modelled seconds of every different block: the task's own, or the probe's for all."""
        if precision not in self._factors:
            measured = self.measured.get(precision)
            if measured is None:
                self._factors[precision] = np.full(len(self.shapes.blocks), self.rates(precision).factor)
            else:
                as_full = replace(self, profile=measured_profile(self.profile, measured))
                seconds = as_full.sheet(sheet_plan(measured)).formula_seconds[0]
                rates = self.rates(precision)
                self._factors[precision] = block_factors(self.profile, self.shapes, rates, seconds, measured)
        return self._factors[precision]

    @cached_property
    def _factors(self) -> dict[str, Floats]:
        return {}

    def split(self, stages: int) -> tuple[int, ...]:
        """Return the repeated blocks of each of so many stages, split by cost; () where there are too few blocks."""
        if stages not in self._splits:
            self._splits[stages] = split_by_cost(self.profile, stages)
        return self._splits[stages]

    @cached_property
    def _splits(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def known_stages(self) -> Known:
        """The parts of pipelines that have been looked at, by split, ranks and settled modes of recompute."""
        return {}

    def with_blocks(self, plan: Plan) -> Plan:
        """Return the plan with the mode of every repeated block in it, where a memory budget decides on them.

        The budget is that of each pipeline rank's own blocks.
        """
        return self.sheet(plan).plan(0)

    def plan_of(self, columns: Columns, index: int) -> Plan:
        """Return one plan of columns in full, with the mode of every repeated block."""
        return Sheet(self, columns.take([index])).plan(0)

    def sheet(self, *plans: Plan) -> Sheet:
        """Return the sheet of a few plans of one precision; a pipeline without a split gets the one by cost."""
        return Sheet(self, columns_of([self._with_split(plan) for plan in plans], self.cluster.paces))

    def _with_split(self, plan: Plan) -> Plan:
        if plan.layout.pp == 1 or plan.stages:
            return plan
        return replace(plan, stages=self.split(plan.layout.pp * plan.virtual_stages))


@dataclass(frozen=True)
class Sheet(BlockSeconds):
    """Plans to be priced together, and what several of their terms need."""

    context: PricedTask

    @property
    def measured(self) -> TaskMeasurement | None:
        """What was measured of the task itself in the plans' precision."""
        return self.context.measured.get(self.columns.precision)

    @property
    def factors(self) -> Floats:
        """What the formulas' seconds of every different block are multiplied by."""
        return self.context.factors(self.columns.precision)

    @cached_property
    def rows(self) -> PartRows:
        """Every different pipeline stage of every plan."""
        return rows_of(self.columns, self.context.shapes, self.context.known_stages)

    @cached_property
    def mode(self) -> Ints:
        """The mode of recompute of all repeated blocks, of every plan whose blocks agree: its place in MODES."""
        return MODE_OF[self.columns.recompute]

    @cached_property
    def repeated_counts(self) -> Floats:
        """How many repeated blocks every part has of each shape (row x shape)."""
        return self.rows.parts.counts * self.context.shapes.repeated

    @cached_property
    def mixed(self) -> tuple[Ints, Floats] | None:
        """The place of every row among rows with a budget (-1: without), and their modes (mode x place x shape).

        A budget gives blocks of one row different modes of recompute: 8 equal blocks count 3 at "none", 5 at "full".
        """
        rows, columns = self.rows, self.columns
        has_budget = columns.recomputes("budget")
        if not has_budget.any():
            return None
        chosen = np.flatnonzero(has_budget[rows.plan])
        place = np.full(len(rows.plan), -1)
        place[chosen] = np.arange(len(chosen))
        found = np.zeros((len(MODES), len(chosen), len(self.context.shapes.blocks)))
        for index, stages in enumerate(rows.stages):
            if stages.settled is not None:
                at = np.flatnonzero(rows.which[rows.plan] == index)
                found[:, place[at]] = stages.settled[:, at - rows.starts[rows.plan[at]]]
        left_open = chosen[columns.settled[rows.plan[chosen]] < 0]
        if len(left_open):
            found[:, place[left_open]] = self._within_budget(left_open, self.repeated_counts[left_open])
        return place, found

    def modes_of(self, row: int) -> Floats:
        """Return how many repeated blocks of one row's part have each mode of recompute (mode x shape)."""
        if self.mixed is not None and self.mixed[0][row] >= 0:
            return self.mixed[1][:, self.mixed[0][row]]
        same = self.mode[self.rows.plan[row]] == np.arange(len(MODES))
        return same[:, None] * self.repeated_counts[row]

    def _within_budget(self, rows: Ints, repeated: Floats) -> Floats:
        """Return the modes of recompute that a budget gives the blocks of some rows (mode x row x shape).

        With offloaded activations `selective` is left out: offload cannot reach the tensors that `selective` keeps. So
        it is where a program computes whole blocks again.
        """
        plans, places = self.rows.plan[rows], np.flatnonzero(self.context.shapes.repeated)
        kept, seconds = (
            values[:, plans][:, :, places] for values in (self.kept_bytes, self.again_seconds * self.factors)
        )
        unknown = ~np.isfinite(seconds).all(axis=(0, 2))
        seconds[:, unknown] = self.repeated_operations[:, None, places]  # of a device whose rates nobody knows
        if self.columns.common.offloads_activations or self.context.software.selective_blocks:
            seconds[MODES.index("selective")] = np.inf
        numbers = repeated[:, places]
        budget = self.columns.budget[plans] * np.einsum("rs,rs->r", numbers, kept[MODES.index("none")])
        found = np.zeros((len(MODES), *repeated.shape))
        found[:, :, places] = fill_budget(numbers, kept, seconds, budget)
        return found

    def over_modes(self, values: Floats, rows: Ints | None = None) -> Floats:
        """Return, for rows (None: all), the sum over the repeated blocks of each block's value at the block's mode.

        `values` are (mode x plan x shape), or (mode x 1 x shape) where they are the same for every plan.
        """
        counts, plans, of_plan = self._own_mode(values, rows)
        found = np.einsum("rs,rs->r", counts, of_plan[plans])
        for there, several, of_mode in self._mixed(values, rows):
            found[there] = np.einsum("mrs,mrs->r", several, of_mode)
        return found

    def most_over_modes(self, values: Floats) -> Floats:
        """Return for every row the largest value of a repeated block at the block's mode of recompute."""
        counts, plans, of_plan = self._own_mode(values, None)
        found = largest_of(counts, of_plan[plans])
        for there, several, of_mode in self._mixed(values, None):
            found[there] = np.max(np.where(several > 0, of_mode, 0.0), axis=(0, 2))
        return found

    def _own_mode(self, values: Floats, rows: Ints | None) -> tuple[Floats, Ints, Floats]:
        """Return the repeated blocks of rows (row x shape), the plan of each row, and `values` at each plan's mode."""
        of_plan = values[self.mode, np.arange(len(self.mode)) if values.shape[1] > 1 else 0]
        if rows is None:
            return self.repeated_counts, self.rows.plan, of_plan
        return self.repeated_counts[rows], self.rows.plan[rows], of_plan

    def _mixed(self, values: Floats, rows: Ints | None) -> Iterator[tuple[Ints, Floats, Floats]]:
        """Yield, of rows with a budget: where they are, the blocks of each mode (mode x row x shape), and values."""
        if self.mixed is not None:
            place, counts = self.mixed
            wanted, plans = (place, self.rows.plan) if rows is None else (place[rows], self.rows.plan[rows])
            there = np.flatnonzero(wanted >= 0)
            yield there, counts[:, wanted[there]], values[:, plans[there]] if values.shape[1] > 1 else values

    def plan(self, index: int) -> Plan:
        """Return one plan in full, with the mode of every repeated block where a memory budget decides on them."""
        plan = self.columns.plan(index)
        if plan.recompute != "budget" or plan.recompute_blocks:
            return plan
        shapes, ranks = self.context.shapes, plan.layout.pp
        ends = np.cumsum(plan.stages if ranks > 1 else [len(shapes.repeated_at)])
        rank_of = np.searchsorted(ends, np.arange(len(shapes.repeated_at)), side="right") % ranks
        part_of = self.rows.stages[self.rows.which[index]].part_of
        found = np.empty(len(rank_of), dtype=object)
        for rank in range(ranks):
            held = np.flatnonzero(rank_of == rank)
            counts = self.modes_of(int(self.rows.starts[index] + part_of[rank]))
            found[held] = modes_in_order([shapes.of_block[shapes.repeated_at[block]] for block in held], counts)
        return replace(plan, recompute_blocks=tuple(found))

    @cached_property
    def busy_seconds(self) -> Floats:
        """Seconds that one sample's arithmetic takes on a device of every part (row), recompute included."""
        of_shape = self.all_product_seconds + self.attention_seconds
        of_shape += self.passes * self.moving_seconds
        factors, rows = self.factors / self.columns.cp[:, None], self.rows
        once = np.einsum("rs,rs->r", rows.parts.counts, (of_shape * factors)[rows.plan])
        return once + self.over_modes(self.again_seconds * factors)

    @cached_property
    def forward_seconds(self) -> Floats:
        """The part of `busy_seconds` that is the forward pass."""
        of_shape = self.forward_of_blocks * (self.factors / self.columns.cp[:, None])
        return np.einsum("rs,rs->r", self.rows.parts.counts, of_shape[self.rows.plan])

    @cached_property
    def slowest_row(self) -> Ints:
        """The row of the part that computes longest, of every plan."""
        return self.rows.largest(self.busy_seconds)

    @cached_property
    def slowest(self) -> Parts:
        """The part that computes longest, of every plan: it sets the pace of the others."""
        return self.rows.parts.take(self.slowest_row)

    @cached_property
    def heaviest(self) -> Parts:
        """The part with the most parameters, of every plan."""
        return self.rows.parts.take(self.rows.largest(self.rows.parts.parameters))

    def ring(self, axis: str) -> Rings:
        """Return the rings of the plans' groups along an axis, on the links that they really cross."""
        if axis not in self._rings:
            size, stride = self.columns.group(axis)
            if axis == "ep" and self.context.software.spreads_experts:  # tp ranks are in it, and all stand side by side
                size, stride = size * np.where(size > 1, self.columns.tp, 1), np.ones_like(stride)
            self._rings[axis] = ring(self.context.cluster, self.context.constants, size, stride)
        return self._rings[axis]

    @cached_property
    def _rings(self) -> dict[str, Rings]:
        return {}

    @cached_property
    def stream_bytes(self) -> Floats:
        """Bytes of the stream between two blocks of a device's samples of a step, whole over tp."""
        columns = self.columns
        per_sample = self.context.stream_elements * self.rates.element_bytes * self.fill("tokens")
        return columns.device_samples * per_sample / columns.cp

    def share_text(self, index: int) -> str:
        """Return what of the model and of a sample one device computes, for a formula; empty where it is all."""
        columns = self.columns
        degrees = {axis: getattr(columns, axis)[index] for axis in ("cp", "tp")}
        shares = [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]
        text = " / " + " / ".join(shares) if shares else ""
        return text + (" in the slowest stage" if columns.pp[index] > 1 else "")

    def held_text(self, index: int) -> str:
        """Return how a device's share of the parameters is divided, ZeRO aside, for a formula."""
        columns = self.columns
        stage = " of the largest stage" if columns.pp[index] > 1 else ""
        return stage + (f" / tp {columns.tp[index]}" if columns.tp[index] > 1 else "")
