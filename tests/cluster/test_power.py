"""The power model: its fit, the figures it was fitted on, and systems that it was not fitted on."""

import math

import pytest

from paceline.backtest.price import watts_per_device
from paceline.cluster.catalog.power import PowerSample, fit_file, fit_power, power_model, samples_of

TDP = {"H100": 700.0, "B200": 1000.0}
# Medians over ten repeats of MLPerf Training 4.0 and 5.0 power logs, AC side: accelerator, system, benchmark, nodes,
# watts per device, seconds.
MEDIANS = (
    ("H100", "smc", "bert", 1, 859.25, 438.2),
    ("H100", "smc", "lora", 1, 901.35, 1798.8),
    ("H100", "smc x 8", "lora", 8, 762.15, 316.8),
    ("B200", "sr780a", "bert", 1, 1226.55, 209.5),
    ("B200", "sr780a", "lora", 1, 1201.5, 657.0),
)
# Watts per accelerator with its share of the node, measured in use, and the TDP or largest power of the chip alone:
# Patterson et al. 2021 (arXiv:2104.10350, table 4) for TPU v3 and V100; Latif et al. 2025 (IEEE Access 13) for a node
# of 8 x H100: 76 % of 10.2 kW in intensive training, 8.4 kW at most.
IN_USE = {
    "T5, TPU v3": (310, 262),
    "Meena, TPU v3": (289, 262),
    "GShard, TPU v3": (288, 262),
    "GPT-3, V100": (330, 300),
    "8 x H100, intensive": (0.76 * 10200 / 8, 700),
    "8 x H100, at most": (8400 / 8, 700),
}


def rows():
    names = ("accelerator", "system", "benchmark", "nodes_measured", "node_steady_w_per_device", "window_s")
    for median in MEDIANS:
        row = dict(zip(names, map(str, median), strict=True))
        yield {**row, "measurement_type": "AC"}
        yield {**row, "measurement_type": "DC", "node_steady_w_per_device": "1"}  # the other side of the power supplies


def test_the_model_in_use_is_the_fit_of_its_calibration_file():
    fitted, used = fit_power(samples_of(rows(), TDP)), power_model()
    assert fitted.samples == used.samples == len(MEDIANS)
    for name in ("host_share", "waiting_share"):
        assert getattr(used, name) == pytest.approx(getattr(fitted, name), abs=5e-4)
    assert used.ratio80 == pytest.approx(fitted.ratio80, abs=2e-3) and used.ratio95 > used.ratio80 > 1


def test_the_fit_finds_the_shares_that_made_the_samples():
    made = [
        PowerSample(kind, 0.3 + 0.4 + 0.6 * busy, busy) for kind, busy in (("a", 1.0), ("a", 0.5), ("b", 0.8), ("b", 1))
    ]
    fitted = fit_power(made)
    assert fitted.host_share == pytest.approx(0.3) and fitted.waiting_share == pytest.approx(0.4)
    assert fitted.ratio80 == pytest.approx(1.0) and fitted.over_tdp(0.25) == pytest.approx(0.85)


def test_intervals_are_those_of_student_by_the_number_of_accelerators():
    off = [("a", 1.1, 1.0), ("a", 0.9, 0.5), ("b", 1.2, 1.0), ("b", 0.8, 0.5)]
    two = fit_power([PowerSample(*row) for row in off])
    three = fit_power([PowerSample(*row) for row in (*off[:3], ("c", *off[3][1:]))])
    assert math.log(two.ratio80) / math.log(three.ratio80) == pytest.approx(3.078 / 1.886)
    assert math.log(two.ratio95) / math.log(three.ratio95) == pytest.approx(12.706 / 4.303)


@pytest.mark.parametrize(
    "samples",
    [
        [PowerSample("a", 1.2, 1.0), PowerSample("a", 1.0, 0.5)],
        [PowerSample("a", 1.2, 1.0), PowerSample("b", 1.1, 1.0)],
    ],
    ids=["one accelerator", "all busy"],
)
def test_too_little_to_fit_is_an_error(samples):
    with pytest.raises(ValueError, match="least that can be fitted"):
        fit_power(samples)


def test_a_benchmark_without_its_single_node_is_left_out():
    alone = [row for row in rows() if row["nodes_measured"] == "8"]
    assert samples_of(alone, TDP) == []


def test_the_file_says_what_it_was_fitted_on(tmp_path):
    lines = list(rows())
    path = tmp_path / "power.csv"
    path.write_text("\n".join([",".join(lines[0]), *(",".join(row.values()) for row in lines)]))
    text = fit_file(path, TDP)
    assert "power.csv" in text and 'sha256 = "' in text
    assert f"host_share = {power_model().host_share:.3f}" in text


@pytest.mark.parametrize("system", IN_USE)
def test_systems_in_use_lie_within_a_fifth_of_a_device_that_always_computes(system):
    watts, tdp = IN_USE[system]
    assert tdp * power_model().over_tdp(1.0) / watts == pytest.approx(1.0, abs=0.2)
    assert tdp * power_model().over_tdp(0.0) < watts  # and above one that always waits


def test_a_small_chip_on_a_large_host_is_missed():
    """PaLM-540B drew 378.5 W per TPU v4, hosts included (Chowdhery et al. 2022): the guide says by how much we miss."""
    assert 192 * power_model().over_tdp(1.0) / 378.5 == pytest.approx(1 - 0.37, abs=0.005)


def test_devices_of_several_nodes_are_priced_as_they_wait():
    # 8 nodes of H100 took 316.8 s where one took 1,798.8 s: busy for 71 % of the time, 762 W instead of 901 W.
    fitted, used = fit_power(samples_of(rows(), TDP)), power_model()
    assert used.several_nodes_busy == pytest.approx(fitted.several_nodes_busy, abs=5e-4)
    assert fitted.several_nodes_busy == pytest.approx(1798.8 / (8 * 316.8))
    one, several = (watts_per_device("h100-sxm", nodes) for nodes in (1, 8))
    assert several / 700 == pytest.approx(used.over_tdp(used.several_nodes_busy))
    assert one == pytest.approx(901.35, rel=0.06) and several == pytest.approx(762.15, rel=0.02)
