"""A rate that a program writes into the optimizer has no effect, and is told; what the schedule gives is never told."""

from __future__ import annotations

from paceline.run.updates.rates import ScheduledRates


def test_the_schedules_rate_is_what_a_step_has_and_another_one_is_told_once() -> None:
    groups: list[dict[str, float]] = [{"lr": 0.5}, {"lr": 0.5, "lr_scale": 0.1}]  # of torch's optimizer, at the start
    rates = ScheduledRates()
    for lr in (0.3, 0.2):
        rates.give(groups, lr)
        assert [group["lr"] for group in groups] == [lr, lr * 0.1] and rates.take() == ""
    groups[1]["lr"] = 1e-9
    rates.give(groups, 0.1)
    assert [group["lr"] for group in groups] == [0.1, 0.1 * 0.1]
    told = rates.take()
    assert "1e-09" in told and "0.02" in told and "task.schedule" in told
    groups[0]["lr"] = 1.0
    rates.give(groups, 0.1)
    assert rates.take() == "" and groups[0]["lr"] == 0.1


def test_a_group_that_a_program_adds_has_the_schedules_rate_too() -> None:
    groups: list[dict[str, float]] = [{"lr": 0.5}]
    rates = ScheduledRates()
    rates.give(groups, 0.3)
    groups.append({"lr": 0.5, "lr_scale": 2.0})
    rates.give(groups, 0.2)
    assert [group["lr"] for group in groups] == [0.2, 0.4] and rates.take() == ""
