"""What a step computes: products, attention, memory-bound operators, launches, and the optimizer's update.

Seconds per step on the device with the largest part of the batch, in the slowest pipeline stage. `tp` divides every
block's arithmetic, since the sequence is split where matrices are not (Korthikanti et al. 2022, arXiv:2205.05198), and
makes its products narrower; `cp` divides what every token costs, the causal half included where chunks are dealt out
in pairs from both ends (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). Every compute term is multiplied by the
calibration factor, measured over modelled time of a small training step, where the device was probed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.plan.cost.columns import Columns, Floats, Ints
from paceline.plan.cost.components import Component, in_modes
from paceline.plan.cost.model_parts import AGAIN, MODES, Parts
from paceline.plan.cost.rates import ATTENTION_PASSES, BYTES
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.time.block_factors import measured_text
from paceline.plan.cost.time.unpack import unpack_components
from paceline.plan.feasible.stages import SPLIT_BACKWARD
from paceline.spec.cluster import SOURCES
from paceline.spec.optimizers import gathered_values, state_values
from paceline.spec.plan import SAVED_KINDS

# Per operator under selective recompute: a policy in Python sees every operator of both passes. Where attention's core
# alone is computed again no policy is asked: a plain checkpoint is around it.
SELECTIVE_SECONDS_PER_OPERATOR = 15e-6
# Starts of an operator that a backward pass in two parts takes beyond one: torch's pipelining walks the graph in Python
# for each weight, hooks into it, and starts a pass of its own for each weight's gradient (`stage_backward_input` and
# `stage_backward_weight` of torch/distributed/pipelining/_backward.py). Measured on one core, on 8 tokens, where
# nothing else takes time: decoder blocks 1.9 and 2.5, encoder blocks 3.4 (2026-11-29, torch 2.13, an Intel Xeon).
SPLIT_STARTS = 2.5
# Of an operator on torch's DTensors, which Python takes to a rank's own part, beside its start: in 2023 a product took
# 0.34 ms so (pytorch/pytorch pull request 107305). 0.1 ms is what uncompiled torchtitan with tensor ranks is left with:
# 13 ms a layer in four passes of 30 to 34 operators, on A100 and on MI355X alike (rounds nine and eleven).
DISPATCH_SECONDS = 1e-4
# Of a layer of Transformer Engine, the time that a host takes to start it over that of its fused kernels, as they are
# counted: its modules are functions of autograd in Python. Megatron-LM's authors of FlexShard tell 2.3 to 2.8 ms for
# the forward pass of a layer of 2,048 whose kernels take a device 0.8, and steps on 4 and 8 H100 of 80 to 115 ms for
# each micro-batch of 24 of them where 50 are counted: 1.57 to 2.28, the more the fewer micro-batches share a step's
# ends (rows of megatron_h100_96 in docs/scripts/accuracy/rounds/blind_rows_14.csv, read 2026-11-30).
ENGINE_STARTS = 1.75
# Of a routed layer, short operators that follow the wait for the experts' numbers of rows: as many as routing has
# (ROUTING_OPERATORS of task/profile/transformer.py). Assumed: what of them a device's queue hides was not measured.
ROUTED_STARTS = 16
CPU_FIXED_SECONDS = 2e-3  # the loop around a step on a CPU: next batch, learning rate, journal
ROOFLINE = "roofline (Williams et al. 2009)"
COUNTED = "counted elements over bandwidth"


def compute_components(sheet: Sheet) -> list[Component]:
    """Return the seconds per step of forward, backward and recompute, launches included."""
    columns, rates, part = sheet.columns, sheet.rates, sheet.slowest
    sequence = sheet.context.profile.tokens_per_sample
    scale = columns.device_samples / columns.cp
    note = calibration_note(sheet)
    sources = (rates.product_source, rates.attention_source, rates.memory_source)
    product, attention, memory = (SOURCES.index("measured" if sheet.measured else source) for source in sources)

    def per(index: int) -> str:
        fill = f" x {sheet.fill('tokens')[index]:.2f} full" if sheet.context.profile.fills else ""
        return f"{columns.device_samples[index]:g} samples/device{fill}{sheet.share_text(index)}"

    def over(seconds: Floats) -> Floats:
        return scale * np.einsum("rs,rs->r", part.counts, seconds * sheet.factors)

    forward = over(sheet.product_seconds)
    backward = over(sheet.backward_product_seconds)
    found = [
        Component(
            "products, forward",
            "products",
            forward,
            product,
            lambda i: f"{per(i)} x weight FLOPs / rate at their width{note}",
            ROOFLINE,
            clock="forward_backward",
        ),
        Component(
            "products, backward",
            "products",
            backward,
            product,
            lambda i: f"{_times(backward[i], forward[i])} x forward{note}",
            ROOFLINE,
            clock="forward_backward",
        ),
        Component(
            "attention",
            "attention",
            over(sheet.attention_seconds),
            attention,
            lambda i: f"{per(i)} x causal FLOPs x {ATTENTION_PASSES} (Dao 2023) / rate at sequence {sequence}{note}",
            "fused attention (Dao 2023, arXiv:2307.08691)",
            clock="forward_backward",
        ),
        Component(
            "memory-bound operators",
            "elementwise",
            over(sheet.passes * sheet.moving_seconds),
            memory,
            lambda i: f"{per(i)} x moved elements x {rates.element_bytes} B x 3 passes / memory bandwidth{note}",
            COUNTED,
            clock="forward_backward",
        ),
        Component(
            "recompute",
            "recompute",
            scale * sheet.over_modes(sheet.again_seconds * sheet.factors, sheet.slowest_row),
            max(product, memory),
            lambda i: f"{_recompute_text(sheet, i)}{note}",
            "Chen et al. 2016, arXiv:1604.06174",
            ~columns.recomputes("none"),
            "forward_backward",
        ),
    ]
    return [*found, _casts(sheet), *unpack_components(sheet)]


def _times(backward: float, forward: float) -> str:
    """Return how often the backward pass has the products of the forward pass: 2, less where weights are frozen."""
    return f"{backward / forward:.3g}" if forward > 0 else "2"


def _recompute_text(sheet: Sheet, index: int) -> str:
    """Return what of a plan's repeated blocks is computed again, in words."""
    plan = sheet.columns.plan(index)
    if plan.recompute == "selective" and set(plan.recompute_save) == set(SAVED_KINDS):
        return "memory-bound operators of the repeated blocks again"
    text = "forward pass of the repeated blocks again"
    if sheet.context.software.stops_early and sheet.context.shapes["last_flops"].any():
        text += ", up to their last product"
    if plan.recompute == "selective":
        text += f" but kept {' and '.join(plan.recompute_save)}"
    if plan.recompute == "budget":
        counts = sheet.modes_of(int(sheet.slowest_row[index])).sum(axis=1)
        text += f", of {', '.join(f'{n:.0f} {mode}' for mode, n in zip(MODES, counts, strict=True) if n)}"
    return text


