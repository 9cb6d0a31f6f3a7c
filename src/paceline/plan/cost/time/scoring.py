"""What scoring takes where a step chooses among candidates: a forward pass of each, before the step trains on some."""

from __future__ import annotations

import numpy as np

from paceline.plan.cost.collectives.within_passes import (
    context_collectives,
    expert_collective,
    expert_passes,
    key_exchanges,
    loss_collective,
    micro_stream_bytes,
    stream_collectives,
)
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component
from paceline.plan.cost.sheet import Sheet
from paceline.plan.cost.time.axes import seconds_of
from paceline.plan.cost.time.compute import calibration_note
from paceline.plan.cost.time.network import data_seconds
from paceline.plan.cost.time.ring import hop
from paceline.spec.cluster import SOURCES


def scoring_components(sheet: Sheet) -> list[Component]:
    """Return the seconds per step of scoring candidates; nothing where a step trains on all that it reads.

    A candidate costs a forward pass without anything kept, with what `tp`, `cp`, `ep` and `pp` send in it. Stages of a
    pipeline wait for the first micro-batch to arrive and fill up its groups of as many as there are ranks. Weights that
    are dropped between passes (ZeRO-3) are gathered once for each of its micro-batches, others once more a step. None
    of it is taken to be hidden.
    """
    scored, columns, part = sheet.context.scored, sheet.columns, sheet.slowest
    if not scored:
        return []
    of_shape = sheet.forward_of_blocks * sheet.factors
    forward = columns.device_samples / columns.cp * np.einsum("rs,rs->r", part.counts, of_shape)
    if sheet.rates.device.kind == "cpu":
        operators = part.number(sheet.context.shapes["operators"] * sheet.factors)
        forward = forward + columns.accumulation * operators * sheet.rates.launch_seconds.value
    # Micro-batches of a rank's own work in which it waits, of those of all candidates; see pipeline/passes.py, `beats`.
    micro_batches = scored * columns.accumulation
    waits = -micro_batches % columns.pp + (columns.pp - 1) / columns.virtual_stages
    forward = forward * (1 + np.where(columns.pp > 1, waits / micro_batches, 0.0))
    moved = data_seconds(sheet)
    gather = np.where(columns.zero == 3, scored / 2, 1.0) * moved.gather_seconds
    sent = _sent_seconds(sheet)
    known = SOURCES.index("measured" if sheet.measured else sheet.rates.product_source)

    def text(i: int) -> str:
        words = f"{scored} x forward pass of the {columns.device_samples[i]:g} samples/device that are trained on"
        words += f" + {scored * sent[i]:.3g} s of their communication" if sent[i] else ""
        return words + (f" + {gather[i]:.3g} s of gathering" if gather[i] else "") + calibration_note(sheet)

    seconds = scored * (forward + sent) + gather
    return [Component("scoring of candidates", "products", seconds, known, text, clock="other")]


def _sent_seconds(sheet: Sheet) -> Floats:
    """Return the seconds of `tp`, `cp`, `ep` and `pp` in one forward pass of the samples that a step trains on."""
    columns, found = sheet.columns, np.zeros(len(sheet.columns.tp))
    if (columns.tp > 1).any():
        number = sheet.slowest.number(sheet.context.shapes.collectives)
        calls = np.maximum(1.0, sum(each.calls for each in stream_collectives(sheet)) / sheet.passes_made)
        both = sum(seconds_of(sheet.ring("tp"), each) for each in stream_collectives(sheet))
        once = both * np.minimum(1.0, number / calls) + seconds_of(sheet.ring("tp"), loss_collective(sheet))
        found = found + np.where(columns.tp > 1, once, 0.0)
    if (columns.cp > 1).any():
        gathered = seconds_of(sheet.ring("cp"), context_collectives(sheet)[0])
        found = found + np.where(columns.cp > 1, gathered / key_exchanges(sheet), 0.0)
    if (columns.ep > 1).any():
        both_ways = seconds_of(sheet.ring("ep"), expert_collective(sheet)) * 2 / expert_passes(sheet)
        found = found + np.where((columns.ep > 1) & (sheet.slowest.routers > 0), both_ways, 0.0)
    if (columns.pp > 1).any():
        context = sheet.context
        rate, latency, _ = hop(context.cluster, context.constants, *columns.group("pp"))
        once = columns.accumulation * columns.virtual_stages * (micro_stream_bytes(sheet) / rate + latency)
        found = found + np.where(columns.pp > 1, once, 0.0)
    return found
