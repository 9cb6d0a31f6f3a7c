"""The guard of updates: what becomes of an update whose numbers are not finite, or whose loss or gradient is a spike.

What the guard decides is a function of numbers over all ranks and of its own state, which checkpoints hold. So all
ranks decide alike, and a run that is killed and resumed decides as one that was not.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError, NumericalStop
from paceline.robust import middle_and_above
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.plan import Plan
from paceline.spec.survive.health import HealthSpec

WHAT = ("the loss", "the gradient norm")


class RollBack(Exception):
    """The step's samples are to be passed over, and the run to go on from its newest checkpoint. Never leaves a run."""

    def __init__(self, because: str, loss: float, grad_norm: float, evidence: Mapping[str, object]) -> None:
        super().__init__(because)
        self.because, self.loss, self.grad_norm, self.evidence = because, loss, grad_norm, evidence


class UpdateGuard:
    """Says of every update whether it is made. `decisions` are those since somebody took them."""

    def __init__(self, health: HealthSpec) -> None:
        self._health = health
        self._windows: dict[str, deque[float]] = {}  # of losses and norms, of each turn
        self._skipped: list[int] = []  # steps
        self.decisions: list[DecisionRecord] = []

    @property
    def may_go_back(self) -> bool:
        """Whether a spike sends the run back."""
        return self._health.on_spike == "rollback"

    @property
    def may_leave_out(self) -> bool:
        """Whether a batch may be left as if it had not been read."""
        return self.may_go_back or "skip" in (self._health.on_spike, self._health.on_nonfinite)

    def may_update(self, step: int, place: str, turn: str, loss: float, norm: float) -> bool | None:
        """Return whether the update is made; None for numbers that are not finite and that a run stops at.

        Raises NumericalStop where too many updates were left out, and RollBack where that is what a spike does.
        """
        if not (math.isfinite(loss) and math.isfinite(norm)):
            if self._health.on_nonfinite == "stop":
                return None
            return self._skip(step, f"{place}: loss {loss}, gradient norm {norm}", {"loss": loss, "grad_norm": norm})
        if self._health.on_spike == "off":
            return True
        spikes = [
            found for what, value in zip(WHAT, (loss, norm), strict=True) if (found := self._spike(turn, what, value))
        ]
        if not spikes:
            return True
        because, evidence = f"{place}: {'; '.join(text for text, _ in spikes)}", dict(numbers for _, numbers in spikes)
        if self._health.on_spike == "warn":
            self._decide("spike", "update", because, evidence)
            return True
        if self.may_go_back:
            raise RollBack(because, loss, norm, evidence)
        return self._skip(step, because, evidence)

    def take(self) -> list[DecisionRecord]:
        """Return the decisions since the last call."""
        taken, self.decisions = self.decisions, []
        return taken

    def _skip(self, step: int, because: str, evidence: Mapping[str, object]) -> bool:
        refuse_beyond(self._skipped, step, self._health, because)
        self._skipped.append(step)
        self._decide("skip", "no update: its samples are consumed and teach nothing", because, evidence)
        return False

    def _decide(self, what: str, to: str, because: str, evidence: Mapping[str, object]) -> None:
        self.decisions.append(DecisionRecord(what, "update", to, because, dict(evidence)))

    def _spike(self, turn: str, what: str, value: float) -> tuple[str, tuple[str, object]] | None:
        """Return what is told of a value that is a spike, or note it as one of the values that spikes are told from."""
        size = self._health.spike_window
        window = self._windows.setdefault(f"{turn}/{what}", deque(maxlen=size))
        if len(window) >= size // 2:
            median, deviation = middle_and_above(window)
            limit = median + self._health.spike_deviations * deviation
            if value > limit:
                numbers = {"value": value, "limit": limit, "median": median, "deviation": deviation, "of": len(window)}
                return f"{what} {value:.4g} is above {limit:.4g} (median {median:.4g})", (what, numbers)
        window.append(value)
        return None

    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps of the guard."""
        return {"windows": {name: list(window) for name, window in self._windows.items()}, "skipped": self._skipped}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint; one without a guard's state begins anew."""
        state = state or {"windows": {}, "skipped": []}
        size = self._health.spike_window
        self._windows = {name: deque(values, maxlen=size) for name, values in state["windows"].items()}
        self._skipped = list(state["skipped"])


def guard_of(health: HealthSpec, plan: Plan) -> UpdateGuard | None:
    """Return the guard of a run's updates, None where numbers that are not finite stop it and spikes are not seen."""
    if health.on_nonfinite == "stop" and health.on_spike == "off":
        return None
    refuse_kept_rounding(
        plan, "run.health leaves out updates", ", or the defaults of run.health.on_nonfinite and on_spike"
    )
    return UpdateGuard(health)


def refuse_kept_rounding(plan: Plan, what: str, or_else: str = "") -> None:
    """Raise ConfigError where updates are left out, as `what` says, and sums keep what rounding left of a gradient."""
    if plan.sync.wire != "full":
        raise ConfigError(
            f"{what}, and plan.sync.wire = '{plan.sync.wire}'",
            "what that leaves out of a sum is added to the next one: a gradient that is left out would come back",
            f'plan.sync.wire = "full"{or_else}',
        )


def refuse_beyond(steps: list[int], step: int, health: HealthSpec, because: str) -> None:
    """Raise NumericalStop where as many updates as may be were left out in the steps before this one."""
    recent = [each for each in steps if each > step - health.skips_window]
    if len(recent) >= health.most_skips:
        raise NumericalStop(
            because,
            f"{len(recent)} updates were left out within {health.skips_window} steps before, "
            f"and run.health.most_skips is {health.most_skips}; no weight was changed by this step",
            "lower task.optimizer.lr, lengthen task.schedule.warmup, or look at the samples of these steps",
        )