def calibration_note(sheet: Sheet) -> str:
    """Return the formula's mention of what measured seconds make of it, or nothing where there are none."""
    if sheet.measured:
        return measured_text(sheet.measured, at_home=bool(sheet.context.cluster.host))
    rates = sheet.rates
    return f" x {rates.factor:.2f} (measured calibration step)" if rates.calibration_ratios else ""


def launch_component(sheet: Sheet, busy_seconds: Floats) -> Component:
    """Return the host's time to start operators and collectives; on an accelerator only what its work does not hide.

    `busy_seconds` are those of the device's work inside forward and backward. On a CPU, collectives' launches are part
    of their measured latency.
    """
    columns, rates = sheet.columns, sheet.rates
    launch, on_cpu = rates.launch_seconds, rates.device.kind == "cpu"
    starts = host_starts(sheet)
    operators, again, selective, seconds = starts.operators, starts.again, starts.selective, starts.seconds
    awaited = np.zeros(len(columns))
    if not on_cpu:
        awaited = _routing_starts(sheet, starts.stage)
        exposed = launch.value * sheet.passes_made * awaited
        seconds = np.maximum(0.0, seconds - busy_seconds - exposed) + exposed
        seconds = np.where(sheet.context.software.captured & (awaited > 0), 0.0, seconds)
    note = calibration_note(sheet) if on_cpu else ", beyond the device's work"
    slower = _dispatch_seconds(sheet)
    known = SOURCES.index("measured" if on_cpu and sheet.measured else launch.source)
    weak = max(known, SOURCES.index("assumed"))
    return Component(
        "operator launches",
        "host",
        seconds,
        np.where((selective > 0) | (awaited > 0), weak, known),
        lambda i: (
            f"{sheet.passes_made[i]:g} micro-batches x ({starts.passes[i]:g} x {operators[i]:.0f} + {again[i]:.0f}) "
            f"operators x launch time{' on DTensors' if slower[i] else ''}{note}"
            f"{f', and {awaited[i]:.0f} that the device waits for' if awaited[i] else ''}"
        ),
        "host and device in parallel",
        clock="forward_backward",
    )


