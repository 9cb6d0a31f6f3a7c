"""Turns: several objectives that a step minimises one after the other, with parameters for each objective, as in a GAN.

In its turn an objective runs forward and backward on the whole global batch. Its own parameters alone are then clipped
and updated, so the next turn sees them changed; gradients that reach other parameters are dropped, as a plain loop does
by `zero_grad`. Random numbers of a turn are its own. A task without turns has one, of all parameters and no name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.spec.adapt.preference import DPO
from paceline.spec.steps.turns import check_turns, main_turn
from paceline.spec.task import Task
from paceline.task.optimizer.groups import check_patterns, group_of

if TYPE_CHECKING:
    from paceline.task.objective import Objective

ALONE = ("pp", "cp", "tp")  # axes over which no step of several turns is built
CLOSED = (
    "task.turns: a step of several objectives runs on a model that is whole on every rank while it computes, so that "
    "each one's gradients can be told apart; dp_replicate and dp_shard are open"
)
ROUTED = "routers count the tokens of a step once, and adapt once"


@dataclass(frozen=True)
class Turn:
    """One objective, and what belongs to it."""

    name: str  # "" for the only one of a task without turns
    objective: Objective
    match: tuple[str, ...]
    every: int = 1
    clip_norm: float | None = None  # None: the optimizer's
    number: int = 0
    of: int = 1

    def is_due(self, step: int) -> bool:
        """Return whether this turn is due in a step, 1-based."""
        return (step - 1) % self.every == 0

    def draws_as(self, step: int) -> int:
        """Return the number by which its random numbers in a step are told from those of other turns and steps."""
        return step * self.of + self.number


def turns_of(task: Task, source_unit: str) -> tuple[Turn, ...]:
    """Return the turns of a task's step, in order, with their objectives. Imports torch."""
    from paceline.task.objective import resolve_objective

    if task.objective == DPO and not task.turns:
        from paceline.task.adapt.preference import PreferenceLoss

        asked = task.preference
        loss = PreferenceLoss(asked.beta, asked.label_smoothing, asked.loss, task.adapter.is_none)
        return (Turn("", loss, ("*",)),)
    if not task.turns:
        return (Turn("", resolve_objective(task.objective, source_unit), ("*",)),)
    check_turns(task)
    return tuple(
        Turn(spec.name, resolve_objective(spec.objective, source_unit), tuple(spec.match), spec.every, spec.clip_norm,
             number, len(task.turns))
        for number, spec in enumerate(task.turns)
    )  # fmt: skip


def objective_of(task: Task, source_unit: str) -> Objective:
    """Return the main turn's objective: evaluations measure it, and a step's loss is its loss. Imports torch."""
    return turns_of(task, source_unit)[main_turn(task)].objective


def check_takers(task: Task, trained: Mapping[str, Sequence[str]], every_name: Iterable[str]) -> None:
    """Raise ConfigError where a turn takes no parameter, or a trained parameter no turn.

    `trained` are all names of each parameter that is trained, by one of them.
    """
    known = list(every_name)
    taken = {name: group_of(task.turns, names) for name, names in trained.items()}
    for number, turn in enumerate(task.turns):
        where = f"task.turns.{number + 1}.match"
        check_patterns(turn.match, known, where)
        if number not in taken.values():
            raise ConfigError(
                f"{where}: the turn '{turn.name}' trains no parameter",
                "those it matches are frozen, or belong to turns before it",
                "put the narrower turn first",
            )
    if left := [name for name, number in taken.items() if number < 0]:
        raise untrained(left)


def untrained(names: Sequence[str]) -> ConfigError:
    """Return the error for parameters that belong to no turn."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ConfigError(
        f"{names[0]}{more}: no turn trains it", "a parameter without an objective would stay as it is, silently",
        "a pattern in a turn's `match`, or requires_grad = False",
    )  # fmt: skip
