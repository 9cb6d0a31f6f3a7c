"""The twin: the task scaled down until a laptop can run it, with its structure kept.

Kept: head ratios, tied weights, the tokenizer, every axis of the layout, the ZeRO class, recompute, clipping, the
optimizer. Shrunk: width, depth, vocabulary, sequence length, batch, degrees. What can be uneven is made so on purpose:
ranks get different numbers of rows, pipeline stages of blocks, shards of the embedding of values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.plan.layout import Layout, accumulation_for
from paceline.plan.plan import Plan
from paceline.plan.stages import fill_pipeline
from paceline.task.models.sizes import DecoderConfig, MoEConfig, is_named, resolve_decoder
from paceline.task.task import DataSpec, ModelSpec, Task

SMALLEST_WORLD = 4
LARGEST_MICRO_BATCH = 4  # rows of the twin's batch that a rank has at most
HEAD_DIMS = ((16, 8), (64, 4), (10_000, 2))  # (up to so many heads, width of each)
LAYERS = 3
SEQ_LEN = 24
LARGEST_EXPERTS = 8
LARGEST_VOCAB = 521  # a prime: uneven over every number of shards; ids of more are folded into it (fold.py)
# Adam divides by |g| + eps: with a tiny eps it turns rounding noise in near-zero gradients into whole updates.
TWIN_EPS = 1e-4


def twin_task(task: Task, plan: Plan, data_vocab: int | None, *, exact: bool = False) -> Task:
    """Return the task, small enough to check. A user's own module and data are used as they are.

    `exact` keeps the layout's degrees as they are instead of lowering them.
    """
    layout = _run_as(plan, exact)
    batch = twin_batch(layout)
    small: dict[str, Any] = {"optimizer": dataclasses.replace(task.optimizer, eps=max(task.optimizer.eps, TWIN_EPS))}
    small["global_batch"] = dataclasses.replace(task.global_batch, value=batch, unit="samples")
    if isinstance(task.data, DataSpec) and data_vocab is not None:
        small["data"] = dataclasses.replace(task.data, seq_len=_shared(min(SEQ_LEN, task.data.seq_len), layout))
    if isinstance(task.model, ModelSpec) and is_named(task.model.name):
        stages = layout.pp * plan.virtual_stages
        # A block for every stage and one more, so that stages are uneven.
        layers = max(LAYERS, stages + 1 if stages > 1 else 0)
        small["model"] = twin_model(task.model, data_vocab or 0, task, layout, layers)
    return dataclasses.replace(task, **small)


def _run_as(plan: Plan, exact: bool) -> Layout:
    return plan.layout if exact else twin_layout(plan.layout)


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
        weights="",
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


def _shared(seq_len: int, layout: Layout) -> int:
    """Return the length of a sample that the ranks which share it can cut evenly."""
    ranks = layout.tp * layout.cp
    return max(ranks, seq_len - seq_len % ranks)


def _twin_experts(full: DecoderConfig, ep: int) -> dict[str, Any]:
    if not isinstance(full, MoEConfig):
        return {}
    experts = ep * -(-min(full.experts, LARGEST_EXPERTS) // ep)
    return {"experts": experts, "top_k": min(full.top_k, max(1, experts // 2))}


def twin_layout(layout: Layout) -> Layout:
    """Return the layout with its degrees lowered, the largest first, until two per axis are left or 4 processes in all.

    Two of an axis compute what any number does; more of them only take longer to start. No axis is left out.
    """
    degrees = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    axes = sum(degree > 1 for axis, degree in degrees.items() if axis != "ep")
    degrees["ep"] = 1
    while Layout(**degrees).devices > max(SMALLEST_WORLD, 2**axes):
        lower = {axis: _lower(axis, degree) for axis, degree in degrees.items() if _lower(axis, degree) < degree}
        if not lower:
            break
        axis = max(lower, key=lambda a: degrees[a])
        degrees[axis] = lower[axis]
    degrees["ep"] = _twin_ep(layout, degrees["dp_shard"] * degrees["cp"])
    return Layout(**degrees)


def _lower(axis: str, degree: int) -> int:
    """Return the next lower degree of an axis that is still above one, or the same where there is none.

    It divides the degree, so that whatever can be shared by the one can be shared by the other. The data axes, which
    share a batch of any size, may have another where the degree is a prime.
    """
    other = min(degree, 3 if degree > 3 else 2) if axis in ("dp_replicate", "dp_shard") else degree
    return max((divisor for divisor in range(2, degree) if degree % divisor == 0), default=other)


def _twin_ep(layout: Layout, devices: int) -> int:
    """Return a degree of `ep` over so many devices: above one, and below all, where the layout's is."""
    shared = layout.ep < layout.dp_shard * layout.cp  # several devices hold the same experts
    fitting = [degree for degree in range(2, devices + 1) if devices % degree == 0]
    fitting = [degree for degree in fitting if degree < devices or not shared] or fitting
    return 1 if layout.ep == 1 else max((degree for degree in fitting if degree <= layout.ep), default=fitting[0])


def twin_batch(layout: Layout) -> int:
    """Return a global batch that leaves the ranks with different numbers of rows, in two micro-batches or more."""
    return layout.data_degree * 4 - 1


def mixed_modes(blocks: int, offloads_activations: bool = False) -> tuple[str, ...]:
    """Return a mode of recompute for each block, of every kind that a memory budget mixes."""
    modes = ("none", "full") if offloads_activations else ("none", "selective", "full")
    return tuple(modes[index % len(modes)] for index in range(blocks))


def twin_plan(plan: Plan, dtype: str, *, exact: bool = False, layers: int = 0) -> Plan:
    """Return the plan for the twin at a dtype in which rounding does not hide mistakes.

    `layers` are those of a twin that has others than the task: a memory budget then mixes all modes over them.
    """
    layout = _run_as(plan, exact)
    batch = twin_batch(layout)
    whole = plan.accumulation == 1 and plan.micro_batch >= LARGEST_MICRO_BATCH
    micro_batch = LARGEST_MICRO_BATCH if whole else 2
    accumulation = accumulation_for(batch, layout.data_degree, micro_batch)
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
        precision=dtype,
        compile=False,
    )