@dataclass(frozen=True)
class HostStarts:
    """What the host starts in the pipeline stage whose launches set the pace, for every plan."""

    stage: Ints  # its row of the sheet
    operators: Floats  # in a forward pass of a micro-batch
    passes: Floats  # over these in forward and backward
    again: Floats  # for recompute
    selective: Floats  # for recompute that a policy in Python chooses
    seconds: Floats  # of a step, whatever the device's work hides of them


def host_starts(sheet: Sheet) -> HostStarts:
    """Return what the host starts, and how long that takes it by itself."""
    columns, rates, rows = sheet.columns, sheet.rates, sheet.rows
    launch, on_cpu = rates.launch_seconds, rates.device.kind == "cpu"
    shapes, software, constants = sheet.context.shapes, sheet.context.software, sheet.context.constants
    slowed = shapes["operators"] * (sheet.factors if on_cpu else 1.0)
    if software.engine_layers and not on_cpu:
        slowed = slowed * np.where(shapes.repeated, ENGINE_STARTS, 1.0)
    if not software.fused:
        plain = shapes["plain_operators"]
        slowed = plain + (slowed - plain) * np.where(shapes.repeated, constants.unfused_launches, 1.0)
    operators, started = rows.parts.number(slowed), slowed[None]
    if not on_cpu:
        split = (columns.tp > 1)[:, None] * shapes.collectives
        operators = operators + 2 / 3 * np.einsum("rs,rs->r", rows.parts.counts, split[rows.plan])
        started = started + split
    again = sheet.over_modes(in_modes(started, *AGAIN))
    selective = sheet.over_modes(in_modes(started, "selective"))
    policy = 0.0 if software.selective_is_attention else SELECTIVE_SECONDS_PER_OPERATOR
    passes = 3 + np.where(columns.scheduled(*SPLIT_BACKWARD), SPLIT_STARTS, 0.0)
    each = launch.value + _dispatch_seconds(sheet)[rows.plan]
    per_micro_batch = (passes[rows.plan] * operators + again) * each + 2 * selective * policy
    if software.pipeline_waits:
        size, stride = columns.group("pp")
        waits = (columns.tp > 1) & (columns.pp > 1) & (size * stride > sheet.context.cluster.domain)
        each = 2 * np.where(waits, columns.tp, 0) * constants.pipeline_wait_seconds
        per_micro_batch = per_micro_batch + rows.parts.number(shapes.collectives) * each[rows.plan]
    # The stage that launches most sets the pace where hosts do; on a CPU, launching is part of the slowest's work.
    at = sheet.slowest_row if on_cpu else rows.largest(per_micro_batch)
    return HostStarts(at, operators[at], passes, again[at], selective[at], sheet.passes_made * per_micro_batch[at])


