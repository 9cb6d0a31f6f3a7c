"""The twin: the task scaled down until a laptop can run it, with its structure kept.

Kept: head ratios, tied weights, the tokenizer, every axis of the layout, the ZeRO class, recompute, clipping, the
optimizer. Shrunk: width, depth, vocabulary, sequence length, batch, degrees (twin_layout.py), and the sizes from which
work is cut in parts. What can be uneven is made so on purpose: ranks get different numbers of rows, pipeline stages of
blocks, shards of the embedding of values.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from paceline.plan.feasible.stages import fill_pipeline
from paceline.spec.adapt.adapter import proof_adapter
from paceline.spec.import_paths import names_object
from paceline.spec.layout import Layout, accumulation_for, largest_part, rows_of
from paceline.spec.model_folder import FRESH
from paceline.spec.plan import Plan
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.sync import PLAIN
from paceline.spec.task import DataSpec, ModelSpec, Task
from paceline.task.models.shape import DecoderConfig, MoEConfig
from paceline.task.models.sizes import is_named, resolve_decoder
from paceline.verify.twin.layout import twin_layout

LARGEST_MICRO_BATCH = 4  # rows of the twin's batch that a rank has at most, where the batch stays in one piece
HEAD_DIMS = ((16, 8), (64, 4), (10_000, 2))  # (up to so many heads, width of each)
LAYERS = 3
MOST_CANDIDATES = 3  # for each sample that is trained on
SEQ_LEN = 24
LARGEST_EXPERTS = 8
LARGEST_VOCAB = 521  # a prime: uneven over every number of shards; ids of more are folded into it (fold.py)
# Adam divides by |g| + eps: with a tiny eps it turns rounding noise in near-zero gradients into whole updates.
TWIN_EPS = 1e-4
SMALLEST_8BIT = 256  # values of a block; parameters of fewer keep 32 bits
SMALLEST_EPS = 1e-8  # as small as fp64 bears
# Times the rows that a step has sent to a rank: the slots of a twin whose steps are to find enough of them, however
# unevenly few tokens choose, and of one whose steps are to find too few.
AMPLE_SLOTS, SHORT_SLOTS = 2.0, 0.5
# Work is cut in parts from these sizes on, so that a small model has a fourth bucket and a second chunk of logits.
BUCKET_BYTES = 2048
LOGITS_ELEMENTS = 8 * LARGEST_VOCAB


@dataclass(frozen=True)
class Rows:
    """How the global batch of a twin is cut, and what else goes with it."""

    name: str
    per_rank: int  # of the ranks that have most
    missing: int  # fewer on other ranks, where several read different rows
    micro_batch: int
    masked: bool  # whether a random part of the labels is masked, so that rows weigh differently
    steady: bool  # whether the learning rate is constant and eps as small as fp64 bears


UNEVEN = Rows("uneven rows", per_rank=5, missing=1, micro_batch=2, masked=True, steady=False)  # three micro-batches
EVEN = Rows("even rows", per_rank=6, missing=0, micro_batch=2, masked=False, steady=True)
FEW = Rows("stand-in rows", per_rank=3, missing=1, micro_batch=1, masked=True, steady=True)  # a rank lacks a third
LONG = Rows("one layer at the real length", per_rank=1, missing=0, micro_batch=1, masked=True, steady=False)
LARGEST_LENGTH = 4096  # tokens of its rows at most: time grows with the square
WHOLE_BATCH = Rows("whole batch", per_rank=7, missing=0, micro_batch=2, masked=True, steady=False)


def twin_task(
    task: Task, plan: Plan, data_vocab: int | None, *, layout: Layout | None = None, rows: Rows = UNEVEN
) -> Task:
    """Return the task, small enough to check. A user's own module and data are used as they are.

    `layout` is what the twin runs as; by default the first of `twin_layouts`.
    """
    layout = layout or twin_layout(plan.layout)
    eps = max(task.optimizer.eps, SMALLEST_EPS if rows.steady else TWIN_EPS)
    small: dict[str, Any] = {"optimizer": twin_optimizer(dataclasses.replace(task.optimizer, eps=eps))}
    small["schedule"] = twin_schedule(task.schedule, rows)
    batch = _batch(plan, layout, rows)
    if rows == WHOLE_BATCH:  # looks at more rows too, where the task's batch has them
        batch = max(batch, _samples_of(task), plan.batch_samples)
    small["global_batch"] = dataclasses.replace(task.global_batch, value=batch, unit="samples")
    if isinstance(task.data, DataSpec) and data_vocab is not None:
        length = min(LARGEST_LENGTH if rows == LONG else SEQ_LEN, task.data.seq_len)
        small["data"] = dataclasses.replace(task.data, seq_len=_length(length, layout))
    if isinstance(task.model, ModelSpec) and is_named(task.model.name):
        stages = layout.pp * plan.virtual_stages
        # A block for every stage and one more, so that stages are uneven.
        layers = max(1 if rows == LONG else LAYERS, stages + 1 if stages > 1 else 0)
        model = twin_model(task.model, data_vocab or 0, task, layout, layers)
        small["model"], small["train"] = model, _of_depth(task.train, model.layers)
        targets = _of_depth(task.adapter.targets, model.layers)
        task = dataclasses.replace(task, adapter=dataclasses.replace(task.adapter, targets=targets))
    few = min(task.selection.candidates, MOST_CANDIDATES)
    small["selection"] = dataclasses.replace(task.selection, candidates=few)  # the story alone chooses among them
    # Every objective has its turn in one of two steps at least, and not in all where it does not.
    small["adapter"] = proof_adapter(task.adapter)
    small["turns"] = tuple(dataclasses.replace(turn, every=min(2, turn.every)) for turn in task.turns)
    return dataclasses.replace(task, **small)


def _of_depth(patterns: tuple[str, ...], layers: int) -> tuple[str, ...]:
    """Return patterns of parameters with the numbers of layers that a twin of so many layers has."""
    return tuple(
        re.sub(r"(?<=layers\.)\d+(?=\.|$)", lambda found: str(min(int(found[0]), layers - 1)), pattern)
        for pattern in patterns
    )


def twin_optimizer(spec: OptimizerSpec) -> OptimizerSpec:
    """Return the optimizer with 8-bit states from as few values on as fill a block: a twin's weights are small."""
    small = {"min_8bit_size": SMALLEST_8BIT}

    def of(name: object, arguments: dict[str, object]) -> dict[str, Any]:
        return {**arguments, **small} if name == "adamw8bit" else arguments

    groups = tuple(
        dataclasses.replace(group, arguments=of(group.name or spec.name, group.arguments)) for group in spec.groups
    )
    return dataclasses.replace(spec, arguments=of(spec.name, spec.arguments), groups=groups)


