"""A budget that the forecast breaks is refused before a run, with the cheapest plan that would be within it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.errors import ConfigError, DoesNotFit
from paceline.plan.planned import Planned, plan_task
from paceline.session.ready.budget import check_budget, forecast_of
from paceline.session.replanner import with_devices
from paceline.spec.load import load_spec, parse_spec
from paceline.spec.plan import GoalSpec
from paceline.spec.survive.budget import BudgetSpec, SharedBudgetSpec

SPEC = """
[task]
model = "llama-124m"
data = { source = "stdlib", seq_len = 512 }
global_batch = "64 samples"
stop = "1000 steps"
[cluster]
device = "h100-sxm"
devices = 16
price_usd_per_device_hour = 2.0
[run]
dir = "%s"
"""


def within(planned: Planned, usd: float) -> Planned:
    run = dataclasses.replace(planned.spec.run, budget=BudgetSpec(usd=usd))
    return dataclasses.replace(planned, spec=dataclasses.replace(planned.spec, run=run))


def test_the_cheapest_plan_is_named_with_its_devices_and_is_what_planning_it_gives(tmp_path: Path) -> None:
    """16 devices on a small model cost more than one; what is named is planned again, and is within the budget."""
    path = tmp_path / "spec.toml"
    path.write_text(SPEC % (tmp_path / "run"))
    planned = plan_task(load_spec(path))
    usd = forecast_of(planned, "usd")
    with pytest.raises(DoesNotFit) as refused:
        check_budget(within(planned, usd * 0.9), print)
    named = re.search(r"cluster.devices = (\d+) and plan.goal = 'money', which takes \$([0-9.]+)", str(refused.value))
    assert named is not None, refused.value
    devices, takes = int(named[1]), float(named[2])
    money = dataclasses.replace(planned.spec.plan, goal=GoalSpec("money"))
    prices = {
        count: forecast_of(
            plan_task(dataclasses.replace(planned.spec, cluster=with_devices(planned.spec.cluster, count), plan=money)),
            "usd",
        )
        for count in (16, 8, 4, 2, 1)
    }
    assert prices[devices] == min(prices.values()) == pytest.approx(takes, rel=1e-3) and takes <= usd * 0.9
    with pytest.raises(DoesNotFit) as hopeless:
        check_budget(within(planned, min(prices.values()) * 0.5), print)
    assert "plan.goal" not in str(hopeless.value) and "task.stop" in str(hopeless.value)
    both = dataclasses.replace(
        planned.spec.run, tags={"team": "speech"}, budget=BudgetSpec(usd=usd * 2),
        shared_budget=SharedBudgetSpec(usd=usd * 0.5, shared_by="team"),
    )  # fmt: skip
    said: list[str] = []
    with pytest.raises(DoesNotFit, match=r"(?s)that all runs of the same team share.*a larger run.shared_budget.usd"):
        check_budget(dataclasses.replace(planned, spec=dataclasses.replace(planned.spec, run=both)), said.append)
    assert len(said) == 1 and said[0].startswith("budget "), "its own is said first, which it is within"


def test_money_that_nobody_can_count_is_no_limit() -> None:
    """Where no price is known a limit never ended the run, and nothing was said of it."""
    text = SPEC.replace('device = "h100-sxm"\n', 'device = "cpu"\nprobe = false\n') % "runs/none"
    for limit in ("run.usd_limit", "run.budget.usd"):
        priced = plan_task(parse_spec(text, overrides=[f"{limit}=1000", "cluster.devices=1"]))
        check_budget(priced, lambda line: None)
        unpriced = plan_task(
            parse_spec(text.replace("price_usd_per_device_hour = 2.0\n", ""),
                       overrides=[f"{limit}=1000", "cluster.devices=1"])
        )  # fmt: skip
        with pytest.raises(ConfigError, match=f"{limit} = 1000 counts what is not known here"):
            check_budget(unpriced, lambda line: None)


def test_a_plan_ends_as_training_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script asks `plan` before it queues a job: it said 0 of what `train` then refused."""
    path = tmp_path / "spec.toml"
    path.write_text(SPEC % (tmp_path / "run"))
    plain = ["plan", str(path)]
    assert main([*plain, "--set", "run.budget.usd=1000000"]) == 0
    assert "budget   $1,000,000 of $1,000,000 is left" in capsys.readouterr().out
    small = [*plain, "--set", "run.budget.usd=0.01"]
    assert main([*small, "--set", "run.budget.forecast=tell"]) == 0
    capsys.readouterr()
    assert main(small) == 3
    told = capsys.readouterr()
    assert "s/step" in told.out and "is beyond the budget" in told.err, "the plan is shown all the same"
    assert main([*small, "--json"]) == 3
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert found["exit_code"] == 3 and found["plan_text"] and found["forecast"]["usd"]["value"] > 0.01
    assert "is beyond the budget" in found["budget_error"]["what"] and "is beyond the budget" in told.err
    assert main([*plain, "--set", "run.budget.usd=1000000", "--json"]) == 0
    assert "budget_error" not in json.loads(capsys.readouterr().out)
    assert main([*plain, "--set", "run.budget.kg_co2e=1", "--set", "cluster.region=none"]) == 2
