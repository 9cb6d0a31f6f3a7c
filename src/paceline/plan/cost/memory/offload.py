"""What resting in host memory saves on the device and costs on the link to the host.

Optimizer state comes to the device and goes back once a step, a bucket at a time, while nothing else runs. Activations
of repeated blocks leave in the forward pass and come back in the backward pass, beside the computation. On a CPU the
host's memory is the device's own: nothing is saved, and copies cost memory bandwidth.
"""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.compute import updated_bytes
from paceline.spec.cluster import SOURCES, Figure
from paceline.spec.optimizers import state_values

# Device and host, each direction: PCIe 4.0 x16 moves 31.5 GB/s (PCI-SIG), of which pinned copies reach about 80 %.
HOST_LINK = Figure(25e9, "assumed", "pinned copies over PCIe 4.0 x16, one direction")
# Beside a Grace CPU it is NVLink-C2C: 900 GB/s in both directions together (NVIDIA, GH200 and GB200 data sheets), which
# the two chips of a GB200 share; four fifths of that too.
GRACE_LINKS = {
    "GH200": Figure(360e9, "assumed", "copies over NVLink-C2C, one direction"),
    "GB200": Figure(180e9, "assumed", "half of NVLink-C2C, one direction"),
    "GB300": Figure(180e9, "assumed", "half of NVLink-C2C, one direction"),
}
MOVING_BLOCKS = 2  # whose activations are on the device: the one at work, and the one on its way
LAW = "bytes over the link to the host"


def rests_on_host(sheet: Sheet) -> bool:
    """Return whether activations leave the device's memory."""
    return sheet.columns.common.offloads_activations and sheet.rates.device.kind != "cpu"


def host_link(device: str) -> Figure:
    """Return the bytes per second between an accelerator of this name and its host's memory, each direction."""
    return next((GRACE_LINKS[word] for word in device.split() if word in GRACE_LINKS), HOST_LINK)


def optimizer_held(sheet: Sheet, state: Floats) -> Floats:
    """Return what stays on devices of the optimizer's state, which is `state` bytes in all."""
    if not sheet.columns.common.offloads_optimizer:
        return state
    bucket = np.minimum(state, sheet.columns.common.state_bucket_bytes)
    # The copy at work is another one on a CPU, where host memory is the device's.
    return state + bucket if sheet.rates.device.kind == "cpu" else bucket


def optimizer_text(sheet: Sheet, formula: str) -> str:
    """Return in words what stays on a device of the optimizer's state, which `formula` tells in all."""
    if not sheet.columns.common.offloads_optimizer:
        return formula
    if sheet.rates.device.kind == "cpu":
        return f"{formula}, and a bucket: a CPU's host memory is its own"
    return f"one bucket of {formula} in host memory"


def offload_components(sheet: Sheet, busy_seconds: Floats) -> list[Component]:
    """Return the seconds per step that moving to the host and back adds; nothing where nothing is moved.

    `busy_seconds` are those of the step's computation, which hides the transfer of activations on an accelerator.
    """
    common, rates = sheet.columns.common, sheet.rates
    on_cpu = rates.device.kind == "cpu"
    link = Figure(rates.memory_rate / 2, rates.memory_source) if on_cpu else host_link(rates.device.name)
    found = []
    if common.offloads_optimizer:
        found.append(_optimizer(sheet, link))
    if common.offloads_activations:
        found.append(_activations(sheet, link, np.zeros_like(busy_seconds) if on_cpu else busy_seconds))
    return found


def _optimizer(sheet: Sheet, link: Figure) -> Component:
    columns = sheet.columns
    size = state_values(sheet.context.optimizer) * updated_bytes(sheet)[1]
    state = size * sheet.heaviest.trained / columns.tp / columns.state_degree
    return Component(
        "optimizer offload",
        "offload",
        2 * state / link.value,
        SOURCES.index(link.source),
        lambda i: f"2 x {state[i]:.3g} B of state to the device and back / {link.value / 1e9:.3g} GB/s",
        LAW,
        clock="optimizer",
    )


def _activations(sheet: Sheet, link: Figure, hidden_seconds: Floats) -> Component:
    columns = sheet.columns
    moved = columns.accumulation * columns.micro_batch * sheet.over_modes(sheet.kept_bytes, sheet.slowest_row)
    beside = ", beyond the device's work" if sheet.rates.device.kind != "cpu" else ""
    return Component(
        "activation offload",
        "offload",
        np.maximum(0.0, 2 * moved / link.value - hidden_seconds),
        SOURCES.index(link.source),
        lambda i: f"2 x {moved[i]:.3g} B of activations to the host and back / {link.value / 1e9:.3g} GB/s{beside}",
        LAW,
        clock="forward_backward",
    )
