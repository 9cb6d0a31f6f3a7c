"""What every different block takes of one sample: seconds of products, attention and moves, and bytes that it keeps.

Arrays are (plan x shape): a search prices hundreds of thousands of plans, and a model has few different blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.constants import family_of
from paceline.plan.cost.memory.recompute import kept_bytes
from paceline.plan.cost.on_cluster import TaskOnCluster
from paceline.plan.cost.programs.low import NVFP4, PLAIN, RECIPES, Recipe
from paceline.plan.cost.rates import ATTENTION_PASSES, LOW, Rates
from paceline.plan.cost.time.fullness import fullness
from paceline.spec.profile import ROUTING_MOVES, BlockProfile

FIRST_FLASH = 2.0  # FlashAttention-2 takes half the time of what came before it (Dao 2023, arXiv:2307.08691, abstract)
# Seconds of cuDNN's fused attention on Hopper over those of FlashAttention-2, which `attention` is fitted on there: it
# makes 600 TFLOP/s forward and 518 backward where that makes 370 and 318, of heads of 128 in sequences of 8,192
# (Shah et al. 2024, arXiv:2407.08608, figures 5 and 6).
CUDNN_ON_HOPPER = (1 / 600 + 2.5 / 518) / (1 / 370 + 2.5 / 318)
# Seconds of FlashAttention-4 on Blackwell over those of cuDNN's attention, which `attention` is fitted on there: "up to
# 1.3 x speedup over cuDNN 9.13" (its abstract of 2026, "Algorithm and kernel pipelining co-design for asymmetric
# hardware scaling", read 2026-11-30).
FOURTH_ON_BLACKWELL = 1 / 1.3
UNFUSED_PASSES = 3  # of attention that keeps its scores: forward 1, backward 2
# Elements of the stream that norms and residual additions of a layer move, for each of its own, in one pass: what every
# tensor rank does whole without sequence parallelism (Korthikanti et al. 2022, section 4.2.2).
REPLICATED_MOVES = 10
# Elements that selective recompute of unfused attention moves for each that it did not keep: 4 s + 2.5 s of 2.5 s.
SCORE_MOVES = 2.6
# Times that a token's row is picked by index for each of its experts: to its expert's place, and its result back. Both
# are among the moved elements already, as copies that are read and written.
ROUTING_PICKS = 2


@dataclass(frozen=True)
class BlockSeconds:
    """Plans of one precision, and what every different block takes under each of them."""

    context: TaskOnCluster
    columns: Columns

    @cached_property
    def rates(self) -> Rates:
        """The device's rates in the plans' precision."""
        return self.context.rates(self.columns.precision)

    @cached_property
    def tokens(self) -> Floats:
        """Positions of a micro-batch on one device: what its products have for rows."""
        columns, filled = self.columns, self.fill("tokens") / self.fill("passes")
        return columns.micro_batch * self.context.profile.tokens_per_sample * filled / columns.cp

    @cached_property
    def passes_made(self) -> Floats:
        """Micro-batches of a device in a step: the plan's, or of a budget of tokens as many as come on average."""
        columns = self.columns
        if not any(each.passes for each in self.context.profile.fills):
            return columns.accumulation.astype(np.float64)
        made = columns.device_samples / columns.micro_batch * self.fill("passes")
        return np.maximum(made, columns.pp)  # a pipeline takes a multiple of its ranks

    def fill(self, part: str) -> Floats:
        """Return how full batches of rows of different lengths are on every plan's fullest rank: a field of Fill.

        1 for other batches.
        """
        return self._fills[part]

    @cached_property
    def _fills(self) -> dict[str, Floats]:
        return fullness(self.context.profile.fills, self.columns.data_degree, self.columns.micro_batch)

    def fill_of_batch(self, part: str) -> Floats:
        """Return how full a whole batch of rows of different lengths is where one rank has all of it."""
        ranks = np.ones_like(self.columns.data_degree)
        return fullness(self.context.profile.fills, ranks, self.columns.micro_batch)[part]

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
        return seconds * self.fill("tokens")[:, None] + self._unaligned("unaligned_flops")

    def _unaligned(self, flops: str) -> Floats:
        """Return what one sample's products take longer for operands that are not aligned (plan x shape).

        Compiled blocks pad them (`shape_padding` of torch's inductor is on by default).
        """
        shapes, software = self.context.shapes, self.context.software
        counted = shapes[flops] * self.rates.unaligned_seconds
        if software.pads_vocabulary:
            counted = np.where(shapes.is_head, 0.0, counted)
        if self.columns.common.compile:
            counted = np.where(shapes.repeated > 0, 0.0, counted)
        found: Floats = counted * (self.fill("tokens") / self.columns.tp)[:, None]
        return found

    @property
    def _unaligned_backward(self) -> Floats:
        """What the backward pass takes longer than the products of the forward pass, alignment alone regarded."""
        slower = self._unaligned("unaligned_backward_flops") - self._unaligned("unaligned_flops")
        found: Floats = self.context.shapes["backward_products"] * slower
        return found

    @property
    def unaligned_head_seconds(self) -> Floats:
        """What one sample's products of the head take longer for operands that are not aligned, of every plan."""
        both = self._unaligned("unaligned_flops") + (
            self.context.shapes["backward_products"] * self._unaligned("unaligned_backward_flops")
        )
        found: Floats = both[:, self.context.shapes.is_head].sum(axis=1)
        return found

    @property
    def backward_product_seconds(self) -> Floats:
        """Seconds of one sample's products in a backward pass through every different block (plan x shape)."""
        return self.context.shapes["backward_products"] * self.product_seconds + self._unaligned_backward

    @property
    def all_product_seconds(self) -> Floats:
        """Seconds of one sample's products in both passes (plan x shape)."""
        return self.pass_products * self.product_seconds + self._unaligned_backward

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
        if self.columns.precision not in LOW or not self.rates.by_shares:
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
        each = self.recipe.bytes_on(family_of(self.rates.device.name))
        return each * values / self.rates.memory_rate / self.columns.tp[:, None]

    @cached_property
    def attention_seconds(self) -> Floats:
        """Seconds of one sample's attention, forward and backward, in every different block (plan x shape)."""
        sequence = self.context.profile.tokens_per_sample
        seconds = [self._attention(block, sequence) for block in self.context.shapes.blocks]
        return np.array(seconds)[None, :] * self.fill("pairs")[:, None] / self.columns.tp[:, None]

    @property
    def attention_forward_seconds(self) -> Floats:
        """The part of `attention_seconds` that is the forward pass."""
        return self.attention_seconds / np.where(
            self.context.shapes["fused_attention"] > 0, ATTENTION_PASSES, UNFUSED_PASSES
        )

    def _attention(self, block: BlockProfile, sequence: int) -> float:
        flops = block.attention_flops / (1.0 if block.backward_products > 0 else ATTENTION_PASSES)
        if not flops:
            return 0.0
        if block.fused_attention:
            # Of a causal head of width d the scores' two products are 2 s^2 d FLOPs.
            width = flops / (2 * sequence**2 * block.heads) if block.heads and block.kind != "module" else 0.0
            return self._kernel_ratio * ATTENTION_PASSES * flops / self.rates.attention_rate(sequence, width)
        width = flops / (4 * sequence**2 * max(block.heads, 1))
        return UNFUSED_PASSES * flops * self.rates.unfused_seconds_per_flop(width, sequence)

    @property
    def _kernel_ratio(self) -> float:
        """Seconds of the program's fused attention over those of the kernel that the rate of attention is of."""
        software, rates = self.context.software, self.rates
        if not rates.by_shares or rates.attention_source == "measured":
            return 1.0
        if software.cudnn_attention and family_of(rates.device.name) == "hopper":
            return CUDNN_ON_HOPPER
        if software.fourth_flash and family_of(rates.device.name) == "blackwell":
            return FOURTH_ON_BLACKWELL
        return FIRST_FLASH if software.first_flash else 1.0

    @cached_property
    def moving_seconds(self) -> Floats:
        """Seconds of one sample's memory-bound operators in a forward pass through every block (plan x shape)."""
        shapes, tp = self.context.shapes, self.columns.tp[:, None]
        moved = shapes["moved_elements"]
        whole = np.zeros(len(moved))
        if not self.context.software.sequence_parallel:  # every tensor rank does what stands between the products
            stream = REPLICATED_MOVES * shapes["input_elements"] * shapes.repeated
            whole = np.minimum(moved, stream)
        routed, over = shapes["routed_elements"], tp
        if self.context.software.routes_whole:
            whole, over = np.minimum(moved, whole + ROUTING_MOVES * routed), np.ones_like(tp)
        slower = np.ones(len(moved))
        if not self.context.software.fused:  # the loss is written alike everywhere
            slower = np.where(shapes.repeated, self.context.constants.unfused_moves, 1.0)
        picked = ROUTING_PICKS * routed * self.rates.beyond_picking_seconds / over
        moving = slower * self.rates.seconds_per_element * (whole + (moved - whole) / tp)
        return (moving + picked + self.cast_seconds / 3) * self.fill("tokens")[:, None]

    @property
    def forward_of_blocks(self) -> Floats:
        """Seconds of one sample's forward pass through every different block, no factor in it (plan x shape)."""
        return self.product_seconds + self.attention_forward_seconds + self.moving_seconds

    @property
    def formula_seconds(self) -> Floats:
        """What the formulas say of one sample's forward and backward in every shape (plan x shape), no factor in it.

        On a CPU the host that starts operators is the device that computes them; on others it works beside it.
        """
        seconds = self.all_product_seconds + self.attention_seconds + self.passes * self.moving_seconds
        if self.rates.device.kind == "cpu":
            launches = self.passes * self.context.shapes["operators"] * self.rates.launch_seconds.value
            seconds = seconds + launches * (self.fill("passes") / self.columns.micro_batch)[:, None]
        return seconds

    @cached_property
    def again_seconds(self) -> Floats:
        """Seconds of what recompute repeats for one sample, in every different block (mode x plan x shape)."""
        shapes, save = self.context.shapes, self.columns.common.recompute_save
        attention = self.attention_forward_seconds
        full = self.forward_of_blocks
        if self.context.software.stops_early:
            full = full - self.product_seconds * shapes["last_flops"] / np.maximum(shapes["matmul_flops"], 1.0)
        some = self.moving_seconds
        if self.context.software.selective_is_attention:
            scores = np.maximum(0.0, shapes["saved_elements"] - shapes["selective_elements"])
            moved = SCORE_MOVES * scores * self.rates.seconds_per_element
            some = attention + moved / self.columns.tp[:, None]
        else:
            kept: Floats | float = self.context.software.selective_products if "products" in save else 0.0
            if not self.context.software.selective_grouped:
                kept = kept * (1 - shapes["routed_flops"] / np.maximum(shapes["matmul_flops"], 1.0))
            some = some + (1 - kept) * self.product_seconds
            is_kept = self.context.software.selective_attention and "attention" in save
            some = some + (0.0 if is_kept else attention)
        return np.stack([np.zeros_like(full), some, full])

    @cached_property
    def kept_bytes(self) -> Floats:
        """Bytes that every different block keeps of one sample for backward (mode x plan x shape)."""
        context, narrow = self.context, self.recipe.kept_bytes
        return kept_bytes(self.columns, context.shapes, context.software, self.rates.element_bytes, narrow)

    @property
    def repeated_operations(self) -> Floats:
        """Operations that recompute repeats in every different block, products and attention kept or not."""
        shapes = self.context.shapes
        moved = shapes["moved_elements"]
        return np.stack([np.zeros_like(moved), moved, moved + shapes["matmul_flops"] + shapes["attention_flops"]])
