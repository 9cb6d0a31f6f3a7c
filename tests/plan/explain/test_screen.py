"""What a plan says on one screen: money and dates from one price, spot that saves nothing, and few enough lines."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from typing import Any

import pytest

from paceline.cli.main import main
from paceline.plan.explain.choice import sure_lines, trial_seconds, tried_gain
from paceline.plan.explain.headline import headline_lines, price_text, without_effect_lines
from paceline.plan.explain.lines import WIDTH
from paceline.plan.explain.money import (
    bought_text,
    expected_usd,
    finish_lines,
    limit_lines,
    money_text,
    price_lines,
)
from paceline.plan.explain.screen import LINES, screen_lines
from paceline.plan.planned import Planned, plan_task
from paceline.plan.risk.contest import Contender, Contest
from paceline.plan.search.limits import Limits
from paceline.spec.forecast import Estimate, Term
from paceline.spec.load import load_spec
from paceline.units import format_seconds

LARGE = [
    "task.model=llama-8b", "task.data.seq_len=8192", 'task.global_batch="4 Mi tokens"', 'task.stop="10 B tokens"',
    'task.data.max_bytes="100 kB"', "cluster.device=h100-sxm", "cluster.devices=64",
]  # fmt: skip


def planned(*words: str) -> Planned:
    return plan_task(load_spec(None, [*LARGE, *words]))


@pytest.fixture(scope="module")
def large() -> Planned:
    return planned("plan.budget_usd=5000", "cluster.spot=true", "cluster.reliability.preemption_hours_per_node=24")


def test_all_of_it_fits_a_screen(large: Planned) -> None:
    lines = [*headline_lines(large), "", *screen_lines(large)]
    assert len(lines) <= LINES == 50
    assert all(len(line) <= WIDTH + 10 for line in screen_lines(large))
    told = "\n".join(lines)
    for part in ("time per step", "memory on the fullest device", "how sure", "why not otherwise", "refused", "--all"):
        assert part in told, part
    shares = [int(found) for found in re.findall(r"^ +(\d+)% +\S+ \S+  ", told, re.M)]
    assert 195 <= sum(shares) <= 205, "time and memory, each to a hundred percent"


def test_money_buys_at_one_price_wherever_it_is_told(large: Planned) -> None:
    items = large.steps * large.batch_samples * large.facts.items_per_sample
    price = expected_usd(large)
    assert price == large.expected.usd > large.forecast.usd.value > 0
    assert price / large.forecast.usd.value == pytest.approx(
        large.expected.wall_seconds.value / large.forecast.run_seconds.value
    )
    bought = bought_text(large, 5000.0)
    count, scale = re.search(r"buys ([\d.]+) ([BM]) tokens", bought).groups()  # type: ignore[union-attr]
    assert float(count) * {"B": 1e9, "M": 1e6}[scale] == pytest.approx(items * 5000 / price, rel=0.01)
    (budget,) = limit_lines(large)
    assert bought in budget and f"${price:,.0f} expected" in budget
    assert f"${price:,.0f}" in next(line for line in headline_lines(large) if "expected: " in line)
    assert bought_text(planned("cluster.device=mi300x"), 5000.0) == ""


def test_a_price_that_a_budget_is_held_against_stands_in_a_line_that_says_why_it_is_another() -> None:
    words = ("cluster.devices=16", 'task.stop="1000 B tokens"')
    few = planned(*words, "run.budget.usd=500")
    price, goodput = expected_usd(few), few.expected.goodput
    assert 0.995 < goodput < 1 and f"${price:,.0f}" != f"${few.forecast.usd.value:,.0f}"
    lines = headline_lines(few)
    assert f"${price:,.0f} expected" in next(line for line in lines if "budget $500" in line)
    assert f"${price:,.0f}" in next(line for line in lines if "expected: " in line and "goodput" in line)
    assert not any("expected: " in line for line in headline_lines(planned(*words)))


def test_a_long_run_says_when_it_is_done_and_a_short_one_does_not(large: Planned) -> None:
    now = datetime.datetime(2026, 12, 31, 20, 0, tzinfo=datetime.UTC)
    (line,) = finish_lines(large, now)
    found = [datetime.datetime.fromisoformat(each) for each in re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d", line)]
    wall = large.expected.wall_seconds
    for date, seconds in zip(found, (wall.value, wall.low, wall.high), strict=True):
        assert abs((date.replace(tzinfo=datetime.UTC) - now).total_seconds() - seconds) < 60
    assert finish_lines(planned('task.stop="1 steps"'), now) == []
    endless = dataclasses.replace(wall, value=1e15, low=1e15, high=1e15)
    object.__setattr__(large, "expected", dataclasses.replace(large.expected, wall_seconds=endless))
    assert finish_lines(large, now) == [], "beyond the calendar"
    del large.__dict__["expected"]


def test_spot_that_saves_nothing_is_remarked_and_one_that_does_is_not() -> None:
    dear, cheap = planned("cluster.spot=true"), planned("cluster.spot=true", "cluster.device=h100-pcie")
    assert any("spot saves nothing: $6.571" in remark and "$3.2" in remark for remark in dear.remarks)
    assert any("preemption_hours_per_node" in remark for remark in dear.remarks)
    assert any("spot saves nothing" in line for line in without_effect_lines(dear)), "without --explain too"
    assert not any("spot saves nothing" in remark for remark in cheap.remarks)
    stated = planned("cluster.spot=true", "cluster.price_usd_per_device_hour=9")
    assert not any("spot" in remark for remark in stated.remarks)
    assert not any("spot" in remark for remark in planned().remarks)


def test_a_price_that_nobody_lists_says_how_to_state_one() -> None:
    unknown = planned("cluster.device=mi300x")
    assert any("cluster.price_usd_per_device_hour" in line for line in price_lines(unknown))
    assert price_lines(planned("cluster.device=mi300x", "cluster.price_usd_per_device_hour=2")) == []
    assert not math.isfinite(unknown.forecast.usd.value)


@pytest.mark.parametrize(("chance", "says"), [(0.03, "cannot tell which"), (0.8, "with a chance of 80%")])
def test_a_small_chance_is_no_praise(large: Planned, chance: float, says: str) -> None:
    contender = Contender(large.plan, chance, 0.04)
    object.__setattr__(large, "contest", Contest((contender,), 64, 0.04, 0.04))
    told = " ".join(" ".join(sure_lines(large)).split())
    assert says in told and "4% more than the best one on average" in told and "3%" not in told
    del large.__dict__["contest"]


def test_one_line_says_how_sure_and_of_what_kind(large: Planned) -> None:
    """An interval, and in words whether chip and program were measured: a chip that never was has a wider one."""
    found = {}
    for each in (large, planned("cluster.device=mi300x")):
        ((down, up, because),) = re.findall(r"/step -(\d+)/\+(\d+)% \(([^)]*)\)", price_text(each))
        step = each.forecast.step_seconds
        assert int(up) == round(100 * (step.high / step.value - 1)) > int(down)
        assert int(down) == round(100 * (1 - step.low / step.value))
        found[because] = int(up)
    (known, narrow), (unknown, wide) = found.items()
    assert known == "this chip measured, this program never" and "this chip and this program never" in unknown
    assert wide > narrow
    wall = large.expected.wall_seconds
    assert wall.high / wall.value > wall.value / wall.low, "the run with its failures has both ends, too"


def test_trying_has_its_price(large: Planned) -> None:
    """Twenty steps of each of two plans on 64 devices: their forecasts, and the hours of all devices at the price."""
    found = [Contender(each.plan, 0.5, 0.04) for each in large.search.candidates[:2]]
    object.__setattr__(large, "contest", Contest(tuple(found), 64, 0.04, 0.01))
    seconds = 20 * sum(each.forecast.step_seconds.value for each in large.search.candidates[:2])
    usd = seconds / 3600 * 64 * large.cluster.price_usd_per_device_hour.value
    assert trial_seconds(large) == pytest.approx(seconds)
    says = f"20 steps of each of these 2 take {format_seconds(seconds)} and {money_text(usd)}, and"
    assert tried_gain(large).startswith(says)
    assert any(line.startswith(f"  {says}") for line in screen_lines(large))
    unlisted = dataclasses.replace(large, cluster=planned("cluster.device=mi300x").cluster)
    object.__setattr__(unlisted, "contest", large.contest)
    assert "$" not in tried_gain(unlisted) and "unknown" not in tried_gain(unlisted), "nobody lists a price"
    del large.__dict__["contest"]


def test_all_needs_what_it_adds_to(capsys: pytest.CaptureFixture[str]) -> None:
    words: list[Any] = [part for word in (*LARGE, "cluster.devices=8") for part in ("--set", word)]
    assert main(["plan", *words, "--all"]) == 2
    capsys.readouterr()
    assert main(["plan", *words, "--explain"]) == 0
    short = capsys.readouterr().out
    assert main(["plan", *words, "--explain", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3 * len(short.splitlines())
    assert main(["plan", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["expected"]["usd"] > 0


def test_a_correction_that_is_larger_than_the_terms_shown_is_shown(large: Planned) -> None:
    """It was counted among "others", which took less than no time."""
    time = (*large.forecast.time, Term("learnt here", -0.9 * large.forecast.step_seconds.value, "", "measured"))
    lines = screen_lines(dataclasses.replace(large, forecast=dataclasses.replace(large.forecast, time=time)))
    assert any("learnt here [measured]" in line for line in lines)
    assert not any(re.search(r"-\d+% .* others", line) for line in lines)


def test_a_small_budget_is_told_in_its_own_figures() -> None:
    """A run that costs $0.0003 does not cost $0, and its budget of $0.0001 is no budget of $0."""
    limits = Limits(None, 0.0001, 40)
    forecast = dataclasses.replace(planned().forecast, usd=Estimate(0.0003211, 0.0003, 0.0004, "assumed"))
    assert limits.names == "$0.0001 budget" and "costs $0.0003211: the budget of $0.0001" in limits.refusal(forecast)
