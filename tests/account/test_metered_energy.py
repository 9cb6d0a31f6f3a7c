"""Energy that GPUs metered: in bills and in reports, with what the forecast counts for the rest of the node."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.account.ledger import ledger_of
from paceline.account.node_counters import rest_of_node_watts
from paceline.cluster.catalog.devices import published_watts, read_catalog
from paceline.cluster.catalog.power import power_model
from paceline.report.compare import Promise
from paceline.report.summary import Summary, summarise
from paceline.report.watched.lines import nodes_seen
from paceline.spec.journal.kinds import parse
from paceline.spec.journal.watching import NodeSample

START = 1_772_323_200.0
LENGTH = 40.0  # seconds of the run
Line = dict[str, Any]


def figure(value: float) -> Line:
    return {"value": value, "low": value * 0.9, "high": value * 1.1, "source": "assumed", "note": ""}


def journal(devices: int = 2, rated: float | None = 700.0, **cluster: Any) -> list[Line]:
    """A run of 40 s whose forecast says 600 W a device, on devices that may draw 700 W and with their node 860 W."""
    device = {"name": "h200", "kind": "cuda", **({"rated_watts": rated} if rated else {})}
    kwh = 600 * devices * LENGTH / 3.6e6
    forecast = {"run_seconds": figure(LENGTH), "kwh": figure(kwh), "carbon_g": figure(100 * kwh), "steps": 4}
    known = {"device": device, "devices": devices, "watts_per_device": figure(860.0), "pue": figure(1.5), **cluster}
    start = {"kind": "run_started", "attempt": 1, "time": START, "world_size": devices, "plan_text": "plan",
             "cluster": known, "spec": {}, "forecast": forecast}  # fmt: skip
    steps = [{"kind": "step", "attempt": 1, "step": each, "time": START + 10.0 * each, "loss": 1.0, "weight": 1.0,
              "seconds": {"total": 10.0}} for each in range(1, 5)]  # fmt: skip
    return [start, *steps, {"kind": "run_ended", "attempt": 1, "time": START + LENGTH, "status": "complete"}]


def sample(joules: float | None, ranks: list[int], node: str = "a", at: float = LENGTH, **more: Any) -> Line:
    """A sample of all of the run so far, by default."""
    host = {} if joules is None else {"device_joules": joules}
    return {"kind": "node", "attempt": 1, "time": START + at, "node": node, "seconds": at, "ranks": ranks,
            "signals": {}, "host": {**host, **more.pop("host", {})}, "absent": {}, "flagged": [], **more}  # fmt: skip


def promises(lines: list[Line], samples: list[Line]) -> tuple[Promise, Promise, Summary]:
    summary = summarise([*lines, *samples])
    return summary.promise("energy"), summary.promise("carbon"), summary


def kwh_of_bill(lines: list[Line], samples: list[Line]) -> tuple[float, set[str]]:
    found = [read for each in samples if isinstance(read := parse(each), NodeSample)]
    entries = ledger_of(lines, "run", samples=found)
    return sum(entry.kwh or 0.0 for entry in entries), {entry.how["kwh"] for entry in entries}


def test_metered_energy_and_the_rest_of_the_node_are_held_against_the_forecast() -> None:
    """Two devices that took 300 W each: with 160 W for the rest of their node each, and a building of 1.5."""
    lines, samples = journal(), [sample(2 * 300 * LENGTH, [0, 1])]
    energy, carbon, _ = promises(lines, samples)
    expected = 2 * (300 + 160) * LENGTH * 1.5 / 3.6e6
    assert energy.measured == pytest.approx(expected) and energy.is_estimate, "the rest is the power model's"
    assert "counters of GPUs" in energy.measured_how and "160 W a device for the rest" in energy.measured_how
    assert "(10 Wh by counters)" in energy.measured_how, "what was metered stands by itself"
    assert energy.error == pytest.approx((300 + 160) * 1.5 / 600 - 1)
    assert carbon.measured == pytest.approx(expected * 100)
    billed, how = kwh_of_bill(lines, samples)
    assert billed == pytest.approx(expected) and "160 W a device" in how.pop()


def test_processors_with_a_counter_are_the_rest_of_the_node() -> None:
    lines, samples = journal(), [sample(2 * 300 * LENGTH, [0, 1], host={"cpu_joules": 50 * LENGTH})]
    energy, _, _ = promises(lines, samples)
    assert energy.measured == pytest.approx((600 + 50) * LENGTH * 1.5 / 3.6e6) and not energy.is_estimate
    assert energy.measured_how == "measured by the counters of GPUs and processors"
    assert kwh_of_bill(lines, samples)[0] == pytest.approx(energy.measured)


@pytest.mark.parametrize(
    "samples",
    [[], [sample(9e9, [0])], [sample(9e9, [0, 1], at=30.0)], [sample(None, [0, 1])],
     [sample(9e9, [0], "a"), sample(None, [1], "b")]],
    ids=["none", "one rank of two", "three quarters of the time", "no counter", "one node without"],
)  # fmt: skip
def test_energy_that_was_metered_in_part_stays_an_estimate(samples: list[Line]) -> None:
    energy, carbon, _ = promises(journal(), samples)
    assert energy.measured == pytest.approx(2 * 600 * LENGTH / 3.6e6) and energy.is_estimate
    assert "at the forecast's rate" in energy.measured_how and "forecast's rate" in carbon.measured_how


def test_a_start_that_was_not_metered_makes_all_of_the_run_an_estimate() -> None:
    again = [{**each, "attempt": 2, "time": each["time"] + 100.0} for each in journal()]
    energy, _, _ = promises([*journal(), *again], [sample(2 * 300 * LENGTH, [0, 1])])
    assert energy.measured == pytest.approx(2 * 2 * 600 * LENGTH / 3.6e6)


@pytest.mark.parametrize(("devices", "once"), [(None, False), ("GPU-x", True), ("own", False)])
def test_a_device_that_two_nodes_share_counts_once(devices: str | None, once: bool) -> None:
    """Two ranks on one GPU, as two nodes of one machine: both read the same counter."""
    joules = 300 * LENGTH
    named = [{} if devices is None else {"devices": [f"GPU-{node}" if devices == "own" else devices]} for node in "ab"]
    samples = [sample(joules, [rank], node, **named[rank]) for rank, node in enumerate("ab")]
    lines = journal()
    times = 1 if once else 2
    energy, _, summary = promises(lines, samples)
    assert energy.measured == pytest.approx(times * (300 + 160) * LENGTH * 1.5 / 3.6e6)
    assert kwh_of_bill(lines, samples)[0] == pytest.approx(energy.measured)
    assert f"{times * joules / 3.6e6:.3g} kWh measured" in summary.nodes


def test_nodes_of_different_starts_share_nothing() -> None:
    lines = [sample(360.0, [0], "a", devices=["GPU-x"]), {**sample(360.0, [0], "b", devices=["GPU-x"]), "attempt": 2}]
    assert (
        "0.0002 kWh measured"
        in nodes_seen([each for line in lines if isinstance(each := parse(line), NodeSample)]).text
    )


def test_the_rest_of_a_node_is_the_forecasts() -> None:
    entry = read_catalog()["h200"]
    cluster = {"device": {"rated_watts": entry.watts}, "watts_per_device": {"value": published_watts(entry).value}}
    assert rest_of_node_watts(cluster) == pytest.approx(power_model().host_share * (entry.watts or 0.0))
    assert rest_of_node_watts({"device": {"rated_watts": 700.0}, "watts_per_device": {"value": 300.0}}) == 0.0
    assert rest_of_node_watts({"device": {}, "watts_per_device": {"value": 300.0}}) == 0.0
    energy, _, _ = promises(journal(rated=None), [sample(2 * 300 * LENGTH, [0, 1])])
    assert energy.measured == pytest.approx(600 * LENGTH * 1.5 / 3.6e6) and not energy.is_estimate
