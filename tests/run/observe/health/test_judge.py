"""What stands out of training is told once, with threshold, evidence and advice; a healthy run is silent."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable
from typing import Any

import pytest

from paceline.robust import NORMAL, SMALLEST_PART, OrderedWindow, deviation_of, median_of
from paceline.run.observe.health.judge import DEAD, LARGE_UPDATE, PLATEAU, SPIKE, WINDOW, HealthJudge

HEALTHY = {"grad_norm": 0.1, "weight_norm": 10.0, "update_ratio": 1e-3, "activation_max": 8.0, "dead_share": 0.1}


def curve(steps: int, seed: int = 0, noise: float = 0.05) -> list[float]:
    """Return losses as training has them: they fall as a power of the steps, with noise."""
    draw = random.Random(seed)
    return [2.0 + 4.0 * (step + 10) ** -0.3 + draw.gauss(0, noise) for step in range(steps)]


def told(losses: Iterable[float], norms: Iterable[float] | None = None) -> list[dict[str, Any]]:
    judge, found = HealthJudge(), []
    losses = list(losses)
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=False):
        found += judge.step(loss, norm)
    return found


def names(found: list[dict[str, Any]]) -> list[str]:
    return [each["detector"] for each in found]


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_of_a_thousand_steps_is_silent(seed: int) -> None:
    draw = random.Random(seed)
    norms = [math.exp(draw.gauss(0, 0.2)) for _ in range(1000)]
    assert told(curve(1000, seed), norms) == []


def test_a_healthy_run_of_blocks_is_silent() -> None:
    judge, draw = HealthJudge(), random.Random(1)
    for _ in range(50):
        blocks = {f"layers.{n}": {name: value * math.exp(draw.gauss(0, 0.3)) for name, value in HEALTHY.items()}
                  for n in range(8)}  # fmt: skip
        assert judge.measured(blocks) == []


def test_a_spike_is_told_once_with_its_threshold() -> None:
    losses = curve(200)
    losses[150] = losses[151] = 30.0
    (spike,) = told(losses)
    assert spike["detector"] == "loss spike" and spike["value"] == 30.0 and spike["block"] == ""
    assert 2.0 < spike["threshold"] < 10.0 and "median" in spike["evidence"] and "on_spike" in spike["advice"]


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_near_zero_with_a_long_upper_side_is_no_row_of_spikes(seed: int) -> None:
    """As what a classifier does that has learnt its samples: its log is normal, with a deviation of 1.5."""
    draw = random.Random(seed)
    losses = [math.exp(draw.gauss(-5, 1.5)) for _ in range(1000)]
    assert len(told(losses)) <= 15, "41 to 57 by the median absolute deviation"
    losses[500] = 5.0
    assert any(each["value"] == 5.0 for each in told(losses))


def test_one_spike_does_not_hide_the_next() -> None:
    losses = curve(300)
    losses[150] = 1000.0
    losses[170] = 30.0
    assert names(told(losses)) == ["loss spike", "loss spike"]


def test_a_spike_of_the_gradient() -> None:
    draw = random.Random(0)
    norms = [1.0 + draw.gauss(0, 0.05) for _ in range(100)]
    norms[80] = 1.0 + 3 * SPIKE * 0.05
    assert names(told(curve(100), norms)) == ["gradient spike"]


def test_nothing_is_told_of_a_spike_before_there_is_a_window() -> None:
    assert told([*curve(WINDOW // 2 - 1), 100.0]) == []


def test_a_plateau_is_told() -> None:
    draw = random.Random(0)
    flat = [2.0 + draw.gauss(0, 0.05) for _ in range(PLATEAU + 10)]
    found = told(flat)
    assert names(found) == ["plateau"] and "decays" in found[0]["advice"]


def test_a_divergence_is_told() -> None:
    rising = [loss + 0.002 * step**1.5 / 10 for step, loss in enumerate(curve(600, noise=0.02))]
    found = names(told(rising))
    assert found.count("divergence") == 1


def test_numbers_that_are_not_finite_are_the_runs_own() -> None:
    assert told([*curve(100), math.nan, math.inf]) == []


def test_an_idle_expert_is_told_again_after_it_was_well() -> None:
    judge = HealthJudge()
    loads = [0.5, 0.001, 0.001, 0.5, 0.002]
    assert [names(judge.step(2.0, 1.0, load)) for load in loads] == [[], ["idle expert"], [], [], ["idle expert"]]


def blocks(**changes: dict[str, float]) -> dict[str, dict[str, float]]:
    return {f"layers_{n}": {**HEALTHY, **changes.get(f"layers_{n}", {})} for n in range(4)}


def test_a_vanishing_gradient_names_its_block() -> None:
    (found,) = HealthJudge().measured(blocks(layers_2={"grad_norm": 1e-7}))
    assert found["detector"] == "vanishing gradient" and found["block"] == "layers_2"
    assert found["value"] < found["threshold"]


def test_gradients_that_have_vanished_in_most_blocks_are_told_once() -> None:
    """A block that lets none through takes those of all before it, and the median with them: nothing was told."""
    judge = HealthJudge()
    gone = {f"layers_{n}": {"grad_norm": 1e-9 * (4 - n)} for n in range(3)}
    values = {**blocks(**gone), "norm": HEALTHY}
    (found,) = judge.measured(values)
    assert (found["detector"], found["block"]) == ("vanishing gradient", "layers_0")
    assert "as small in 2 more of 5 blocks" in found["evidence"] and judge.measured(values) == []
    fresh = blocks(layers_3={"weight_norm": 1e-9})
    assert HealthJudge().measured(fresh) == [], "weights that begin near zero make no other block's gradient vanish"


def test_updates_that_stay_too_large_or_too_small() -> None:
    for ratio, detector in ((2 * LARGE_UPDATE, "large update"), (1e-10, "small update")):
        judge = HealthJudge()
        found = [names(judge.measured(blocks(layers_0={"update_ratio": ratio}))) for _ in range(4)]
        assert found == [[], [], [detector], []]


def test_dead_units_and_growing_activations() -> None:
    judge = HealthJudge()
    assert names(judge.measured(blocks(layers_3={"dead_share": DEAD + 0.1}))) == ["dead units"]
    for _ in range(5):
        assert judge.measured(blocks()) == []
    (found,) = judge.measured(blocks(layers_1={"activation_max": 200.0}))
    assert found["detector"] == "growing activations" and found["threshold"] == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("name", "detector"), [("attention_max", "growing attention scores"), ("logit_max", "growing logits")]
)
def test_scores_and_logits_that_grow(name: str, detector: str) -> None:
    judge = HealthJudge()
    for _ in range(6):
        assert judge.measured(blocks(layers_1={name: 9.0})) == []
    assert judge.measured(blocks(layers_1={name: 80.0})) == [], "not ten times as large"
    (found,) = judge.measured(blocks(layers_1={name: 100.0}))
    assert (found["detector"], found["block"], found["threshold"]) == (detector, "layers_1", 90.0)


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_a_window_in_order_tells_what_its_values_tell(length: int) -> None:
    draw, window, values = random.Random(length), OrderedWindow(length), []
    for _ in range(5 * length + 3):
        value = draw.choice([1.0, 2.0, draw.random(), 1e300])
        left = window.add(value)
        assert left == (values[-length] if len(values) >= length else None)
        values.append(value)
        last = values[-length:]
        assert window.ordered == sorted(last) and len(window) == len(last)
        middle = statistics.median(last)
        deviation = NORMAL * statistics.median(abs(each - middle) for each in last)
        assert median_of(window.ordered) == middle
        assert deviation_of(window.ordered, middle) == max(deviation, SMALLEST_PART * abs(middle))
