"""Which evaluation is the best, and when training ends early: a function of the evaluations on record."""

from __future__ import annotations

import math

import pytest

from paceline.errors import ConfigError
from paceline.run.evaluate.best import BestEvaluation
from paceline.run.loop.evaluate import EvaluationResult
from paceline.spec.watch.evaluate import EvaluateSpec, check_evaluate

ACCURACY = {"metric": "accuracy", "metrics": ("accuracy",)}


def judged(values: list[float], **options: object) -> BestEvaluation:
    judge = BestEvaluation(EvaluateSpec(**options), 100)  # type: ignore[arg-type]
    for number, value in enumerate(values, 1):
        judge.add(10 * number, EvaluationResult(value, 1.0, 0.0, {"accuracy": value}))
    return judge


def test_a_metric_of_ones_own_is_judged_by_its_path_as_by_its_name() -> None:
    """By the path, as `metrics` has it, a run ended at its first evaluation: it "is not measured"."""
    for metric in ("mine:accuracy", "accuracy"):
        options = {"metrics": ("mine:accuracy",), "metric": metric, "mode": "max", "patience": 1}
        judge = judged([0.5, 0.7, 0.6], **options)
        assert (judge.best, judge.is_over) == ((20, 1), True)
        if ":" in metric:
            check_evaluate(EvaluateSpec(**options))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'mine:accuracy'"):
        check_evaluate(EvaluateSpec(metrics=("mine:accuracy",), metric="mine:accurcy", mode="max"))


@pytest.mark.parametrize(
    ("values", "options", "best", "over"),
    [
        ([3.0, 2.0, 2.5, 2.4], {"patience": 2}, (20, 2), True),
        ([3.0, 2.0, 2.5, 1.9], {"patience": 2}, (40, 0), False),
        ([3.0, 2.0, 2.5, 1.9], {"patience": 2, "min_delta": 0.2}, (20, 2), True),
        ([0.5, 0.7, 0.6], {"patience": 1, "metric": "accuracy", "metrics": ("accuracy",)}, (20, 1), True),
        (
            [0.5, 0.7, 0.6],
            {"patience": 1, "metric": "accuracy", "metrics": ("accuracy",), "mode": "min"},
            (10, 2),
            True,
        ),
        ([3.0, 3.0, 3.0], {}, (10, 2), False),
        ([math.nan, math.inf], {"patience": 2}, None, True),
        ([math.nan, 2.0], {"patience": 2}, (20, 0), False),
    ],
)
def test_the_best_and_the_end(
    values: list[float], options: dict[str, object], best: tuple[int, int] | None, over: bool
) -> None:
    judge = judged(values, **options)
    assert judge.best == best
    assert judge.is_over == over
    if over:
        assert str(judge.spec.metric) in judge.decision().because


def test_going_back_forgets_what_came_after() -> None:
    judge = judged([3.0, 2.0, 2.5, 2.4], patience=2)
    judge.forget_after(30)
    assert judge.best == (20, 1) and not judge.is_over


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"metrics": ("acuracy",)}, "accuracy"),
        ({"metric": "accuracy"}, "not measured"),
        ({"metrics": ("my.module:score",), "metric": "score"}, "mode"),
        ({"sets": ({"name": "hard"},)}, "source is not set"),
        ({"sets": ({"name": "a/b", "source": "x"},)}, "name"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check_evaluate(EvaluateSpec(**options))  # type: ignore[arg-type]
