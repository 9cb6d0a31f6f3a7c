"""What resting in host memory saves on the device and costs on the link to the host.

Optimizer state comes to the device and goes back once a step, a bucket at a time, while nothing else runs. Activations
of repeated blocks leave in the forward pass and come back in the backward pass, beside the computation. On a CPU the
host's memory is the device's own: nothing is saved, and copies cost memory bandwidth.
"""

from __future__ import annotations

from paceline.cluster.cluster import Figure
from paceline.plan.cost.inputs import Context
from paceline.plan.cost.parts import Part
from paceline.plan.cost.rates import STATE_VALUES
from paceline.plan.cost.recompute import kept_bytes
from paceline.plan.forecast import Term
from paceline.plan.plan import Plan

# Device and host, each direction: PCIe 4.0 x16 moves 31.5 GB/s (PCI-SIG), of which pinned copies reach about 80 %.
HOST_LINK = Figure(25e9, "assumed", "pinned copies over PCIe 4.0 x16, one direction")
BUCKET_BYTES = 128 * 2**20  # of optimizer state on the device at a time
MOVING_BLOCKS = 2  # whose activations are on the device: the one at work, and the one on its way


def rests_on_host(plan: Plan, kind: str) -> bool:
    """Return whether activations leave the device's memory."""
    return plan.offloads_activations and kind != "cpu"


def moving_bytes(kept_here: float, kept: float) -> float:
    """Return what the device holds of a block that rests on the host, per sample, while it is at work."""
    return MOVING_BLOCKS * (kept - kept_here)


def optimizer_state(context: Context, plan: Plan, state: float, text: str, over: str) -> Term:
    """Return the memory term of the optimizer's state, which is `state` bytes in all."""
    formula = f"{text} x parameters{over} ({context.optimizer})"
    if not plan.offloads_optimizer:
        return Term("optimizer state", state, formula, "measured")
    if context.cluster.device.kind == "cpu":
        # The copy at work is another one: host memory is the device's.
        held = state + min(state, BUCKET_BYTES)
        return Term("optimizer state", held, f"{formula}, and a bucket: a CPU's host memory is its own", "measured")
    return Term("optimizer state", min(state, BUCKET_BYTES), f"one bucket of {formula} in host memory", "measured")


def offload_terms(context: Context, plan: Plan, busy_seconds: float) -> list[Term]:
    """Return the seconds per step that moving to the host and back adds; nothing where nothing is moved.

    `busy_seconds` are those of the step's computation, which hides the transfer of activations on an accelerator.
    """
    if plan.offload == "none":
        return []
    rates = context.rates(plan.precision)
    on_cpu = context.cluster.device.kind == "cpu"
    link = Figure(rates.memory_rate / 2, rates.device.memory_bytes_per_second.source) if on_cpu else HOST_LINK
    terms = []
    if plan.offloads_optimizer:
        part, layout = context.heaviest(plan), plan.layout
        size = max(4, rates.element_bytes)
        state = STATE_VALUES[context.optimizer] * size * part.parameters / layout.tp / layout.state_degree
        text = f"2 x {state:.3g} B of state to the device and back / {link.value / 1e9:.3g} GB/s"
        terms.append(Term("optimizer offload", 2 * state / link.value, text, link.source))
    if plan.offloads_activations:
        moved = plan.accumulation * plan.micro_batch * _kept_by_blocks(context, plan, context.slowest(plan))
        seconds = 2 * moved / link.value
        text = f"2 x {moved:.3g} B of activations to the host and back / {link.value / 1e9:.3g} GB/s"
        if not on_cpu:
            seconds, text = max(0.0, seconds - busy_seconds), text + ", beyond the device's work"
        terms.append(Term("activation offload", seconds, text, link.source))
    return terms


def _kept_by_blocks(context: Context, plan: Plan, part: Part) -> float:
    """Return the bytes that all repeated blocks of a device keep of one sample."""
    groups = context.by_mode(plan, part).items()
    return sum(number * kept_bytes(block, plan, mode) for mode, again in groups for block, number in again.shapes)