def _dispatch_seconds(sheet: Sheet) -> Floats:
    """Return what an operator's start takes longer where tensor ranks have it on DTensors, and nothing is compiled.

    Example: 33 operators, twice as many as fused ones, in four passes take 13 ms a layer.
    """
    eager = sheet.context.software.splits_by_dtensor and not sheet.columns.common.compile
    return np.where((sheet.columns.tp > 1) & eager, DISPATCH_SECONDS, 0.0)


def _routing_starts(sheet: Sheet, rows: Ints) -> Floats:
    """Return how many operators of a micro-batch the host starts while its device waits for them.

    Experts that drop no token have as many rows as tokens chose them. The host waits for these numbers in every forward
    pass of a routed layer (`_maybe_dtoh_and_synchronize`, megatron/core/transformer/moe/token_dispatcher.py), and so
    has nothing started in advance when it goes on.
    """
    shapes = sheet.context.shapes
    routed = np.array(shapes["routed_elements"] > 0, dtype=np.float64)
    again = sheet.over_modes(in_modes(routed[None], "full"))
    found: Floats = ROUTED_STARTS * (sheet.rows.parts.number(routed) + again)[rows]
    return found


def _casts(sheet: Sheet) -> Component:
    """Return the time to cast weights to the compute dtype and to add up gradients of several micro-batches."""
    columns, rates, software = sheet.columns, sheet.rates, sheet.context.software
    sharded = columns.is_sharded
    summed = max(software.gradient_bytes, state_bytes(columns.precision) if rates.element_bytes > 4 else 0)
    casts = np.where(sharded, 6 / columns.state_degree + 6, 12.0)
    if rates.element_bytes >= 4 or software.master_weights or software.weight_bytes:  # nothing is cast
        casts = np.zeros(len(columns))
    adds = np.where((columns.accumulation > 1) | ((columns.dp_replicate > 1) & ~sharded), 3 * summed, 0)
    if software.fuses_gradient_sums:
        adds = np.zeros(len(columns))
    experts = sheet.heaviest.total("expert_parameters")
    narrow = sheet.heaviest.total("narrow_parameters")  # they rest as they are computed with
    held = (sheet.heaviest.parameters - narrow - experts * (1 - 1 / columns.ep)) / columns.tp
    return Component(
        "casts and gradient sums",
        "casts",
        sheet.passes_made * held * (casts + adds) / rates.memory_rate,
        SOURCES.index(rates.memory_source),
        lambda i: (
            f"{sheet.passes_made[i]:g} micro-batches x parameters{sheet.held_text(i)} x ({casts[i]:.3g} B cast + "
            f"{adds[i]} B added) / bandwidth"
        ),
        COUNTED,
        clock="forward_backward",
    )


def state_bytes(precision: str) -> int:
    """Return bytes per weight, gradient or optimizer value: fp32, or fp64 where all is fp64."""
    return max(4, BYTES[precision])


def updated_bytes(sheet: Sheet) -> tuple[int, int]:
    """Return bytes of a weight that is updated, or of its gradient, and of a value that an optimizer keeps for it."""
    software, size = sheet.context.software, state_bytes(sheet.columns.precision)
    return software.weight_bytes or size, software.moment_bytes or size


def updated_parameters(columns: Columns, part: Parts) -> Floats:
    """Return the parameters of every plan's part whose optimizer state a device holds, and that it updates.

    Example: of 8e9 trained parameters of which 6e9 are experts', 16 ranks with ep = 8 hold 0.5e9 each in a class of
    ZeRO, and as plain copies 2e9 and an eighth of the experts, 2.75e9.
    """
    experts = part.total("expert_parameters")
    whole = part.trained - experts * (1 - 1 / columns.ep)
    found: Floats = np.where(columns.zero > 0, part.trained / columns.state_degree, whole) / columns.tp
    return found


