"""What a step computes: products, attention, memory-bound operators, launches, and the optimizer's update.

Seconds per step on the device with the largest part of the batch, in the slowest pipeline stage. `tp` divides every
block's arithmetic, since the sequence is split where matrices are not (Korthikanti et al. 2022, arXiv:2205.05198), and
makes its products narrower; `cp` divides what every token costs, the causal half included where chunks are dealt out
in pairs from both ends (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). Every compute term is multiplied by the
calibration factor, measured over modelled time of a small training step, where the device was probed.
"""

from __future__ import annotations

import math

from paceline.plan.cost.inputs import Context
from paceline.plan.cost.parts import Part
from paceline.plan.cost.rates import ATTENTION_PASSES, BYTES, Rates, weakest
from paceline.plan.cost.recompute import again_seconds
from paceline.plan.forecast import Term
from paceline.plan.plan import SAVED_KINDS, Plan

# Per operator under selective recompute: a policy in Python sees every operator of both passes.
SELECTIVE_SECONDS_PER_OPERATOR = 15e-6
FIXED_SECONDS = 2e-3  # the loop around the step: next batch, learning rate, journal


def compute_terms(context: Context, plan: Plan) -> list[Term]:
    """Return the seconds per step of forward, backward and recompute, launches included."""
    rates, part, tp = context.rates(plan.precision), context.slowest(plan), plan.layout.tp
    samples, counts = context.device_samples(plan), part.counts
    sequence = context.profile.tokens_per_sample
    scale = samples * rates.factor / plan.layout.cp
    forward = scale * rates.product_seconds(counts, tp)
    attention = scale * rates.attention_seconds(counts, sequence) / tp
    moving = scale * 3 * rates.moving_seconds(counts) / tp
    memory_source = rates.device.memory_bytes_per_second.source
    note = calibration_note(rates)
    per = f"{samples} samples/device{shared_text(plan)}"
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
        terms.append(_recompute(context, plan, rates, part, scale, note))
    busy = sum(term.value for term in terms)
    terms.append(_launches(context, plan, rates, part, busy))
    terms.append(_casts(plan, rates, context.heaviest(plan)))
    return terms


def shared_text(plan: Plan) -> str:
    """Return what of the model and of a sample one device computes, for a formula; empty where it is all."""
    layout = plan.layout
    shares = [f"{axis} {getattr(layout, axis)}" for axis in ("cp", "tp") if getattr(layout, axis) > 1]
    text = " / " + " / ".join(shares) if shares else ""
    return text + (" in the slowest stage" if layout.pp > 1 else "")


def calibration_note(rates: Rates) -> str:
    """Return the formula's mention of the calibration factor, or nothing where there is none."""
    return f" x {rates.factor:.2f} (measured calibration step)" if rates.calibration_ratios else ""


def _recompute(context: Context, plan: Plan, rates: Rates, part: Part, scale: float, note: str) -> Term:
    groups, sequence = context.by_mode(plan, part), context.profile.tokens_per_sample
    seconds = sum(again_seconds(again.counts, plan, mode, rates, sequence) for mode, again in groups.items())
    memory_source = rates.device.memory_bytes_per_second.source
    if plan.recompute == "selective" and set(plan.recompute_save) == set(SAVED_KINDS):
        text, source = "memory-bound operators of the repeated blocks again", memory_source
    else:
        text, source = "forward pass of the repeated blocks again", weakest(rates.product_source, memory_source)
    if plan.recompute == "selective" and source != memory_source:
        text += f" but kept {' and '.join(plan.recompute_save)}"
    if plan.recompute == "budget":
        text += f", of {', '.join(f'{len(again.blocks)} {mode}' for mode, again in groups.items())}"
    return Term("recompute", scale * seconds, f"{text}{note}", source)


