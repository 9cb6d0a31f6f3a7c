"""Scores are what their definitions give by hand, and what an independent implementation gives."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from backtest_examples import LLAMA, case_of

from paceline.backtest.fitting.leave_out import by_devices
from paceline.backtest.price import Interval, Priced
from paceline.backtest.score import Scored, choice_score, errors_of, memory_score, null_rates, time_score
from paceline.backtest.statistics import median, ranks, spearman
from paceline.spec.plan import Plan


def scored(
    measured: float | None = None,
    forecast: float = 1.0,
    plan: Plan | None = None,
    fits: bool = True,
    memory: float = 0.0,
    **changes: object,
) -> Scored:
    """Return a row with a measured time and a forecast of it, whose intervals are 0.8 to 1.25 and 0.5 to 2 times."""
    case = replace(case_of(LLAMA, measured_step_s=measured and 2000.0, **changes), step_seconds=measured)
    interval = Interval(forecast, 0.8 * forecast, 1.25 * forecast, 0.5 * forecast, 2 * forecast)
    return Scored(case, Priced(plan or case.plans[0], interval, memory, fits, {}))


def test_errors_by_hand() -> None:
    errors = errors_of([0.1, -0.2, 0.6])
    assert (errors.n, errors.worst) == (3, 0.6)
    assert errors.mape == pytest.approx(0.3)
    assert (errors.median, errors.bias) == (0.2, pytest.approx(0.5 / 3))
    assert math.isnan(errors_of([]).mape)


def test_ranks_and_spearman_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(5)
    for size in (3, 10, 40):
        left = [draw.randint(0, size) + 0.0 for _ in range(size)]
        right = [value + draw.gauss(0, size / 3) for value in left]
        assert ranks(left) == list(stats.rankdata(left))
        assert spearman(left, right) == pytest.approx(stats.spearmanr(left, right).statistic)
    assert math.isnan(spearman([1.0, 1.0], [1.0, 2.0]))
    assert (median([]), median([3.0, 1.0]), median([5.0, 1.0, 2.0]))[1:] == (2.0, 2.0)


def test_the_null_is_the_median_rate_of_accelerator_and_precision() -> None:
    rows = [scored(10.0, 10.0), scored(20.0, 10.0), scored(40.0, 10.0), scored(7.0, 7.0, accelerator="H100-80GB")]
    rates = null_rates(rows)
    case = rows[1].case
    assert rates["NVIDIA A100 SXM4 80GB", "bf16"] == pytest.approx(case.flops_per_step / 20.0 / 8)
    # The null forecasts 20 s for the three A100 rows and is right for the only H100 row.
    assert time_score(rows).null_mape == pytest.approx((1.0 + 0.0 + 0.5 + 0.0) / 4)
    assert time_score(rows).mape == pytest.approx((0.0 + 0.5 + 0.75 + 0.0) / 4)


def test_the_null_knows_the_work_but_not_the_layout() -> None:
    rows = [scored(10.0), scored(20.0, global_batch=128)]  # twice the work in twice the time
    assert time_score(rows).null_mape == pytest.approx(0.0)


def test_coverage_counts_measurements_inside_the_intervals() -> None:
    rows = [scored(1.0, forecast) for forecast in (1.0, 1.2, 1.5, 0.7, 2.5)]
    score = time_score(rows)
    assert score.coverage_80 == pytest.approx(2 / 5)
    assert score.coverage_95 == pytest.approx(4 / 5)


def test_regret_is_what_the_choice_costs_over_the_best() -> None:
    rows = [scored(10.0, 3.0, micro_batch=1), scored(12.0, 1.0, micro_batch=2), scored(30.0, 5.0, micro_batch=4)]
    score = choice_score(rows)
    assert (score.groups, score.rows) == (1, 3)
    assert score.regret_median == score.regret_worst == pytest.approx(0.2)
    assert score.spearman_median == pytest.approx(0.5)


def test_groups_are_of_one_model_length_batch_and_number_of_devices() -> None:
    rows = [scored(10.0, 1.0, micro_batch=size, seq_len=length) for size in (1, 2, 4) for length in (2048, 4096)]
    assert choice_score(rows).groups == 2
    assert choice_score(rows[:4]).groups == 0  # two rows are no choice
    assert choice_score([scored(10.0), scored(11.0), scored(12.0)]).groups == 0  # nor is one plan


def test_memory_and_feasibility() -> None:
    rows = [
        scored(1.0, memory=11 * 2**30, measured_memory_gib=10.0),
        scored(1.0, memory=8 * 2**30, measured_memory_gib=10.0, fits=False),
        scored(status="oom"), scored(status="oom", fits=False), scored(status="failed", fits=False),
    ]  # fmt: skip
    score = memory_score(rows)
    assert (score.n, score.mape, score.bias) == (2, pytest.approx(0.15), pytest.approx(-0.05))
    assert (score.oom_rows, score.oom_called_feasible) == (2, 1)
    assert (score.failed_rows, score.failed_called_feasible) == (1, 0)
    assert (score.ok_rows, score.ok_called_infeasible) == (2, 1)


def test_errors_are_told_by_the_number_of_devices() -> None:
    given = ((8, 11.0, "a"), (4, 9.0, "b"), (64, 12.0, "a"), (1024, 5.0, "b"))
    rows = [
        scored(
            10.0,
            forecast,
            n_devices=devices,
            devices_per_node=min(devices, 8),
            dp=devices,
            global_batch=2048,
            file=file,
        )
        for devices, forecast, file in given
    ]
    small, middle, large = by_devices(rows)
    assert (small.devices, small.rows, small.tables) == (8, 2, 2)
    assert small.mape == pytest.approx(0.1) and small.bias == pytest.approx(0.0)
    assert (middle.devices, middle.rows) == (64, 1) and middle.bias == pytest.approx(0.2)
    assert (large.devices, large.rows) == (1024, 1) and large.bias == pytest.approx(-0.5)