def twin_schedule(schedule: ScheduleSpec, rows: Rows) -> ScheduleSpec:
    """Return a schedule that changes from step to step, the task's own where it does, or a constant one.

    A rate of zero would hide whatever the last step does.
    """
    kind = "constant" if rows.steady else "linear" if schedule.kind == "constant" or schedule.is_own else schedule.kind
    return dataclasses.replace(schedule, kind=kind, decay=None, warmup=None, final=max(schedule.final, 0.1),
                               arguments={})  # fmt: skip


def twin_model(model: ModelSpec, data_vocab: int, task: Task, layout: Layout, layers: int = LAYERS) -> ModelSpec:
    """Return a narrow, shallow model of the same family, head ratio and weight tying, which `layout` can split."""
    seq_len = task.data.seq_len if isinstance(task.data, DataSpec) else SEQ_LEN
    full = resolve_decoder(model, data_vocab, seq_len)
    ratio = full.heads // full.kv_heads
    kv_heads = max(2, layout.tp) if full.kv_heads > 1 else 1
    heads = ratio * kv_heads
    hidden = _twin_width(full, heads, layout)
    ffn = hidden // 4 + 8 if isinstance(full, MoEConfig) else hidden * 2 + 8
    return dataclasses.replace(
        model,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        layers=min(full.layers, layers),
        ffn=ffn + -ffn % (layout.state_degree // layout.ep) if layout.ep > 1 else ffn,
        **_twin_experts(full, layout.ep),
        vocab=min(full.vocab | 1, LARGEST_VOCAB),  # odd: shards of the embedding differ in rows
        tied=full.tied,
        weights=FRESH,
    )


def _twin_width(full: DecoderConfig, heads: int, layout: Layout) -> int:
    """Return a width of so many heads that can be sharded where the full model's can: `tp` and `ep` ask for even parts.

    Without these two axes shards of a width may be uneven, and are left so.
    """
    head_dim = next(width for most, width in HEAD_DIMS if heads <= most)
    shards = layout.state_degree if max(layout.tp, layout.ep) > 1 else 1
    if full.hidden % shards == 0:
        while heads * head_dim % shards:
            head_dim += 2
    return heads * head_dim


def _length(seq_len: int, layout: Layout) -> int:
    """Return the length of a sample that the ranks which share it can cut, unevenly where that can be had.

    Ranks of `cp` fill up what does not divide into two chunks for each; those of `tp` need even parts.
    """
    ranks = layout.tp * layout.cp
    if layout.tp > 1 or layout.cp == 1:
        return max(ranks, seq_len - seq_len % ranks)
    lengths = (length for length in range(seq_len, 1, -1) if length % (2 * layout.cp))
    return next(lengths, seq_len)


def _twin_experts(full: DecoderConfig, ep: int) -> dict[str, Any]:
    if not isinstance(full, MoEConfig):
        return {}
    experts = ep * -(-min(full.experts, LARGEST_EXPERTS) // ep)
    return {"experts": experts, "top_k": min(full.top_k, max(1, experts // 2))}


def twin_batch(layout: Layout, rows: Rows = UNEVEN) -> int:
    """Return a global batch of so many rows; the ranks that read them have different numbers, if they can."""
    return layout.data_degree * rows.per_rank - (rows.missing if layout.data_degree > 1 else 0)


def in_one_piece(plan: Plan) -> bool:
    """Return whether the plan runs the batch of a device in one piece, as a model that sees a whole batch needs it."""
    return plan.accumulation == 1 and plan.micro_batch >= LARGEST_MICRO_BATCH


def _batch(plan: Plan, layout: Layout, rows: Rows) -> int:
    if in_one_piece(plan) and rows == FEW and layout.data_degree > 2:
        return layout.data_degree - 1  # a rank has no row at all
    return twin_batch(layout, dataclasses.replace(rows, per_rank=LARGEST_MICRO_BATCH) if in_one_piece(plan) else rows)


def _samples_of(task: Task) -> int:
    """Return the samples of a task's batch, 0 where it is counted in what samples may have any number of."""
    if task.global_batch.unit == "samples":
        return int(task.global_batch.value)
    data = task.data
    if task.global_batch.unit != "tokens" or not isinstance(data, DataSpec) or names_object(data.source):
        return 0
    return int(task.global_batch.value) // data.seq_len


def twin_rows(plan: Plan, layout: Layout, batch: int) -> tuple[int, ...]:
    """Return the rows of the twin's data ranks where the plan's have unequal numbers: its most, its fewest, and others.

    Another number of ranks cannot have the plan's own. They stand in the same proportion; every rank that has any in
    the plan has one row at least.
    """
    degree = layout.data_degree
    if not plan.rows or degree == 1:
        return ()
    ranked = sorted(plan.rows)
    chosen = [ranked[-1], *(ranked[(len(ranked) - 1) * at // max(1, degree - 2)] for at in range(degree - 1))]
    parts = [len(rows_of(batch, degree, at, chosen)) for at in range(degree)]
    for at, share in enumerate(chosen):
        if share and not parts[at]:
            parts[parts.index(max(parts))] -= 1
            parts[at] = 1
    return tuple(parts)


def mixed_modes(blocks: int, offloads_activations: bool = False) -> tuple[str, ...]:
    """Return a mode of recompute for each block, of every kind that a memory budget mixes."""
    modes = ("none", "full") if offloads_activations else ("none", "selective", "full")
    return tuple(modes[index % len(modes)] for index in range(blocks))


def _slots(plan: Plan, rows: Rows) -> float:
    """Return the margin of slots for rows of experts, where the plan has any: with the plan's, chance would decide."""
    if not plan.expert_slots:
        return 0.0
    return SHORT_SLOTS if rows == EVEN else max(AMPLE_SLOTS, plan.expert_slots)


def twin_plan(plan: Plan, dtype: str, *, layout: Layout | None = None, rows: Rows = UNEVEN, layers: int = 0) -> Plan:
    """Return the plan for the twin at a dtype in which rounding does not hide mistakes.

    `layout` is what the twin runs as; by default the first of `twin_layouts`. `layers` are those of a twin that has
    others than the task: a memory budget then mixes all modes over them.
    """
    layout = layout or twin_layout(plan.layout)
    batch = _batch(plan, layout, rows)
    micro_batch = LARGEST_MICRO_BATCH if in_one_piece(plan) else rows.micro_batch
    shares = twin_rows(plan, layout, batch)
    if in_one_piece(plan):
        micro_batch = max(micro_batch, largest_part(batch, layout.data_degree, shares))
    accumulation = accumulation_for(batch, layout.data_degree, micro_batch, shares)
    return dataclasses.replace(
        plan,
        layout=layout,
        micro_batch=micro_batch,
        accumulation=fill_pipeline(accumulation, layout.pp, plan.schedule),
        stages=(),  # the twin has blocks of its own number
        recompute_blocks=mixed_modes(layers, plan.offloads_activations)
        if layers and plan.recompute == "budget"
        else plan.recompute_blocks,
        batch_samples=batch,
        rows=shares,
        precision=dtype,
        compile=False,
        sync=PLAIN,
        bucket_bytes=BUCKET_BYTES,
        state_bucket_bytes=BUCKET_BYTES,
        expert_slots=_slots(plan, rows),
        logits_elements=LOGITS_ELEMENTS,
    )
