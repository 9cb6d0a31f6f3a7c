"""What a step holds at its peak, in bytes on the fullest device, by component.

The classes of sharding follow Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 5) as FSDP2 carries them out:
weights rest as fp32 shards in every class and are gathered in the compute dtype. `tp` divides all that a block holds
but the gathered inputs of its products; `cp` divides all that grows with tokens but gathered keys and values; a
pipeline stage keeps what its micro-batches in flight have saved (Korthikanti et al. 2022, arXiv:2205.05198, section
4). Norms' weights, whole on every tensor rank, are counted as if divided: they are a ten-thousandth of a block.
"""

from __future__ import annotations

from paceline.plan.cost.compute import held_text, state_bytes
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.network import BUCKET_BYTES
from paceline.plan.cost.offload import moving_bytes, optimizer_state, rests_on_host
from paceline.plan.cost.parts import Part, Stage
from paceline.plan.cost.rates import BYTES, STATE_VALUES
from paceline.plan.cost.recompute import kept_bytes, unrecomputed_bytes
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan
from paceline.task.profile import BlockProfile

# What allocators keep beyond what is in use, as a part of activations and transients. CPU: eight runs of small decoders
# on one machine missed 16 to 20 % of large sums and more of small ones. CUDA: the caching allocator's rounding.
ALLOCATOR_SHARE = {"cpu": 0.20, "cuda": 0.10}


def memory_terms(context: Context, plan: Plan) -> list[Term]:
    """Return bytes per component on the fullest device; they add up to the peak."""
    stages = context.stages(plan)
    if len(stages) == 1:
        return _stage_terms(context, plan, stages[0])
    # Of equal stages the first holds the most micro-batches.
    return max((_stage_terms(context, plan, stage) for stage in stages), key=lambda terms: sum(t.value for t in terms))


def in_flight(plan: Plan, rank: int) -> float:
    """Return how many micro-batches' activations a pipeline rank holds at most, in units of all its chunks.

    GPipe holds all; 1F1B as many as there are ranks from here on (Narayanan et al. 2021, arXiv:2104.04473, section
    2.2); interleaved, the warm-up chunks of torch.distributed.pipelining and one more.
    """
    ranks, count, chunks = plan.layout.pp, plan.accumulation, plan.virtual_stages
    if ranks == 1:
        return 1.0
    if plan.schedule == "gpipe":
        return float(count)
    if plan.schedule == "1f1b":
        return float(min(count, ranks - rank))
    per_round = count // max(1, count // ranks)
    ahead = 1 if plan.schedule == "zero-bubble" else 2
    warm_up = min(count * chunks, (chunks - 1) * per_round + ahead * (ranks - 1 - rank))
    return min(count * chunks, warm_up + 1) / chunks


def _stage_terms(context: Context, plan: Plan, stage: Stage) -> list[Term]:
    part, layout = stage.part, plan.layout
    size, shards = state_bytes(plan), layout.state_degree
    parameters = part.parameters / layout.tp
    over = held_text(plan) + (f" / dp_shard{' x cp' if layout.cp > 1 else ''} {shards}" if shards > 1 else "")
    values = STATE_VALUES[context.optimizer]
    terms = [
        Term("weights", size * parameters / shards, f"{size} B x {part.parameters:,} parameters{over}", "measured"),
        _gradients(plan, parameters),
        optimizer_state(context, plan, values * size * parameters / shards, f"{values} values x {size} B", over),
        _compute_copies(context, plan, part, in_flight(plan, stage.first)),
        _activations(context, plan, part, in_flight(plan, stage.first)),
        _transients(plan, part),
        _buffers(context, plan, part),
    ]
    if fixed := sum(block.fixed_elements * number for block, number in part.shapes):
        text = f"{max(4, BYTES[plan.precision])} B x gradients of the loss, from forward to backward{_over_tp(plan)}"
        terms.append(Term("loss buffers", max(4, BYTES[plan.precision]) * fixed / layout.tp, text, "measured"))
    short_lived = sum(term.value for term in terms if term.name in ("activations", "transients"))
    kept = ALLOCATOR_SHARE[context.cluster.device.kind]
    terms.append(Term("allocator buffers", kept * short_lived, f"{kept:.0%} of activations and transients", "assumed"))
    runtime = context.cluster.device.runtime_bytes
    return [*terms, Term("runtime", runtime.value, runtime.note or "process before any tensor", runtime.source)]


def _over_tp(plan: Plan) -> str:
    return f" / tp {plan.layout.tp}" if plan.layout.tp > 1 else ""


def _gradients(plan: Plan, parameters: float) -> Term:
    size, shards = state_bytes(plan), plan.layout.state_degree
    # ZeRO-1 adds up whole gradients over micro-batches; with a single one they are scattered as they come.
    whole = shards == 1 or (plan.zero == 1 and plan.accumulation > 1)
    divided = 1 if whole else shards
    text = f"{size} B x parameters{held_text(plan)}" + ("" if whole else f" / dp_shard {shards}")
    if whole and shards > 1:
        text += ", whole until the last micro-batch (ZeRO-1), and this device's shard"
        return Term("gradients", size * parameters * (1 + 1 / shards), text, "measured")
    return Term("gradients", size * parameters / divided, text, "measured")


