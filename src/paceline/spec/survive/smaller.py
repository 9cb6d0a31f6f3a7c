"""SmallerPlan: a plan that needs less memory than the running plan, which a run carries along for that case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FIXED = ("weights", "gradients", "optimizer", "runtime")  # kinds of memory that no micro-batch changes


@dataclass(frozen=True)
class SmallerPlan:
    """A plan that needs less memory: what it changes, as options of a spec, and what it is forecast to take.

    `held` are the bytes on the fullest device by kind of term, such as `weights` and `activations`.
    """

    change: str
    micro_batch: int
    accumulation: int
    recompute: str
    offload: str
    held: Mapping[str, float]
    step_seconds: float

    @property
    def bytes(self) -> float:
        """The bytes that the fullest device must have."""
        return sum(self.held.values())


def smaller_from_dict(data: Mapping[str, Any]) -> SmallerPlan:
    """Return the plan that `dataclasses.asdict` took apart."""
    return SmallerPlan(**data)
