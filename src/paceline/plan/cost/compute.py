"""What a step computes: products, attention, memory-bound operators, launches, and the optimizer's update.

Seconds per step on the device with the largest part of the batch. Every compute term is multiplied by the
calibration factor, measured over modelled time of a small training step, where the device was probed.
"""

from __future__ import annotations

from paceline.plan.cost.inputs import ATTENTION_PASSES, BYTES, Context, Rates, weakest
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan

# Per operator under selective recompute: a policy in Python sees every operator of both passes.
SELECTIVE_SECONDS_PER_OPERATOR = 15e-6
FIXED_SECONDS = 2e-3  # the loop around the step: next batch, learning rate, journal


def compute_terms(context: Context, plan: Plan) -> list[Term]:
    """Return the seconds per step of forward, backward and recompute, launches included."""
    rates = context.rates(plan.precision)
    samples, counts = context.device_samples(plan), context.all_counts
    sequence = context.profile.tokens_per_sample
    scale = samples * rates.factor
    forward = scale * rates.product_seconds(counts)
    attention = scale * rates.attention_seconds(counts, sequence)
    moving = scale * 3 * rates.moving_seconds(counts)
    memory_source = rates.device.memory_bytes_per_second.source
    note = calibration_note(rates)
    per = f"{samples} samples/device"
    terms = [
        Term("products, forward", forward, f"{per} x weight FLOPs / rate at their width{note}", rates.product_source),
        Term("products, backward", 2 * forward, f"2 x forward{note}", rates.product_source),
        Term(
            "attention",
            attention,
            f"{per} x causal FLOPs x {ATTENTION_PASSES} (Dao 2023) / rate at sequence {sequence}{note}",
            rates.attention_source,
        ),
        Term(
            "memory-bound operators",
            moving,
            f"{per} x moved elements x {rates.element_bytes} B x 3 passes / memory bandwidth{note}",
            memory_source,
        ),
    ]
    if plan.recompute != "none":
        terms.append(_recompute(context, plan, rates, scale, note))
    busy = sum(term.value for term in terms)
    terms.append(_launches(context, plan, rates, busy))
    terms.append(_casts(context, plan, rates))
    return terms


def calibration_note(rates: Rates) -> str:
    """Return the formula's mention of the calibration factor, or nothing where there is none."""
    return f" x {rates.factor:.2f} (measured calibration step)" if rates.calibration_ratios else ""


def _recompute(context: Context, plan: Plan, rates: Rates, scale: float, note: str) -> Term:
    again = context.recomputable_counts
    moving = rates.moving_seconds(again)
    memory_source = rates.device.memory_bytes_per_second.source
    if plan.recompute == "selective":
        return Term(
            "recompute", scale * moving, f"memory-bound operators of the repeated blocks again{note}", memory_source
        )
    attention = rates.attention_seconds(again, context.profile.tokens_per_sample) / ATTENTION_PASSES
    return Term(
        "recompute",
        scale * (rates.product_seconds(again) + attention + moving),
        f"forward pass of the repeated blocks again{note}",
        weakest(rates.product_source, memory_source),
    )


def _launches(context: Context, plan: Plan, rates: Rates, busy_seconds: float) -> Term:
    """Return the host's time to start operators; on an accelerator only what its work does not hide."""
    launch, operators = rates.device.launch_seconds, context.all_counts.operators
    again = context.recomputable_counts.operators if plan.recompute != "none" else 0
    seconds = plan.accumulation * (3 * operators + again) * launch.value
    source = launch.source
    if plan.recompute == "selective":
        seconds += plan.accumulation * 2 * again * SELECTIVE_SECONDS_PER_OPERATOR
        source = weakest(source, "assumed")
    text = f"{plan.accumulation} micro-batches x (3 x {operators} + {again}) operators x launch time"
    if rates.device.kind != "cpu":
        return Term("operator launches", max(0.0, seconds - busy_seconds), text + ", beyond the device's work", source)
    return Term("operator launches", seconds * rates.factor, text + calibration_note(rates), source)


def _casts(context: Context, plan: Plan, rates: Rates) -> Term:
    """Return the time to cast weights to the compute dtype and to add up gradients of several micro-batches."""
    mixed = rates.element_bytes < 4
    sharded = plan.layout.dp_shard > 1
    cast_bytes = (6 / plan.layout.dp_shard + 6 if sharded else 12) if mixed else 0
    add_bytes = 3 * state_bytes(plan) if plan.accumulation > 1 or (plan.layout.dp_replicate > 1 and not sharded) else 0
    seconds = plan.accumulation * context.parameters * (cast_bytes + add_bytes) / rates.memory_rate
    return Term(
        "casts and gradient sums",
        seconds,
        f"{plan.accumulation} micro-batches x parameters x ({cast_bytes:.3g} B cast + {add_bytes} B added) / bandwidth",
        rates.device.memory_bytes_per_second.source,
    )


def state_bytes(plan: Plan) -> int:
    """Return bytes per weight, gradient or optimizer value: fp32, or fp64 where all is fp64."""
    return max(4, BYTES[plan.precision])


def optimizer_term(context: Context, plan: Plan) -> Term:
    """Return the seconds of clipping and updating this device's share of the parameters.

    AdamW reads weight, gradient and two moments and writes all but the gradient: 7 values; SGD with momentum 5.
    The norm reads each gradient once, clipping reads and writes it: 3 values.
    """
    rates = context.rates(plan.precision)
    share = context.parameters / plan.layout.dp_shard
    values = {"adamw": 7, "sgd": 5}[context.optimizer]
    size = state_bytes(plan)
    seconds = share * size * (values / rates.optimizer_rate.value + 3 / rates.memory_rate)
    text = f"parameters / dp_shard x {size} B x ({values} updated / update rate + 3 clipped / memory bandwidth)"
    return Term("optimizer", seconds, text, rates.optimizer_rate.source)


def fixed_term(context: Context, plan: Plan) -> Term:
    """Return what every step costs whatever its size: the loop, and one collective of a few numbers."""
    devices = context.cluster.devices
    link = context.cluster.links[-1 if devices > context.cluster.devices_per_node else 0]
    seconds = FIXED_SECONDS + (2 * (devices - 1) * link.latency_seconds.value if devices > 1 else 0.0)
    return Term(
        "fixed step overhead",
        seconds,
        "2 ms of host work + one all-reduce of loss, weight and gradient norm",
        "assumed",
    )


def matrix_peak(context: Context, precision: str) -> tuple[float, str]:
    """Return the FLOP/s that model FLOPs utilisation divides by, and what it is called; NaN where unknown."""
    device = context.cluster.device
    if precision in device.peak_flops:
        return device.peak_flops[precision], "of published dense peak"
    if device.matmul_source == "measured" and precision in device.matmul_flops:
        return max(rate for _, rate in device.matmul_flops[precision]), "of measured matrix peak"
    return float("nan"), "peak unknown"
