"""Checks of a task's turns, without torch: the names of turns, their objectives, which turn is evaluated."""

from __future__ import annotations

import re

from paceline.errors import ConfigError, suggestion
from paceline.spec.task import Task


def main_turn(task: Task) -> int:
    """Return the number of the turn that is evaluated, and whose loss is the step's."""
    names = [turn.name for turn in task.turns]
    return names.index(task.objective) if task.objective in names else 0


def objectives_named(task: Task) -> dict[str, object]:
    """Return the objectives of a task by the option that names each."""
    if not task.turns:
        return {"task.objective": task.objective}
    return {f"task.turns.{number}.objective": turn.objective for number, turn in enumerate(task.turns, 1)}


def check_turns(task: Task) -> None:
    """Raise ConfigError for turns that contradict each other or task.objective."""
    names = [turn.name for turn in task.turns]
    for number, turn in enumerate(task.turns, 1):
        if not re.fullmatch(r"\w[\w .+-]*", turn.name) or turn.name == "auto" or names.count(turn.name) > 1:
            raise ConfigError(
                f"task.turns.{number}.name = '{turn.name}' cannot be",
                "the journal keeps each turn's loss under a name of its own", 'a name such as "generator"',
            )  # fmt: skip
        if turn.objective in ("", "auto"):
            raise ConfigError(
                f"task.turns.{number}.objective is not set", f"nothing says what '{turn.name}' minimises",
                "package.module:function",
            )  # fmt: skip
    if not names:
        return
    if task.objective != "auto" and task.objective not in names:
        raise ConfigError(
            f"task.objective = {task.objective!r} is no turn's name",
            "with task.turns it says which of them is evaluated",
            suggestion(str(task.objective), names),
        )
    main = task.turns[main_turn(task)]
    if main.every != 1:
        raise ConfigError(
            f"the turn '{main.name}' is evaluated and comes in every {main.every} steps only",
            "its loss is the loss of each step", "task.objective = a turn with every = 1",
        )  # fmt: skip
    if task.growth.by == "noise" and main_turn(task):
        raise ConfigError(
            f"task.growth.by = 'noise' with a turn before '{main.name}', which is evaluated",
            "it changes weights between the two gradient norms that tell the noise scale",
            f"'{main.name}' as the first of task.turns, or growth by a schedule",
        )
