"""Advice on a run's cost, from journals that this test makes: one for each piece, and none where there is none."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.account.advice.advise import advice_line
from paceline.report.build import report_lines
from paceline.report.html import render_html
from paceline.report.summary import Summary, summarise

BEGAN = 1_772_323_200.0
H100 = {"name": "NVIDIA H100 SXM5 80GB", "kind": "cuda", "memory_bytes": {"value": 84.9e9}}


def journal(
    steps: int = 400, every: int = 100, stall: float = 0.1, peak: float = 70e9, data: float = 0.0, passes: int = 1,
    device: dict[str, Any] | None = None, grid: float | None = None, **run: Any,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the lines of a run on four GPUs with steps of 0.5 s, and `data` seconds of waiting beside."""
    cluster: dict[str, Any] = {"device": device or H100, "devices": 4, "watts_per_device": {"value": 900.0},
                               "price_usd_per_device_hour": {"value": 3.0}}  # fmt: skip
    cluster |= {"carbon_g_per_kwh": {"value": grid}} if grid else {}
    yield {"kind": "run_started", "time": BEGAN, "attempt": 1, "step": 0, "world_size": 4, "cluster": cluster,
           "plan": {"precision": "bf16", "micro_batch": 4, "accumulation": passes}, "forecast": {"steps": steps},
           "spec": {"task": {"name": "asr"}, "run": run}}  # fmt: skip
    now = BEGAN + 10
    for step in range(1, steps + 1):
        now += 0.5 + data
        yield {"kind": "step", "time": now, "step": step, "loss": 2 + 3 * step**-0.5, "weight": 1000.0,
               "peak_bytes": peak, "seconds": {"total": 0.5 + data, "data": data, "forward_backward": 0.5}}  # fmt: skip
        if step % every == 0:
            now += stall
            yield {
                "kind": "checkpoint",
                "time": now,
                "step": step,
                "bytes": 1,
                "seconds": stall,
                "stall_seconds": stall,
            }
    yield {"kind": "run_ended", "time": now, "status": "complete", "exit_code": 0, "step": steps}


def found(summary: Summary) -> dict[str, Any]:
    return {advice.kind: advice for advice in summary.advice}


def test_a_run_that_fits_its_devices_gets_no_advice() -> None:
    cheap = {**H100, "name": "a device that the catalog lacks"}
    assert summarise(journal(device=cheap)).advice == ()
    assert summarise(journal(steps=10, data=5.0)).advice == (), "it has hardly begun"


def test_devices_that_wait_for_data() -> None:
    advice = found(summarise(journal(data=0.5)))["idle"]
    assert advice.saves == pytest.approx(0.5, abs=0.05) and advice.sure == "likely" and "data-bound" in advice.text
    hours = 4 * (10 + 400 * 1.0 + 0.4) / 3600
    assert advice.amounts["usd"] == pytest.approx(3.0 * hours * advice.saves, rel=0.01)
    assert advice.amounts["kwh"] == pytest.approx(0.9 * hours * advice.saves, rel=0.01)


def test_what_the_verdict_says_to_try_is_not_said_twice() -> None:
    summary = summarise(journal(data=0.5))
    verdict, advice = (next(line for line in report_lines(summary) if line.startswith(word))
                       for word in ("verdict", "advice"))  # fmt: skip
    assert summary.bound and f"try: {summary.bound.advice}" in verdict
    assert "try what the verdict says (saves" in advice and "try: " not in advice
    assert summary.bound.advice in render_html(summary), "the page has it beside the advice"


def test_a_smaller_device_where_memory_stands_empty() -> None:
    full, empty = found(summarise(journal(peak=84e9))), found(summarise(journal(peak=10e9)))
    assert "device" not in full or "a smaller device" not in full["device"].text
    advice = empty["device"]
    assert 0 < advice.saves < 1 and advice.of == "usd" and advice.sure == "rough" and set(advice.amounts) == {"usd"}
    assert "paceline plan SPEC --device" in advice.try_ and "published" in advice.because


def test_checkpoints_that_come_too_often_for_a_run_without_faults() -> None:
    advice = found(summarise(journal(every=4, stall=0.5)))["checkpoints"]
    assert "too often" in advice.text and advice.sure == "likely"
    assert advice.saves == pytest.approx(0.5 / 2.0, rel=0.5), "half a second for each two of work"
    assert "checkpoints" not in found(summarise(journal(every=100, stall=0.01)))


def test_checkpoints_that_come_too_rarely_for_how_often_it_fails() -> None:
    def lines() -> Iterator[dict[str, Any]]:
        for line in journal(every=150, stall=0.01):
            yield line
            if line.get("step") in (50, 120, 200, 290) and line["kind"] == "step":
                yield {"kind": "recovery", "time": line["time"] + 0.1, "generation": 2, "rung": "reform", "step": 1,
                       "from_world": 4, "to_world": 4, "seconds": {"total": 0.1, "step": 0.05}}  # fmt: skip

    advice = found(summarise(lines()))["checkpoints"]
    assert "too rarely" in advice.text and advice.sure == "measured"


