"""The learning rates of parameter groups: those of the schedule in every step, whatever else is written there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ScheduledRates:
    """Gives each group of an optimizer its rate, and notices once that a program had set another one meanwhile."""

    def __init__(self) -> None:
        self._given: list[float] = []  # in the step before
        self._found: tuple[float, float] | None = None
        self._is_told = False

    def give(self, groups: Sequence[dict[str, Any]], lr: float) -> None:
        """Set the rate of each group: that of the step, times the group's `lr_scale`."""
        if self._given and not self._is_told:
            known = zip(groups, self._given, strict=False)  # a program may have added a group since
            changed = (each for each in known if each[0]["lr"] != each[1])
            self._found = next(((float(group["lr"]), before) for group, before in changed), self._found)
        for group in groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self._given = [group["lr"] for group in groups]

    def take(self) -> str:
        """Return what to say of a rate that was set by hand, once; "" where there was none."""
        if self._found is None or self._is_told:
            return ""
        self._is_told = True
        return (
            f"optimizer.param_groups had the learning rate {self._found[0]:g} where {self._found[1]:g} was set: it has "
            "no effect, since every step takes the rate of task.schedule; "
            'task.schedule.kind = "my_module:function" sets another, or a callback with {"lr": ...} before a step'
        )