def _launches(context: Context, plan: Plan, rates: Rates, part: Part, busy_seconds: float) -> Term:
    """Return the host's time to start operators; on an accelerator only what its work does not hide."""
    launch, operators = rates.device.launch_seconds, part.counts.operators
    groups = {mode: again.counts.operators for mode, again in context.by_mode(plan, part).items() if mode != "none"}
    again = sum(groups.values())
    seconds = plan.accumulation * (3 * operators + again) * launch.value
    source = launch.source
    if "selective" in groups:
        seconds += plan.accumulation * 2 * groups["selective"] * SELECTIVE_SECONDS_PER_OPERATOR
        source = weakest(source, "assumed")
    text = f"{plan.accumulation} micro-batches x (3 x {operators} + {again}) operators x launch time"
    if rates.device.kind != "cpu":
        return Term("operator launches", max(0.0, seconds - busy_seconds), text + ", beyond the device's work", source)
    return Term("operator launches", seconds * rates.factor, text + calibration_note(rates), source)


def _casts(plan: Plan, rates: Rates, part: Part) -> Term:
    """Return the time to cast weights to the compute dtype and to add up gradients of several micro-batches."""
    mixed = rates.element_bytes < 4
    sharded, layout = plan.layout.is_sharded, plan.layout
    cast_bytes = (6 / layout.state_degree + 6 if sharded else 12) if mixed else 0
    add_bytes = 3 * state_bytes(plan) if plan.accumulation > 1 or (layout.dp_replicate > 1 and not sharded) else 0
    seconds = plan.accumulation * part.parameters / layout.tp * (cast_bytes + add_bytes) / rates.memory_rate
    return Term(
        "casts and gradient sums",
        seconds,
        f"{plan.accumulation} micro-batches x parameters{held_text(plan)} x ({cast_bytes:.3g} B cast + {add_bytes} B"
        " added) / bandwidth",
        rates.device.memory_bytes_per_second.source,
    )


def held_text(plan: Plan) -> str:
    """Return how a device's share of the parameters is divided, ZeRO aside, for a formula; empty where it has all."""
    layout = plan.layout
    return (" of the largest stage" if layout.pp > 1 else "") + (f" / tp {layout.tp}" if layout.tp > 1 else "")


def state_bytes(plan: Plan) -> int:
    """Return bytes per weight, gradient or optimizer value: fp32, or fp64 where all is fp64."""
    return max(4, BYTES[plan.precision])


def optimizer_term(context: Context, plan: Plan) -> Term:
    """Return the seconds of clipping and updating this device's share of the parameters.

    AdamW reads weight, gradient and two moments and writes all but the gradient: 7 values; SGD with momentum 5.
    The norm reads each gradient once, clipping reads and writes it: 3 values.
    """
    rates = context.rates(plan.precision)
    share = context.heaviest(plan).parameters / plan.layout.tp / plan.layout.state_degree
    values = {"adamw": 7, "sgd": 5}[context.optimizer]
    size = state_bytes(plan)
    seconds = share * size * (values / rates.optimizer_rate.value + 3 / rates.memory_rate)
    over = " x cp" if plan.layout.cp > 1 else ""
    text = f"parameters{held_text(plan)} / dp_shard{over} x {size} B"
    text += f" x ({values} updated / update rate + 3 clipped / memory bandwidth)"
    return Term("optimizer", seconds, text, rates.optimizer_rate.source)


def fixed_term(context: Context, plan: Plan) -> Term:
    """Return what every step costs whatever its size: the loop, and one collective of a few numbers."""
    cluster = context.cluster
    near, far = cluster.links[0].latency_seconds.value, cluster.links[-1].latency_seconds.value
    if cluster.devices <= cluster.devices_per_node:
        latency = 2 * (cluster.devices - 1) * near if cluster.devices > 1 else 0.0
    else:  # a few numbers travel along trees between nodes (NCCL 2.4 and later)
        latency = 2 * (cluster.devices_per_node - 1) * near
        latency += 2 * math.ceil(math.log2(cluster.devices / cluster.devices_per_node)) * far
    seconds = FIXED_SECONDS + latency
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
