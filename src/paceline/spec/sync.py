"""Sync: how the copies of a model stay in step, as the spec asks and the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.errors import ConfigError

SYNC_KINDS = ("every-step", "outer")
WIRES = ("full", "bf16")


@dataclass(frozen=True)
class Sync(Declared, table="plan.sync"):
    """How copies of the model (`dp_replicate`) stay in step.

    `every-step` sums all gradients in every step: what any layout does unless it is told otherwise. With `outer` each
    copy makes `every` steps by itself on its own part of each batch; an outer optimizer then moves the weights that all
    copies share by the mean change of the copies (SGD with Nesterov momentum; Douillard et al. 2023, DiLoCo,
    arXiv:2311.08105; local SGD, Stich 2018, arXiv:1805.09767, with lr 1 and momentum 0).
    """

    kind: str = option("every-step", "when copies of the model are brought together", choices=SYNC_KINDS)
    every: int = option(1, "steps that a copy makes by itself before an outer step", minimum=1)
    lr: float = option(1.0, "learning rate of the outer step: 1 moves the weights by the mean change", above=0.0)
    momentum: float = option(0.0, "Nesterov momentum of the outer step", minimum=0.0, maximum=1.0)
    wire: str = option(
        "full", "how copies send gradients: as they are, or in bf16 with what is left out added later", choices=WIRES
    )

    def refuse_contradictions(self) -> None:
        """Raise ConfigError where there are options of an outer step without one, or of sums with one."""
        if self.kind != "outer" and (self.every, self.lr, self.momentum) != (1, 1.0, 0.0):
            raise ConfigError(
                f"plan.sync.kind = '{self.kind}' with every, lr or momentum",
                "they are of the outer step, and there is none",
                'plan.sync.kind = "outer"',
            )
        if self.kind == "outer" and self.wire != "full":
            raise ConfigError(
                f"plan.sync.wire = '{self.wire}' with an outer step",
                "it is of gradients that copies sum in every step",
                'plan.sync.wire = "full"',
            )

    @property
    def is_plain(self) -> bool:
        """Whether copies compute the numbers of one device: exact sums in every step."""
        return self == PLAIN

    @property
    def has_outer_step(self) -> bool:
        """Whether copies make steps by themselves."""
        return self.kind == "outer"

    def differs_after(self, step: int) -> bool:
        """Return whether copies may hold different weights when a step is over."""
        return self.has_outer_step and step % self.every != 0

    def __str__(self) -> str:
        if self.has_outer_step:
            return f"outer step every {self.every} (lr {self.lr:g}, momentum {self.momentum:g})"
        return "exact sums" if self.wire == "full" else f"gradients sent in {self.wire}"


PLAIN = Sync()


def sync_of(given: Sync | str | Mapping[str, Any]) -> Sync:
    """Return what a kind's name, or a table as JSON or TOML has it, stands for."""
    if isinstance(given, Sync):
        return given
    return Sync(given) if isinstance(given, str) else Sync(**given)


def refuse_resync(written: Mapping[str, Any], sync: Sync, copies: int) -> None:
    """Raise ConfigError where copies cannot go on from a plan that kept them in step in another way.

    `written` is that plan as data. The number of copies may change where they are summed exactly in every step.
    """
    then, before = sync_of(written.get("sync", {})), written["layout"]["dp_replicate"]
    if then == sync and (then.is_plain or before == copies):
        return
    raise ConfigError(
        f"a run of dp_replicate = {before} with {then} cannot go on with dp_replicate = {copies} and {sync}",
        "each copy has state of its own, and how copies are kept in step is a part of what the run computes",
        f"plan.dp_replicate = {before} and the plan.sync of before (dp_shard may change), or a new run.dir",
    )


def refuse_between(sync: Sync, steps: Mapping[str, int | None]) -> None:
    """Raise ConfigError where something is to happen after a step at which copies differ; `steps` say what and when."""
    for name, step in steps.items():
        if step and sync.differs_after(step):
            raise ConfigError(
                f"{name}: {step} steps, and plan.sync has an {sync}",
                f"{step} is no multiple of {sync.every}, so copies would differ then",
                f"{step // sync.every * sync.every or sync.every} steps, or another plan.sync.every",
            )
