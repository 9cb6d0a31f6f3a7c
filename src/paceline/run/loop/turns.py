"""The turns of a step on this rank: for each objective the passes, and the parameters that these passes train."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from paceline.errors import ConfigError
from paceline.run.loop.passes import Passes, SequentialPasses
from paceline.run.loop.routing import RouterWatch
from paceline.run.parallel.data.rows_of_all_ranks import GatheredRows
from paceline.run.updates.optimizer import Names
from paceline.spec.plan import Plan
from paceline.task.coupling import GatheringObjective
from paceline.task.optimizer.groups import group_of
from paceline.task.plain_names import named_parameters
from paceline.task.turns import ALONE, CLOSED, ROUTED, Turn, untrained


@dataclass
class StepTurn:
    """A turn, as this rank makes it."""

    turn: Turn
    passes: Passes
    parameters: list[nn.Parameter]  # on this rank, in shards where they are
    clip_norm: float | None = None  # None: the stepper's

    def __post_init__(self) -> None:
        if self.clip_norm is None:
            self.clip_norm = self.turn.clip_norm


def gathering(turns: Sequence[Turn], gather_rows: GatheredRows) -> tuple[Turn, ...]:
    """Return the turns with objectives that gather rows spread over the data ranks."""
    return tuple(
        dataclasses.replace(turn, objective=turn.objective.over(gather_rows))
        if isinstance(turn.objective, GatheringObjective)
        else turn
        for turn in turns
    )


def own_parameters(model: nn.Module, names: Names, turns: Sequence[Turn]) -> list[list[nn.Parameter]]:
    """Return the trained parameters of each turn: a parameter belongs to the first that matches one of its names.

    Raises ConfigError for one that belongs to none.
    """
    found: list[list[nn.Parameter]] = [[] for _ in turns]
    for name, parameter in named_parameters(model):
        if parameter.requires_grad:
            number = group_of(turns, names.get(name, (name,)))
            if number < 0:
                raise untrained([name])
            found[number].append(parameter)
    return found


def refuse_axes(turns: Sequence[Turn], plan: Plan) -> None:
    """Raise ConfigError where several turns meet an axis that knows one objective alone."""
    if len(turns) > 1 and (axes := [axis for axis in ALONE if getattr(plan.layout, axis) > 1]):
        raise ConfigError(
            f"{axes[0]} = {getattr(plan.layout, axes[0])} cannot be had", CLOSED, "dp_replicate, dp_shard"
        )


def refuse_routing(turns: Sequence[Turn], routing: RouterWatch | None) -> None:
    """Raise ConfigError where several turns meet routers that are watched."""
    if len(turns) > 1 and routing is not None:
        raise ConfigError("task.turns with a model with experts", ROUTED, "a model without experts")


def passes_in_turn(first: SequentialPasses, turns: Sequence[Turn], call: Callable[..., object]) -> list[Passes]:
    """Return the passes of every turn, like those of the first but for their objective and their random numbers."""
    return [
        dataclasses.replace(
            first,
            objective=turn.objective,
            call=functools.partial(call, turn=turn.number),
            draws_as=turn.draws_as,
        )
        for turn in turns
    ]
