"""The judge: what stands out of losses, gradients, updates and activations, each with its threshold and what to try.

All are robust: medians and median absolute deviations of what came before, so that one odd value neither hides another
nor is one. What stands out is told once, and again only when it has been well in between; what goes up and down slowly
has to be well by a margin. Torch-free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.robust import SMALLEST_PART, OrderedWindow, deviation_of, median_of, middle_and_above, upper_of

WINDOW = 64  # steps that a spike is told from
SPIKE = 10.0  # deviations above the median
PLATEAU = 400  # steps, of which the later half is no better than the earlier one
PLATEAU_ERRORS = 2.0  # standard errors of the difference of two medians
DIVERGED = 32  # steps whose median is compared with the best such
DIVERGED_DEVIATIONS = 8.0
VANISHED = 1e-4  # of the second largest over blocks, of the gradient's norm over the weights'
LARGE_UPDATE, SMALL_UPDATE = 0.1, 1e-8  # of the weights, in one step
DEAD = 0.5  # of the units
GROWN = 10.0  # times as large as the median of what was measured before
HISTORY = 20  # measurements that are remembered of each block
UNEVEN = 0.01  # of an even load, for the emptiest expert
GROWING = {  # what is measured -> the detector, and what to try
    "activation_max": (
        "growing activations", "a lower task.optimizer.lr, weight decay, or normalisation of what the block gives",
    ),
    "attention_max": (
        "growing attention scores", "normalised queries and keys (qk_norm of the model), or a lower task.optimizer.lr",
    ),
    "logit_max": (
        "growing logits", "a lower task.optimizer.lr, weight decay of the head, or an objective that holds them down",
    ),
}  # fmt: skip
HealthFinding = dict[str, Any]


class HealthJudge:
    """Is told of every step and every measurement, and returns what stands out that was not told before."""

    def __init__(self) -> None:
        self._losses, self._norms = OrderedWindow(WINDOW), OrderedWindow(WINDOW)
        self._newest = OrderedWindow(DIVERGED)
        self._earlier, self._later = OrderedWindow(PLATEAU // 2), OrderedWindow(PLATEAU // 2)
        self._best = math.inf  # median of DIVERGED losses
        self._history: dict[tuple[str, str], deque[float]] = {}
        self._told: set[tuple[str, str]] = set()

    def step(self, loss: float, grad_norm: float, load_min: float | None = None) -> list[HealthFinding]:
        """Take a step's loss and gradient norm, and the load of its emptiest expert where it has any."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return []  # which the run itself stops at
        found = [
            self._spike("loss spike", loss, self._losses),
            self._spike("gradient spike", grad_norm, self._norms),
        ]
        self._losses.add(loss)
        self._norms.add(grad_norm)
        self._newest.add(loss)
        if (left := self._later.add(loss)) is not None:
            self._earlier.add(left)
        found += [self._diverged(), self._plateau()]
        if load_min is not None:
            found.append(finding(
                "idle expert", "", load_min, UNEVEN, load_min < UNEVEN,
                f"the emptiest expert got {load_min:.2%} of an even load",
                "a larger task.model.balance_weight, or another task.model.balance",
            ))  # fmt: skip
        return self._new(found)

    def measured(self, values: Mapping[str, Mapping[str, float]]) -> list[HealthFinding]:
        """Take a measurement of all blocks."""
        found = [self._vanished(values)] if len(values) > 2 else []
        for block, own in values.items():
            found += [*self._update(block, own), *self._dead(block, own), *self._grown(block, own)]
        return self._new(found)

    def _new(self, found: Sequence[tuple[HealthFinding, bool] | None]) -> list[HealthFinding]:
        """Return what stands out and was not told since it was last well."""
        new = []
        for each in found:
            if each is None:
                continue
            told, stands_out = each
            key = told["detector"], told["block"]
            if stands_out and key not in self._told:
                new.append(told)
            (self._told.add if stands_out else self._told.discard)(key)
        return new

    # ---- of the curve ----------------------------------------------------------------------------------------------

    def _spike(self, what: str, value: float, before: OrderedWindow) -> tuple[HealthFinding, bool] | None:
        if len(before) < WINDOW // 2:
            return None
        if value <= upper_of(before.ordered):  # which is never above the limit
            return well(what)
        middle, deviation = middle_and_above(before.ordered)
        limit = middle + SPIKE * deviation
        return finding(
            what, "", value, limit, value > limit,
            f"{value:.4g}, where the last {len(before)} steps have a median of {middle:.4g} and a deviation of"
            f" {deviation:.2g}",
            "look at the step's samples (run.record_samples); run.health.on_spike = 'skip' or 'rollback'",
        )  # fmt: skip

    def _diverged(self) -> tuple[HealthFinding, bool] | None:
        if len(self._newest) < DIVERGED:
            return None
        middle = median_of(self._newest.ordered)
        self._best = min(self._best, middle)
        deviations = DIVERGED_DEVIATIONS / (2 if ("divergence", "") in self._told else 1)
        least = SMALLEST_PART * abs(self._best)
        if middle <= self._best + deviations * least:
            return well("divergence")
        limit = self._best + deviations * max(deviation_of(self._newest.ordered, middle), least)
        return finding(
            "divergence", "", middle, limit, middle > limit,
            f"the median loss of {DIVERGED} steps is {middle:.4g}, and was {self._best:.4g}",
            "a lower task.optimizer.lr, a longer task.schedule.warmup, or an earlier checkpoint",
        )  # fmt: skip

    def _plateau(self) -> tuple[HealthFinding, bool] | None:
        half = PLATEAU // 2
        if len(self._earlier) < half:
            return None
        earlier, later = median_of(self._earlier.ordered), median_of(self._later.ordered)
        deviation = deviation_of(self._later.ordered, later)
        error = PLATEAU_ERRORS * deviation * math.sqrt(2 * math.pi / 2 / half)  # of the difference of two medians
        error *= 2 if ("plateau", "") in self._told else 1
        if abs(earlier - later) >= error:
            return well("plateau")
        return finding(
            "plateau", "", earlier - later, error, True,
            f"in {half} steps the median loss went from {earlier:.4g} to {later:.4g}",
            "a schedule that decays the learning rate, or the end of the run",
        )  # fmt: skip

    # ---- of blocks -------------------------------------------------------------------------------------------------

    def _vanished(self, values: Mapping[str, Mapping[str, float]]) -> tuple[HealthFinding, bool] | None:
        relative = {name: own["grad_norm"] / own["weight_norm"] for name, own in values.items()
                    if own.get("weight_norm") and "grad_norm" in own}  # fmt: skip
        if len(relative) < 3:
            return None
        # Most blocks may have lost theirs, all before the one that does it: a median would be one of them. The largest
        # may be that of weights which begin near zero.
        second = sorted(relative, key=lambda name: relative[name])[-2]
        limit = VANISHED * relative[second]
        gone = [name for name, value in relative.items() if value < limit]
        named = gone[0] if gone else min(relative, key=lambda name: relative[name])
        so_many = f", and as small in {len(gone) - 1} more of {len(relative)} blocks" if len(gone) > 1 else ""
        here, there = f"{relative[named]:.2g}", f"{relative[second]:.2g} in {second}"
        return finding(
            "vanishing gradient", named, relative[named], limit, bool(gone),
            f"the gradient over the weights is {here} there and {there}{so_many}",
            "normalisation or residual connections around the block, another first weights' scale",
        )  # fmt: skip

    def _update(self, block: str, own: Mapping[str, float]) -> list[tuple[HealthFinding, bool]]:
        ratio = own.get("update_ratio")
        if ratio is None:
            return []
        # One large update is that of fresh biases, or of the first steps: three in a row are none.
        recent = self._remember(block, "update_ratio", ratio)[-3:]
        steady = len(recent) == 3
        return [
            finding("large update", block, ratio, LARGE_UPDATE, steady and min(recent) > LARGE_UPDATE,
                    f"one step moves the weights by {ratio:.1%} of their norm", "a lower task.optimizer.lr"),
            finding("small update", block, ratio, SMALL_UPDATE, steady and max(recent) < SMALL_UPDATE,
                    f"one step moves the weights by {ratio:.1g} of their norm",
                    "a higher task.optimizer.lr for the block (task.optimizer.groups), or leave it out of training"),
        ]  # fmt: skip

    def _dead(self, block: str, own: Mapping[str, float]) -> list[tuple[HealthFinding, bool]]:
        share = own.get("dead_share")
        if share is None:
            return []
        return [
            finding("dead units", block, share, DEAD, share > DEAD,
                    f"{share:.0%} of the units behind its activation functions gave nothing for any sample",
                    "a lower task.optimizer.lr, or an activation function that lets gradients through")
        ]  # fmt: skip

    def _grown(self, block: str, own: Mapping[str, float]) -> list[tuple[HealthFinding, bool]]:
        found = []
        for name, (detector, advice) in GROWING.items():
            most = own.get(name)
            if most is None or not math.isfinite(most):
                continue
            before = self._remember(block, name, most)[:-1]
            if len(before) < 5:
                continue
            middle = median_of(sorted(before))
            found.append(finding(
                detector, block, most, GROWN * middle, most > GROWN * middle,
                f"the largest is {most:.3g}, and was {middle:.3g} in the median of {len(before)} measurements", advice,
            ))  # fmt: skip
        return found

    def _remember(self, block: str, what: str, value: float) -> list[float]:
        history = self._history.setdefault((block, what), deque(maxlen=HISTORY))
        history.append(value)
        return list(history)


def well(detector: str) -> tuple[HealthFinding, bool]:
    """Return that a detector of the curve sees nothing."""
    return {"detector": detector, "block": ""}, False


def finding(
    detector: str, block: str, value: float, threshold: float, stands_out: bool, evidence: str, advice: str
) -> tuple[HealthFinding, bool]:
    """Return what a detector has seen, and whether it stands out."""
    return {
        "detector": detector, "block": block, "value": value, "threshold": threshold, "evidence": evidence,
        "advice": advice,
    }, stands_out  # fmt: skip
