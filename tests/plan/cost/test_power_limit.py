"""What a device sustains of its peak, by its power: hand calculations, and the catalog's references."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.cluster.catalog.devices import find_entry, published_device, read_catalog
from paceline.plan.cost.constants import Constants, read_constants
from paceline.plan.cost.power_limit import LARGEST, REFERENCES, flops_per_watt, pooled, sustained_share
from paceline.plan.cost.rates import Rates

SHARES = Constants(share={"ampere": 0.8, "hopper": 0.6, "blackwell": 0.5, "other": 0.65})


@pytest.mark.parametrize(("family", "name"), [("ampere", "a100-80"), ("hopper", "h100-sxm"), ("blackwell", "b200")])
def test_the_devices_of_the_tables_have_the_share_of_their_generation(family: str, name: str) -> None:
    device = published_device(find_entry(name))
    assert flops_per_watt(device) == pytest.approx(REFERENCES[family], rel=1e-3)
    assert sustained_share(device, SHARES) == pytest.approx(SHARES.share[family], rel=1e-3)


def test_less_power_for_the_same_peak_is_a_lower_clock() -> None:
    card, module = (published_device(find_entry(name)) for name in ("h100-pcie", "h100-sxm"))
    densities = [flops_per_watt(device) for device in (module, card)]
    assert densities[0] and densities[1]
    expected = 0.6 * (densities[0] / densities[1]) ** (1 / 2)
    assert sustained_share(card, SHARES) == pytest.approx(expected) and expected < 0.50
    limited = published_device(find_entry("h100-hbm2e"))  # the same peak on 500 W of 700
    assert sustained_share(limited, SHARES) == pytest.approx(0.6 * (500 / 700) ** (1 / 2))
    rack = published_device(find_entry("gb300"))  # 2,500 TFLOP/s on 1,400 W against 2,250 on 1,000
    assert sustained_share(rack, SHARES) == pytest.approx(0.5 * (2.25 / (2500 / 1400)) ** (1 / 2))


def test_a_chip_of_no_generation_is_told_by_all_of_them_and_none_is_better_than_the_best_product() -> None:
    levels = [(0.8, 0.78), (0.6, 989.4 / 700), (0.5, 2.25)]
    product = 1.0
    for share, density in levels:
        product *= share * density ** (1 / 2)
    stated = published_device(find_entry("mi300x"))
    chip = dataclasses.replace(stated, sustained_share=None)
    assert sustained_share(chip, SHARES) == pytest.approx(product ** (1 / 3) / (1.3074 / 0.75) ** (1 / 2), rel=1e-3)
    for easy in ("h20", "rtx-4090", "v100-sxm3"):  # their peaks need little of their power
        assert sustained_share(published_device(find_entry(easy)), SHARES) == LARGEST
    unknown = dataclasses.replace(chip, rated_watts=None)
    assert sustained_share(unknown, SHARES) == 0.65
    assert sustained_share(dataclasses.replace(chip, sustained_share=0.3), SHARES) == 0.3, "what is stated stands"
    assert sustained_share(stated, SHARES) == 0.40 < sustained_share(published_device(find_entry("mi325x")), SHARES)
    assert Rates(chip, "bf16", SHARES).large_product_rate == sustained_share(chip, SHARES) * chip.peak_flops["bf16"]


def test_a_chip_sustains_no_more_than_its_own_best_product() -> None:
    """The power of a V100 would let it keep its clock; its best product is 83 of 125 TFLOP/s."""
    volta = published_device(find_entry("v100-sxm2"))
    assert sustained_share(volta, SHARES) == pytest.approx(83 / 125, rel=1e-3)
    assert sustained_share(dataclasses.replace(volta, best_product=None), SHARES) == LARGEST
    assert sustained_share(dataclasses.replace(volta, best_product=0.9), SHARES) > LARGEST, "better than an A100's"
    hopper = dataclasses.replace(published_device(find_entry("h100-sxm")), best_product=0.55)
    assert sustained_share(hopper, SHARES) == 0.55 < SHARES.share["hopper"]


def test_a_generation_of_one_source_goes_halfway_and_one_of_none_all_the_way() -> None:
    drawn = pooled(SHARES.share, {"ampere": 3, "hopper": 1})
    law = {name: drawn[name] * REFERENCES[name] ** (1 / 2) for name in REFERENCES}
    before = {name: SHARES.share[name] * REFERENCES[name] ** (1 / 2) for name in REFERENCES}
    common = (before["ampere"] ** 0.75 * before["hopper"] ** 0.5) ** (1 / 1.25)
    assert law["blackwell"] == pytest.approx(common), "nobody measured one: the others' law alone"
    assert law["hopper"] == pytest.approx((before["hopper"] * common) ** 0.5)
    assert law["ampere"] == pytest.approx(before["ampere"] ** 0.75 * common**0.25)
    assert drawn["other"] == SHARES.share["other"]
    assert pooled(SHARES.share, {}) == SHARES.share, "without any source there is no law"


def test_every_published_device_sustains_a_part_of_its_peak() -> None:
    for entry in read_catalog().values():
        assert 0.3 < sustained_share(published_device(entry), read_constants()) <= 0.9, entry.name
