"""What a step holds at its peak, in bytes on the fullest device, by component.

The classes of sharding follow Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 5) as FSDP2 carries them out:
weights rest as fp32 shards in every class and are gathered in the compute dtype.
"""

from __future__ import annotations

from paceline.plan.cost.compute import state_bytes
from paceline.plan.cost.inputs import BYTES, STATE_VALUES, Context
from paceline.plan.cost.network import BUCKET_BYTES
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan

# What allocators keep beyond what is in use, as a part of activations and transients. CPU: eight runs of small decoders
# on one machine missed 16 to 20 % of large sums and more of small ones. CUDA: the caching allocator's rounding.
ALLOCATOR_SHARE = {"cpu": 0.20, "cuda": 0.10}


def memory_terms(context: Context, plan: Plan) -> list[Term]:
    """Return bytes per component; they add up to the peak."""
    size, shards = state_bytes(plan), plan.layout.dp_shard
    parameters = context.parameters
    over = f" / dp_shard {shards}" if shards > 1 else ""
    values = STATE_VALUES[context.optimizer]
    terms = [
        Term("weights", size * parameters / shards, f"{size} B x {parameters:,} parameters{over}", "measured"),
        _gradients(context, plan),
        Term(
            "optimizer state",
            values * size * parameters / shards,
            f"{values} values x {size} B x parameters{over} ({context.optimizer})",
            "measured",
        ),
        _compute_copies(context, plan),
        _activations(context, plan),
        _transients(context, plan),
        _buffers(context, plan),
    ]
    short_lived = sum(term.value for term in terms if term.name in ("activations", "transients"))
    kept = ALLOCATOR_SHARE[context.cluster.device.kind]
    terms.append(Term("allocator buffers", kept * short_lived, f"{kept:.0%} of activations and transients", "assumed"))
    runtime = context.cluster.device.runtime_bytes
    return [*terms, Term("runtime", runtime.value, runtime.note or "process before any tensor", runtime.source)]


def _gradients(context: Context, plan: Plan) -> Term:
    size, shards = state_bytes(plan), plan.layout.dp_shard
    # ZeRO-1 adds up whole gradients over micro-batches; with a single one they are scattered as they come.
    whole = shards == 1 or (plan.zero == 1 and plan.accumulation > 1)
    divided = 1 if whole else shards
    text = f"{size} B x parameters" + ("" if whole else f" / dp_shard {shards}")
    if whole and shards > 1:
        text += ", whole until the last micro-batch (ZeRO-1), and this device's shard"
        return Term("gradients", size * context.parameters * (1 + 1 / shards), text, "measured")
    return Term("gradients", size * context.parameters / divided, text, "measured")


def _compute_copies(context: Context, plan: Plan) -> Term:
    """Return weights in the compute dtype beside the fp32 ones: gathered, or cast and saved for the backward pass."""
    size = BYTES[plan.precision]
    if plan.layout.dp_shard == 1:
        if size >= 4:
            return Term("weight copies", 0.0, "none: computes on the weights themselves", "measured")
        if plan.recompute == "none":
            return Term("weight copies", size * context.parameters, f"{size} B x parameters, cast", "measured")
        held = min(context.parameters, context.root_parameters + context.largest_unit)
        return Term("weight copies", size * held, f"{size} B x (root + largest block), cast again", "measured")
    if plan.zero == 3:
        held = min(context.parameters, context.root_parameters + 2 * context.largest_unit)
        here = held * context.gathered_share(plan)
        return Term("weight copies", size * here, f"{size} B x (root + 2 largest blocks), gathered", "measured")
    whole = context.parameters * context.gathered_share(plan)
    return Term("weight copies", size * whole, f"{size} B x parameters, gathered for the step", "measured")


def _activations(context: Context, plan: Plan) -> Term:
    size, samples = BYTES[plan.precision], plan.micro_batch
    wide = max(4, size)
    kept, working = 0.0, 0.0
    for block in context.profile.blocks:
        full = size * block.saved_elements + wide * block.saved_fp32_elements
        if plan.recompute == "none" or not block.recomputable:
            kept += full
        elif plan.recompute == "selective":
            kept += size * block.selective_elements
            working = max(working, full - size * block.selective_elements)
        else:
            kept += size * block.input_elements
            working = max(working, full)
    text = f"{samples} samples x saved values ({size} B, fp32 where kept so)"
    if plan.recompute != "none":
        text += f", {plan.recompute} recompute: kept ones and one block's all"
    return Term("activations", samples * (kept + working), text, "measured")


def _transients(context: Context, plan: Plan) -> Term:
    wide = max(4, BYTES[plan.precision])
    largest = max(block.transient_elements for block in context.profile.blocks)
    return Term(
        "transients",
        plan.micro_batch * wide * largest,
        "largest short-lived buffers of a block (loss, products)",
        "measured",
    )


def _buffers(context: Context, plan: Plan) -> Term:
    """Return buffers that collectives read and write besides what they produce."""
    size, layout = state_bytes(plan), plan.layout
    if layout.dp_shard > 1:
        compute = BYTES[plan.precision]
        held = (2 * size + compute) * context.largest_unit * context.gathered_share(plan)
        return Term(
            "communication buffers",
            held,
            f"({size} + {size} + {compute}) B x largest unit: gradients in and out",
            "assumed",
        )
    if layout.dp_replicate > 1:
        return Term("communication buffers", min(BUCKET_BYTES, size * context.parameters), "one bucket", "assumed")
    return Term("communication buffers", 0.0, "none: one device", "measured")
