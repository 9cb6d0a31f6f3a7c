"""What a step holds at its peak, in bytes on the fullest device, by component.

The classes of sharding follow Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 5) as FSDP2 carries them out:
weights rest as fp32 shards in every class and are gathered in the compute dtype. `tp` divides all that a block holds
but the gathered inputs of its products; `cp` divides all that grows with tokens, what one layer exchanges aside; a
pipeline stage keeps what its micro-batches in flight have saved (Korthikanti et al. 2022, arXiv:2205.05198, section
4). Norms' weights, whole on every tensor rank, are counted as if divided: they are a ten-thousandth of a block.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.plan.cost.components import MEASURED, Component, total
from paceline.plan.cost.memory.activations import activations, loss_buffers
from paceline.plan.cost.memory.buffers import beside_tensors, communication_buffers
from paceline.plan.cost.memory.flat_gradients import flat_bytes, flat_gradients, roots
from paceline.plan.cost.memory.held_at_peak import HeldAtPeak
from paceline.plan.cost.memory.moments import held_in_turn, late_gradients
from paceline.plan.cost.memory.offload import optimizer_held, optimizer_text
from paceline.plan.cost.memory.weights import copies_in_step, held_gradients, packed_weights, state_of, weight_copies
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.compute import updated_parameters
from paceline.plan.cost.time.gathers import gathered_memory
from paceline.spec.optimizers import gathered_values, state_values


def memory_components(sheet: Sheet, stage: str = "fullest") -> list[Component]:
    """Return bytes per component on every plan's fullest device; they add up to the peak.

    With `stage` "first" or "last", those of a device of that pipeline rank.
    """
    held = HeldAtPeak(sheet)
    columns = components(held)
    if len(sheet.rows.plan) == len(sheet.columns):
        return columns
    rows = sheet.rows  # of equal stages the first holds the most micro-batches
    shown = rows.largest(total(columns)) if stage == "fullest" else rows.ends(last=stage == "last")
    return [
        replace(
            column,
            values=column.values[shown],
            text=lambda i, column=column: column.text(int(shown[i])),  # type: ignore[misc]
            applies=None if column.applies is None else column.applies[shown],
        )
        for column in columns
    ]


def components(peak: HeldAtPeak) -> list[Component]:
    """Return all components."""
    context = peak.sheet.context
    size, values, software = peak.size, state_values(context.optimizer), context.software
    state = size * updated_parameters(peak.plans, peak.parts)
    weights, resting = size * peak.parameters / peak.plans.held_degree - peak.narrowed, f"{size} B"
    weights = weights - size * peak.spread * (1 / peak.plans.held_degree - 1 / peak.plans.data_degree)
    if software.master_weights:
        weights = peak.compute * peak.local_parameters / np.where(peak.plans.zero == 3, peak.plans.state_degree, 1)
        resting = f"{peak.compute} B"
    masters = software.master_weights and not software.weight_bytes
    of_state, told = state_of(peak, values, masters)
    *short_lived, free, of_head = activations(peak)
    copies, gradients = weight_copies(peak), held_gradients(peak)
    passing = [copies, *short_lived, communication_buffers(peak), loss_buffers(peak)]
    in_turn = held_in_turn(peak.sheet, peak.plans, peak.parts, gradients.values, total(passing), of_head)
    # Gradients that come later take what is free by then.
    late = np.where(late_gradients(peak.sheet, peak.plans), gradients.values + in_turn.values, 0.0)
    free = np.maximum(0.0, free - late)
    held = [
        Component(
            "weights",
            "weights",
            weights,
            MEASURED,
            lambda i: f"{resting} x {peak.parts.parameters[i]:,.0f} parameters{peak.over(i)}{peak.rest_text(i)}",
            "ZeRO (Rajbhandari et al. 2020)",
        ),
        *packed_weights(peak),
        gradients,
        Component(
            "optimizer state",
            "optimizer",
            optimizer_held(peak.sheet, of_state * state),
            MEASURED,
            lambda i: optimizer_text(
                peak.sheet,
                f"{told} x {peak.trained_text(i)}{peak.over(i)} ({context.optimizer})",
            ),
            "ZeRO (Rajbhandari et al. 2020)",
        ),
        *copies_in_step(peak, state),
        *passing,
        in_turn,
    ]
    if gathered_values(context.optimizer):
        idle = np.maximum(0.0, total([*short_lived, copies, in_turn]))
        held.append(gathered_memory(peak.plans, peak.parts, context.optimizer, idle))
    if context.software.roots_at_once and context.optimizer == "adamw":
        held.append(roots(peak, np.maximum(0.0, total([*short_lived, copies, in_turn]))))
    flat = flat_bytes(peak.sheet, peak.plans, peak.local_trained)
    if flat.any():
        others = gradients.values - peak.compute * peak.local_trained / peak.plans.held_degree
        held.append(flat_gradients(flat, total(short_lived) + others))
        flat = flat - held[-1].values
    return [*held, *beside_tensors(peak, held, short_lived, flat + free)]