def _compute_copies(context: Context, plan: Plan, part: Part, flying: float) -> Term:
    """Return weights in the compute dtype beside the fp32 ones: gathered, or cast and saved for the backward pass."""
    size, layout = BYTES[plan.precision], plan.layout
    parameters, root = part.parameters / layout.tp, part.root_parameters / layout.tp
    largest = part.largest_unit(layout.ep) / layout.tp
    here = held_text(plan)
    if not layout.is_sharded:
        if size >= 4:
            return Term("weight copies", 0.0, "none: computes on the weights themselves", "measured")
        if plan.recompute == "none":
            times = f"{flying:g} micro-batches in flight x " if flying > 1 else ""
            text = f"{times}{size} B x parameters{here}, cast"
            return Term("weight copies", flying * size * parameters, text, "measured")
        whole = context.by_mode(plan, part).get("none", Part(())).parameters / layout.tp  # of blocks a budget spares
        held = min(flying * parameters, root + flying * whole + largest)
        spared = "" if not whole else " + blocks without recompute"
        return Term(
            "weight copies", size * held, f"{size} B x (root + largest block{spared}){here}, cast again", "measured"
        )
    gathered = parameters - part.expert_parameters * (1 - 1 / layout.ep) / layout.tp
    if plan.zero == 3:
        held = min(gathered, root + 2 * largest)
        return Term("weight copies", size * held, f"{size} B x (root + 2 largest blocks){here}, gathered", "measured")
    return Term("weight copies", size * gathered, f"{size} B x parameters{here}, gathered for the step", "measured")


def _activations(context: Context, plan: Plan, part: Part, flying: float) -> Term:
    size, samples = BYTES[plan.precision], plan.micro_batch
    spread = plan.layout.tp * plan.layout.cp
    kept = sum(number * unrecomputed_bytes(block, plan) for block, number in part.shapes if not block.recomputable)
    working = hosted = 0.0
    for mode, again in context.by_mode(plan, part).items():
        for block, number in again.shapes:
            full, own = unrecomputed_bytes(block, plan), kept_bytes(block, plan, mode)
            here = 0.0 if rests_on_host(plan, context.cluster.device.kind) else own
            kept, hosted = kept + number * here, hosted + number * (own - here)
            working = max(working, {"none": 0.0, "selective": full - own, "full": full}[mode] + moving_bytes(here, own))
    text = f"{samples} samples x saved values ({size} B, fp32 where kept so)"
    if spread > 1:
        text += f" over cp {plan.layout.cp} x tp {plan.layout.tp}, gathered ones whole"
    if flying != 1:
        text += f", {flying:.3g} micro-batches in flight"
    if plan.recompute != "none":
        text += f", {plan.recompute} recompute: kept ones and one block's all"
    if hosted:
        text += f"; {samples * flying * hosted:.3g} B in host memory, two blocks' on their way"
    return Term("activations", samples * (flying * kept + working), text, "measured")


def _transients(plan: Plan, part: Part) -> Term:
    wide, tp = max(4, BYTES[plan.precision]), plan.layout.tp

    def elements(block: BlockProfile) -> float:
        grown = plan.micro_batch * block.transient_elements / plan.layout.cp
        return (min(grown, block.transient_cap_elements) if block.transient_cap_elements else grown) / tp

    largest = max(elements(block) for block, _ in part.shapes)
    return Term("transients", wide * largest, "largest short-lived buffers of a block (loss, products)", "measured")


def _buffers(context: Context, plan: Plan, part: Part) -> Term:
    """Return buffers that collectives read and write besides what they produce."""
    size, layout = state_bytes(plan), plan.layout
    compute = BYTES[plan.precision]
    held, parts = 0.0, []
    if layout.is_sharded:
        held += (2 * size + compute) * part.largest_unit(layout.ep) / layout.tp
        parts.append(f"({size} + {size} + {compute}) B x largest unit{held_text(plan)}: gradients in and out")
    elif layout.dp_replicate > 1:
        held += min(BUCKET_BYTES, size * part.parameters / layout.tp)
        parts.append("one bucket")
    stream = plan.micro_batch * compute * context.stream_elements / layout.cp
    if layout.tp > 1:
        held += 2 * stream
        parts.append("the stream gathered and before it is scattered")
    if layout.ep > 1 and part.routers:
        most = max(block.routed_elements for block, _ in part.shapes)
        held += 2 * plan.micro_batch * compute * most / layout.cp
        parts.append("a block's routed tokens, sent and received")
    if layout.pp > 1:  # torch.distributed.pipelining sets one aside for each micro-batch and stage, in both directions
        held += 2 * plan.accumulation * plan.virtual_stages * stream / layout.tp
        parts.append(f"2 x {plan.accumulation * plan.virtual_stages} received streams")
    if not parts:
        return Term("communication buffers", 0.0, "none: one device", "measured")
    return Term("communication buffers", held, "; ".join(parts), "assumed")
