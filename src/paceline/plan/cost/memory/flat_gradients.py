"""What an update holds for a moment: flat gradients, in programs that keep 16 bits until then as DeepSpeed; roots."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.columns import Columns, Floats
from paceline.plan.cost.components import Component
from paceline.plan.cost.memory.held_at_peak import HeldAtPeak
from paceline.plan.cost.sheet import Sheet
from paceline.spec.cluster import SOURCES

MASTER_BYTES = 4  # of a value that the optimizer reads


def keeps_narrow(sheet: Sheet) -> bool:
    """Return whether gradients stay in 16 bits until an update that makes them flat."""
    software = sheet.context.software
    return software.flattens_gradients and software.gradient_bytes == sheet.rates.element_bytes == 2


def flat_bytes(sheet: Sheet, plans: Columns, parameters: Floats) -> Floats:
    """Return the bytes of every plan's own part of the gradients once more: flat in 16 bits, and cast to fp32.

    Both stand together for a moment. Example: a quarter of 4e9 parameters has 2 GB flat and 4 GB cast. On the host,
    where the optimizer's state rests there, it takes nothing of a device.
    """
    if not keeps_narrow(sheet) or plans.common.offloads_optimizer:
        return np.zeros(len(plans))
    found: Floats = (sheet.rates.element_bytes + MASTER_BYTES) * parameters / plans.held_degree
    return found


def flat_gradients(flat: Floats, idle: Floats) -> Component:
    """Return what `flat` bytes need beyond those of passes and of other ranks' gradients that are `idle` by then."""

    def text(i: int) -> str:
        return f"{flat[i]:,.0f} B at the update, of which {min(flat[i], idle[i]):,.0f} B where something else was"

    known = np.full(len(flat), SOURCES.index("measured"))
    return Component("flat gradients", "buffers", np.maximum(0.0, flat - idle), known, text, "counted", flat > idle)


def roots(peak: HeldAtPeak, idle: Floats) -> Component:
    """Return the roots of all second moments at an update, beyond the bytes of passes that are `idle` by then.

    Example: 7.24e9 weights that are trained in bf16 have 58 GB, and 72 at their update.
    """
    software = peak.sheet.context.software
    size = software.moment_bytes or MASTER_BYTES
    values = size * peak.local_trained / peak.plans.state_degree * software.roots_at_once

    def text(i: int) -> str:
        return f"{values[i]:,.0f} B at the update, of which {min(values[i], idle[i]):,.0f} B where something else was"

    known = np.full(len(values), SOURCES.index("measured"))
    return Component("roots", "buffers", np.maximum(0.0, values - idle), known, text, "counted", values > idle)
