"""What `paceline plan` answers: one plan, clusters side by side, or the ways to use groups of different devices.

One plan is the common case and is to come at once: what the other answers need is imported with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import ConfigError
from paceline.plan.planned import Planned, plan_task
from paceline.spec.load import Spec

if TYPE_CHECKING:
    from paceline.plan.explain.compare_clusters import Comparison
    from paceline.plan.placement.grouped import Grouped

    Answer: TypeAlias = Planned | Comparison | Grouped

Say = Callable[[str], None]
OF_ONE_PLAN = "it speaks of one plan, and groups of different devices have several ways to be used"


def answer(
    spec: Spec,
    *,
    names: Sequence[str] = (),
    counts: Sequence[int] = (),
    measure: bool = False,
    say: Say | None = None,
) -> Answer:
    """Return the plan of a spec; where there are several names or counts of devices, one plan for each of them.

    A spec with groups of different devices gives the ways to use them all. With `measure` the task's own blocks are
    timed on this machine, and planned with; ConfigError says that of groups they cannot be. Raises DoesNotFit where
    nothing fits.
    """
    if len(names) > 1 or len(counts) > 1:
        from paceline.plan.explain.compare_clusters import compare_clusters

        return compare_clusters(spec, tuple(names), tuple(counts), say=say)
    if spec.cluster.groups:
        from paceline.plan.placement.grouped import plan_groups

        if measure:
            raise ConfigError("measure with cluster.groups", OF_ONE_PLAN, "the devices of one group in [cluster]")
        return plan_groups(spec, say=say)
    planned = plan_task(spec, say=say)
    if not measure:
        return planned
    from paceline.session.measure import measure_task

    measure_task(planned, say or _nobody)
    return plan_task(spec, say=say)


def _nobody(line: str) -> None:
    """Hear what nobody asked to hear."""
