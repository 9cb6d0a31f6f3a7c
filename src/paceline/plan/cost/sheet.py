"""What the cost formulas work on: a task on a cluster, and the sheet on which the plans of a search are priced.

A search prices hundreds of thousands of plans of one task on one cluster. All that does not depend on the plan is
computed once, in the PricedTask; what several terms need of the plans, once for all of them, in the Sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from paceline.plan.cost.columns import Columns, Floats, Ints, columns_of
from paceline.plan.cost.constants import Constants, read_constants
from paceline.plan.cost.memory.recompute import MODE_OF, fill_budget, kept_bytes, modes_in_order
from paceline.plan.cost.model_parts import MODES, Known, PartRows, Parts, Shapes, rows_of
from paceline.plan.cost.programs.low import NVFP4, PLAIN, RECIPES, Recipe
from paceline.plan.cost.rates import ATTENTION_PASSES, LOW, Rates
from paceline.plan.cost.software import PACELINE, Software
from paceline.plan.cost.time.block_factors import block_factors, sheet_plan
from paceline.plan.cost.time.ring import Rings, ring
from paceline.plan.feasible.split import split_by_cost
from paceline.plan.learn.correct import Learnt
from paceline.plan.learn.task_measurement import TaskMeasurement
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.profile import BlockProfile, ModelProfile

FIRST_FLASH = 2.0  # FlashAttention-2 takes half the time of what came before it (Dao 2023, arXiv:2307.08691, abstract)
UNFUSED_PASSES = 3  # of attention that keeps its scores: forward 1, backward 2
# Elements of the stream that norms and residual additions of a layer move, for each of its own, in one pass: what every
# tensor rank does whole without sequence parallelism (Korthikanti et al. 2022, section 4.2.2).
REPLICATED_MOVES = 10
# Elements that selective recompute of unfused attention moves for each that it did not keep: 4 s + 2.5 s of 2.5 s.
SCORE_MOVES = 2.6


@dataclass(frozen=True)
class PricedTask:
    """A task on a cluster: all that a plan's price depends on besides the plan."""

    profile: ModelProfile
    cluster: Cluster
    batch_samples: int
    steps: int
    optimizer: str = "adamw"
    software: Software = PACELINE
    constants: Constants = field(default_factory=read_constants)
    learnt: Learnt | None = None  # what finished runs on this machine say; None: nothing, or it is not asked
    measured: Mapping[str, TaskMeasurement] = field(default_factory=dict)  # of the task itself, by precision
    scored: int = 0  # candidates that are scored for each sample that is trained on; 0 where none are

    def rates(self, precision: str) -> Rates:
        """Return the device's rates in a precision; looked up once."""
        if precision not in self._rates:
            self._rates[precision] = Rates(self.cluster.device, precision, self.constants)
        return self._rates[precision]

    @cached_property
    def _rates(self) -> dict[str, Rates]:
        return {}

    @cached_property
    def shapes(self) -> Shapes:
        """The different blocks of the model."""
        return Shapes(self.profile)

    @property
    def recomputable(self) -> bool:
        """Whether there are blocks that activation checkpointing applies to."""
        return self.profile.repeated_blocks > 0

    @cached_property
    def stream_elements(self) -> float:
        """Elements of what one sample passes from block to block."""
        return max((block.input_elements for block in self.profile.blocks), default=0.0)

    def factors(self, precision: str) -> Floats:
        """Return measured over modelled seconds of every different block: the task's own, or the probe's for all."""
        if precision not in self._factors:
            measured = self.measured.get(precision)
            if measured is None:
                self._factors[precision] = np.full(len(self.shapes.blocks), self.rates(precision).factor)
            else:
                seconds = self.sheet(sheet_plan(measured)).formula_seconds[0]
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
class Sheet:
    """Plans to be priced together, and what several of their terms need."""

    context: PricedTask
    columns: Columns

    @cached_property
    def rates(self) -> Rates:
        """The device's rates in the plans' precision."""
        return self.context.rates(self.columns.precision)

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
    def tokens(self) -> Floats:
        """Positions of a micro-batch on one device: what its products have for rows."""
        columns = self.columns
        return columns.micro_batch * self.context.profile.tokens_per_sample / columns.cp

    @cached_property
    def product_seconds(self) -> Floats:
        """Seconds of one sample's products in a forward pass through every different block (plan x shape)."""
        shapes, columns = self.context.shapes, self.columns
        seconds = np.zeros((len(columns), len(shapes.blocks)))
        tp = columns.tp.astype(np.float64)
        whole = np.ones_like(tp) if self.context.software.spreads_experts else tp  # what an expert's width is split by
        for index, block in enumerate(shapes.blocks):
            rates = self.context.rates("bf16") if block.kind == "head" and self.recipe is not PLAIN else self.rates
            for flops, width, rows, split in self._products(block, tp, whole):
                per_flop = rates.product_seconds_per_flop(np.array(float(width)), rows, split)
                seconds[:, index] += flops / tp * per_flop
            if rates is self.rates:
                seconds[:, index] /= self.recipe.rate
        return seconds

    def _products(
        self, block: BlockProfile, tp: Floats, whole: Floats
    ) -> Iterator[tuple[float, float, Floats, Floats]]:
        """Yield (FLOPs, width, rows, ranks that split the width) of a block's products: dense ones, and experts'.

        An expert multiplies its part of the tokens of its group, so it has fewer rows: 4,096 tokens that go to 8 of 128
        experts are 256 rows for each on one device, and 2,048 over ep = 8.
        """
        routed = (block.routed_flops or block.matmul_flops) if block.experts else 0.0
        if block.matmul_flops > routed:
            yield block.matmul_flops - routed, block.matmul_width, self.tokens, tp
        if routed:
            chosen = block.routed_elements / max(block.input_elements, 1.0)
            rows = np.maximum(self.tokens * chosen / block.experts * self.columns.ep, 1.0)
            yield routed, block.routed_width, rows, whole

    @property
    def pass_products(self) -> Floats:
        """Products of forward and backward pass for each of the forward pass, of every different block: 3 if trained.

        A frozen weight has no gradient, so it spares a third: its product is one for the outputs, one for the inputs.
        """
        return 1 + self.context.shapes["backward_products"]

    @property
    def passes(self) -> Floats:
        """Passes over what every different block moves and starts: forward 1, backward 2; of a block without one, 1."""
        return np.where(self.context.shapes["backward_products"] > 0, 3.0, 1.0)

    @property
    def recipe(self) -> Recipe:
        """How operands of products are cast, of plans in fp8 or fp4."""
        if self.columns.precision not in LOW or not self.rates.is_published:
            return PLAIN
        return NVFP4 if self.columns.precision == "fp4" else RECIPES.get(self.context.software.recipe, PLAIN)

    @cached_property
    def cast_seconds(self) -> Floats:
        """Seconds of casting one sample's operands and gradients in every different block (plan x shape).

        Products of `F` FLOPs and width `w` have F / w values of operands and outputs.
        """
        shapes = self.context.shapes
        dense = (shapes["matmul_flops"] - shapes["routed_flops"]) / np.maximum(shapes["matmul_width"], 1.0)
        routed = shapes["routed_flops"] / np.maximum(shapes["routed_width"], 1.0)
        values = np.where(shapes.is_head, 0.0, dense + routed)
        return self.recipe.cast_bytes * values / self.rates.memory_rate / self.columns.tp[:, None]

    @cached_property
    def attention_seconds(self) -> Floats:
        """Seconds of one sample's attention, forward and backward, in every different block (plan x shape)."""
        sequence = self.context.profile.tokens_per_sample
        seconds = [self._attention(block, sequence) for block in self.context.shapes.blocks]
        return np.array(seconds)[None, :] / self.columns.tp[:, None]

    def _attention(self, block: BlockProfile, sequence: int) -> float:
        flops = block.attention_flops / (1.0 if block.backward_products > 0 else ATTENTION_PASSES)
        if not flops:
            return 0.0
        if block.fused_attention:
            slower = FIRST_FLASH if self.context.software.first_flash and self.rates.is_published else 1.0
            # Of a causal head of width d the scores' two products are 2 s^2 d FLOPs.
            width = flops / (2 * sequence**2 * block.heads) if block.heads and block.kind != "module" else 0.0
            return slower * ATTENTION_PASSES * flops / self.rates.attention_rate(sequence, width)
        width = flops / (4 * sequence**2 * max(block.heads, 1))
        return UNFUSED_PASSES * flops * self.rates.unfused_seconds_per_flop(width, sequence)

    @cached_property
    def moving_seconds(self) -> Floats:
        """Seconds of one sample's memory-bound operators in a forward pass through every block (plan x shape)."""
        shapes, tp = self.context.shapes, self.columns.tp[:, None]
        moved = shapes["moved_elements"]
        whole = np.zeros(len(moved))
        if not self.context.software.sequence_parallel:  # every tensor rank does what stands between the products
            stream = REPLICATED_MOVES * shapes["input_elements"] * shapes.repeated
            whole = np.minimum(moved, stream)
        slower = np.ones(len(moved))
        if not self.context.software.fused:  # the loss is written alike everywhere
            slower = np.where(shapes.repeated, self.context.constants.unfused_moves, 1.0)
        return slower * self.rates.seconds_per_element * (whole + (moved - whole) / tp) + self.cast_seconds / 3

    @property
    def formula_seconds(self) -> Floats:
        """What the formulas say of one sample's forward and backward in every shape (plan x shape), no factor in it.

        On a CPU the host that starts operators is the device that computes them; on others it works beside it.
        """
        seconds = self.pass_products * self.product_seconds + self.attention_seconds + self.passes * self.moving_seconds
        if self.rates.device.kind == "cpu":
            launches = self.passes * self.context.shapes["operators"] * self.rates.launch_seconds.value
            seconds = seconds + launches / self.columns.micro_batch[:, None]
        return seconds

    @cached_property
    def again_seconds(self) -> Floats:
        """Seconds of what recompute repeats for one sample, in every different block (mode x plan x shape)."""
        shapes, save = self.context.shapes, self.columns.common.recompute_save
        passes = np.where(shapes["fused_attention"] > 0, ATTENTION_PASSES, UNFUSED_PASSES)
        attention = self.attention_seconds / passes
        full = self.product_seconds + attention + self.moving_seconds
        some = self.moving_seconds
        if self.context.software.selective_is_attention:
            scores = np.maximum(0.0, shapes["saved_elements"] - shapes["selective_elements"])
            moved = SCORE_MOVES * scores * self.rates.seconds_per_element
            some = attention + moved / self.columns.tp[:, None]
        else:
            kept = self.context.software.selective_products if "products" in save else 0.0
            some = some + (1 - kept) * self.product_seconds
            is_kept = self.context.software.selective_attention and "attention" in save
            some = some + (0.0 if is_kept else attention)
        return np.stack([np.zeros_like(full), some, full])

    @cached_property
    def kept_bytes(self) -> Floats:
        """Bytes that every different block keeps of one sample for backward (mode x plan x shape)."""
        return kept_bytes(self.columns, self.context.shapes, self.context.software, self.rates.element_bytes)

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
        seconds[:, unknown] = self._operations[:, None, places]  # of a device whose rates nobody knows
        if self.columns.common.offloads_activations or self.context.software.selective_blocks:
            seconds[MODES.index("selective")] = np.inf
        numbers = repeated[:, places]
        budget = self.columns.budget[plans] * np.einsum("rs,rs->r", numbers, kept[MODES.index("none")])
        found = np.zeros((len(MODES), *repeated.shape))
        found[:, :, places] = fill_budget(numbers, kept, seconds, budget)
        return found

    @property
    def _operations(self) -> Floats:
        """Operations that recompute repeats in every different block, products and attention kept or not."""
        shapes = self.context.shapes
        moved = shapes["moved_elements"]
        return np.stack([np.zeros_like(moved), moved, moved + shapes["matmul_flops"] + shapes["attention_flops"]])

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
        found = np.max(np.where(counts > 0, of_plan[plans], 0.0), axis=1)
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
        of_shape = self.pass_products * self.product_seconds + self.attention_seconds
        of_shape += self.passes * self.moving_seconds
        factors, rows = self.factors / self.columns.cp[:, None], self.rows
        once = np.einsum("rs,rs->r", rows.parts.counts, (of_shape * factors)[rows.plan])
        return once + self.over_modes(self.again_seconds * factors)

    @cached_property
    def forward_seconds(self) -> Floats:
        """The part of `busy_seconds` that is the forward pass."""
        passes = np.where(self.context.shapes["fused_attention"] > 0, ATTENTION_PASSES, UNFUSED_PASSES)
        of_shape = self.product_seconds + self.attention_seconds / passes + self.moving_seconds
        of_shape *= self.factors / self.columns.cp[:, None]
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
        per_sample = self.context.stream_elements * self.rates.element_bytes
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
