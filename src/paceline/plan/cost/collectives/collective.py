"""Collective: what one kind of traffic between devices moves in a step."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.cost.columns import Floats, Ints


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and purpose in a step, on one device of every plan: one entry a plan.

    `axis` is a group of `spec.layout.group_of`, `kind` one of the COLLECTIVES of time/ring.py, or "send".
    `buffer_bytes` are those of the whole buffers, all calls together: of 4 all-gathers that leave 1 kB on every rank,
    4 kB.
    """

    axis: str
    kind: str
    what: str  # that moves, in words
    buffer_bytes: Floats
    calls: Floats | Ints
