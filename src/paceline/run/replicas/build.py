"""What keeps copies in step under a plan, made for an assembled model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from paceline.errors import ConfigError
from paceline.run.process.groups import Mesh
from paceline.run.process.world import World
from paceline.run.replicas.bucket_sums import BucketSum
from paceline.run.replicas.copy_sync import CopySync, EveryStep
from paceline.run.replicas.outer import OuterSteps
from paceline.spec.plan import Plan


def copy_sync(model: nn.Module, plan: Plan, mesh: Mesh | None, world: World, sums: BucketSum | None) -> CopySync:
    """Return what keeps copies of `model`, whose weights have their values, in step as the plan says."""
    if plan.sync.has_outer_step and mesh is not None:
        return OuterSteps(model, plan, mesh, world)
    return EveryStep(world, model, sums, mesh.get_local_rank("dp_replicate") if mesh is not None else 0)


def refuse_unproven(plan: Plan, used: Mapping[str, bool]) -> None:
    """Raise ConfigError where copies are not summed exactly in every step and the task uses what is not known then.

    `used` says of each such thing, in words, whether the task uses it.
    """
    found = [what for what, is_used in used.items() if is_used]
    if plan.sync.is_plain or not found:
        return
    raise ConfigError(
        f"plan.sync ({plan.sync}) with {found[0]}",
        "it ties copies together in every step, or is not proven with copies that are not summed exactly",
        'plan.sync.kind = "every-step" with plan.sync.wire = "full"',
    )
