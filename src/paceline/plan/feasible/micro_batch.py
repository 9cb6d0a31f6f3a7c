"""A plan with another micro-batch: a rank whose memory is exhausted asks for such a plan too, so this prices none."""

from __future__ import annotations

import dataclasses

from paceline.plan.feasible.stages import fill_pipeline
from paceline.spec.layout import accumulation_for, largest_part
from paceline.spec.plan import Plan


def with_micro_batch(plan: Plan, micro_batch: int) -> Plan:
    """Return the plan with another micro-batch, and as many passes as its global batch then takes."""
    layout = plan.layout
    micro_batch = min(micro_batch, largest_part(plan.batch_samples, layout.data_degree, plan.rows))
    passes = accumulation_for(plan.batch_samples, layout.data_degree, micro_batch, plan.rows)
    passes = fill_pipeline(passes, layout.pp, plan.schedule) if layout.pp > 1 else passes
    return dataclasses.replace(plan, micro_batch=micro_batch, accumulation=passes)