def optimizer_component(sheet: Sheet) -> Component:
    """Return the seconds of clipping and updating this device's share of the parameters.

    AdamW reads weight, gradient and two moments and writes all but the gradient: 7 values; SGD with momentum 5.
    The norm reads each gradient once, clipping reads and writes it: 3 values. A rule that gathers whole parameters
    (gathers.py) updates all of them on every device.

    Example: AdamW moves 28 bytes a weight in an update, and 14 where weights and moments rest in 16 bits.
    """
    rates, columns, context = sheet.rates, sheet.columns, sheet.context
    size, of_moment = updated_bytes(sheet)
    values = 2 * state_values(context.optimizer) * of_moment / size + 3
    trained, local = sheet.heaviest.trained, updated_parameters(columns, sheet.heaviest)
    updated = trained if gathered_values(context.optimizer) else local
    if sheet.measured:
        each = sheet.measured.update_seconds / sheet.measured.update_parameters
        return Component(
            "optimizer",
            "update",
            updated * each,
            SOURCES.index("measured"),
            lambda i: f"{updated[i]:,.0f} parameters x {each * 1e9:.3g} ns for norm, clipping and update, as measured",
            "measured on the task itself",
            clock="optimizer",
        )
    update = updated * size * values / rates.optimizer_rate.value
    clip = local * size * 3 / rates.memory_rate

    def text(i: int) -> str:
        if updated[i] == local[i]:
            both = f"({values:g} updated / update rate + 3 clipped / memory bandwidth)"
            return f"{local[i]:,.0f} parameters x {size} B x {both}"
        clipped = f"{local[i]:,.0f} parameters x {size} B x 3 clipped / memory bandwidth"
        each = f"{size} B x {values:g} updated, on every device"
        return f"{updated[i]:,.0f} parameters x {each} / update rate + {clipped}"

    return Component(
        "optimizer",
        "update",
        update + clip,
        SOURCES.index(rates.optimizer_rate.source),
        text,
        COUNTED,
        clock="optimizer",
    )


def fixed_component(sheet: Sheet) -> Component:
    """Return what every step costs whatever its size: the loop, and one collective of a few numbers."""
    cluster = sheet.context.cluster
    loop = CPU_FIXED_SECONDS if cluster.device.kind == "cpu" else sheet.context.constants.fixed_seconds
    near, far = cluster.links[0].latency_seconds.value, cluster.links[-1].latency_seconds.value
    if cluster.devices <= cluster.domain:
        waits = 1 if cluster.links[0].latency_seconds.source == "measured" else 2  # as a ring of the same link
        latency = waits * (cluster.devices - 1) * near if cluster.devices > 1 else 0.0
    else:  # a few numbers travel along trees between nodes (NCCL 2.4 and later)
        latency = 2 * (cluster.domain - 1) * near
        latency += 2 * math.ceil(math.log2(cluster.devices / cluster.domain)) * far
    return Component(
        "fixed step overhead",
        "host",
        np.full(len(sheet.columns), loop + latency),
        SOURCES.index("assumed"),
        lambda i: f"{loop * 1e3:.3g} ms of host work + one all-reduce of loss, weight and gradient norm",
        "trees between nodes",
        clock="other",
    )


def matrix_peak(context: PricedTask, precision: str) -> tuple[float, str]:
    """Return the FLOP/s that model FLOPs utilisation divides by, and what it is called; NaN where unknown."""
    device = context.cluster.device
    if precision in device.peak_flops:
        known = "assumed" if f"peak_flops.{precision}" in device.assumed_rates else "published"
        return device.peak_flops[precision], f"of {known} dense peak"
    if device.matmul_source == "measured" and precision in device.matmul_flops:
        return max(rate for _, rate in device.matmul_flops[precision]), "of measured matrix peak"
    return float("nan"), "peak unknown"