def test_the_interval_is_in_time_of_the_run_and_not_of_its_median_step() -> None:
    """A step in ten takes 9.5 s longer: 4 steps are 5.8 s in the mean, and not the 2 s of their medians."""

    def lines() -> Iterator[dict[str, Any]]:
        late = 0.0
        for line in journal(every=4, stall=0.5):
            if line["kind"] == "step" and line["step"] % 10 == 0:
                late, line["seconds"]["total"] = late + 9.5, 10.0
            yield {**line, "time": line["time"] + late}

    advice = found(summarise(lines()))["checkpoints"]
    assert "come every 5.8" in advice.text and "too often" in advice.text


def test_starts_that_were_killed_are_failures_too() -> None:
    """No fault in 250 s, and one in each 8 s, are two different things for how often to save."""

    def lines() -> Iterator[dict[str, Any]]:
        begun, attempt = {}, 1  # type: ignore[var-annotated]
        for line in journal(every=4, stall=0.5):
            begun = begun or line
            yield {**line, "attempt": attempt}
            if line["kind"] == "checkpoint" and line["step"] % 12 == 0 and line["step"] < 400:
                attempt += 1
                yield {**begun, "attempt": attempt, "time": line["time"] + 0.1, "step": line["step"]}

    assert "checkpoints" in found(summarise(journal(every=4, stall=0.5)))
    assert "checkpoints" not in found(summarise(lines())), "each 2 s is about right where it fails each 8 s"


def test_a_larger_micro_batch_and_a_greener_grid() -> None:
    advice = found(summarise(journal(peak=20e9, passes=4, grid=400.0)))
    assert advice["micro_batch"].try_ == "plan.micro_batch = 8"
    region = advice["region"]
    assert region.of == "carbon" and set(region.amounts) == {"carbon_kg"} and 0.8 < region.saves < 1
    assert "CO2e" in advice_line(region)
    assert "micro_batch" not in found(summarise(journal(peak=60e9, passes=4)))


def test_other_hours_by_the_specs_own_figures(tmp_path: Path) -> None:
    began = datetime.datetime.fromtimestamp(BEGAN).hour
    figures = {hour: 400.0 if hour == began else 100.0 for hour in range(24)}
    (tmp_path / "grid.csv").write_text("hour,value\n" + "".join(f"{hour},{g}\n" for hour, g in figures.items()))
    when = {"window": "", "hours": 8, "tariff": "", "carbon": str(tmp_path / "grid.csv")}
    advice = found(summarise(journal(grid=400.0, when=when)))["hours"]
    assert advice.of == "carbon" and advice.try_ == 'run.when = "greenest"' and advice.saves == pytest.approx(0.75)
    assert "emits 400 g/kWh in the hours of the run, and 100" in advice.text
    (tmp_path / "tariff.csv").write_text("hour,value\n" + "".join(f"{h},{g / 1000}\n" for h, g in figures.items()))
    dear = found(summarise(journal(when={**when, "carbon": "", "tariff": str(tmp_path / "tariff.csv")})))
    assert 0.05 < dear["hours"].saves < 0.12, "0.9 kWh an hour for $0.30 less each, of $3"
    for none in ({**when, "window": "greenest"}, {**when, "carbon": "400"}, {**when, "carbon": "gone.csv"}):
        assert "hours" not in found(summarise(journal(grid=400.0, when=none)))


def test_the_largest_saving_comes_first_and_the_report_shows_it() -> None:
    summary = summarise(journal(data=0.5, peak=10e9, budget={"usd": 1.0, "kwh": 100.0}))
    assert len(summary.advice) > 1
    saves = [advice.saves for advice in summary.advice]
    assert saves == sorted(saves, reverse=True)
    page = render_html(summary)
    assert "Budgets and advice" in page and "devices wait" in page
    assert summary.as_dict()["advice"][0]["amounts"]["usd"] > 0


def test_what_is_left_of_a_budget_buys_steps_at_the_pace_of_the_run() -> None:
    """410 s of 4 devices at $3 an hour are $1.37 for 400 steps; $2.74 buy as many again, and what they teach."""
    seconds = 10 + 400 * 0.5 + 0.4
    usd = 4 * seconds * 3.0 / 3600
    (left,) = summarise(journal(budget={"usd": 2 * usd})).budgets
    assert left.spent == pytest.approx(usd) and left.steps == pytest.approx(400, rel=1e-6)
    assert left.items == pytest.approx(400_000, rel=1e-6) and left.loss is not None
    assert left.loss.low <= 2 + 3 * 800**-0.5 <= left.loss.high < 1.03 * left.loss.low
    assert "buys 400 steps" in left.text and "loss of about" in left.text
    assert summarise(journal()).budgets == ()
