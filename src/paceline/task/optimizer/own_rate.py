"""Learning rates of the user's: a function of the step, or a scheduler of torch driven by the step.

Both are pure functions of the step here: nothing is saved of them, and a resume in another world takes the same course.
A scheduler of torch is stepped over an optimizer of one weight, as often as there were steps, and its rates are kept.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import ConfigError
from paceline.spec.import_paths import load_object
from paceline.spec.steps.update import ScheduleSpec

WHERE = "task.schedule.kind"
SAMPLES = 64  # steps whose rates a checkpoint holds, so that a changed function shows
_MADE: dict[tuple[object, ...], OwnRate] = {}  # by what they are made of: a scheduler's rates are worked out once


@dataclass
class OwnRate:
    """The learning rate of a user's function or scheduler. `given` calls it with a 1-based step."""

    name: str
    given: Callable[[int], Any]

    def at(self, step: int) -> float:
        """Return the learning rate of a step. Raises ConfigError where it is no number of 0 or more."""
        rate = self.given(step)
        try:
            number = float(rate)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise ConfigError(
                f"the schedule '{self.name}' gives {rate!r} for step {step}",
                "a learning rate is a number of 0 or more",
                "mend the function",
            )
        return number


def own_rate(schedule: ScheduleSpec, peak: float, total_steps: int) -> OwnRate:
    """Return the rate that a schedule names by an import path, or holds as an object."""
    key = (schedule.kind, repr(sorted(schedule.arguments.items())), peak, total_steps)
    if key not in _MADE:
        _MADE[key] = _made(schedule.kind, schedule.arguments, peak, total_steps)
    return _MADE[key]


def sampled(schedule: ScheduleSpec, peak: float, total_steps: int) -> tuple[tuple[int, float], ...]:
    """Return (step, rate) of some steps of a run, the first and the last among them."""
    rate = own_rate(schedule, peak, total_steps)
    return tuple((step, rate.at(step)) for step in _some_of(total_steps))


def asked_anew(schedule: ScheduleSpec, peak: float, total_steps: int) -> dict[int, float]:
    """Return the rates of the same steps, by step, of a function or scheduler that is loaded and made for this alone.

    They end before the first step for which it has none.
    """
    rate, found = _made(schedule.kind, schedule.arguments, peak, total_steps), dict[int, float]()
    for step in _some_of(total_steps):
        try:
            found[step] = rate.at(step)
        except ConfigError:
            break
    return found


def _some_of(total_steps: int) -> list[int]:
    steps = {round(1 + (total_steps - 1) * at / (SAMPLES - 1)) for at in range(SAMPLES)} | set(range(1, 9))
    return [step for step in sorted(steps) if step <= total_steps]


def _made(kind: object, arguments: Mapping[str, object], peak: float, total_steps: int) -> OwnRate:
    found = load_object(kind, WHERE) if isinstance(kind, str) else kind
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)
    if not callable(found):
        raise ConfigError(
            f"{WHERE} = '{name}' is a {type(found).__name__}", "it cannot be called", "a function of step"
        )
    parameters = _parameters(found)
    if next(iter(parameters), "") == "optimizer":
        return OwnRate(name, _TorchRates(name, found, dict(arguments), peak).at)
    known = {"steps": total_steps, "peak": peak}
    given = {**{key: value for key, value in known.items() if key in parameters}, **arguments}
    unknown = [key for key in arguments if parameters and key not in parameters]
    if unknown:
        raise ConfigError(
            f"the schedule '{name}' takes no argument '{unknown[0]}'", "task.schedule.arguments names it",
            f"it takes {', '.join(parameters)}",
        )  # fmt: skip
    return OwnRate(name, lambda step: found(step, **given))


def _parameters(found: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(found).parameters)
    except (TypeError, ValueError):  # a callable that tells no signature
        return ()


@dataclass
class _TorchRates:
    """The rates of a scheduler of torch, by the number of its steps."""

    name: str
    factory: Any
    arguments: dict[str, Any]
    peak: float
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch

        from paceline.task.optimizer.eager import eager

        weight = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = eager(torch.optim.AdamW)([weight], lr=self.peak)
        before = dict(self._optimizer.param_groups[0])
        try:
            self._scheduler = self.factory(self._optimizer, **self.arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the scheduler '{self.name}' cannot be made", f"{type(error).__name__}: {error}",
                "task.schedule.arguments holds what it takes beside the optimizer",
            ) from error  # fmt: skip
        steps_by = inspect.signature(self._scheduler.step).parameters if hasattr(self._scheduler, "step") else {}
        if not hasattr(self._scheduler, "get_last_lr") or "metrics" in steps_by:
            raise ConfigError(
                f"the scheduler '{self.name}' cannot drive a run", "its rate is no function of the step",
                "a scheduler of the step, or task.evaluate.patience to end training early",
            )  # fmt: skip
        self._others = {key: before[key] for key in before if key not in ("params", "lr")}
        self._keep()

    def at(self, step: int) -> float:
        """Return the rate of a 1-based step."""
        while len(self.rates) < step:
            self._optimizer.step()  # without a gradient: torch warns where a scheduler steps first
            try:
                self._scheduler.step()
            except ValueError as error:
                raise ConfigError(
                    f"the scheduler '{self.name}' has no rate for step {len(self.rates) + 1}", str(error),
                    "arguments that last for the whole run",
                ) from error  # fmt: skip
            self._keep()
        return self.rates[step - 1]

    def _keep(self) -> None:
        group = self._optimizer.param_groups[0]
        for key, value in self._others.items():
            if group[key] != value:
                raise ConfigError(
                    f"the scheduler '{self.name}' changes {key} beside the learning rate",
                    "the learning rate alone follows it here", "cycle_momentum = false among its arguments",
                )  # fmt: skip
        self.rates.append(float(group["lr"]))
