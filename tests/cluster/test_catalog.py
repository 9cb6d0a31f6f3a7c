"""The catalog against figures printed by the manufacturers, and against itself."""

import math

import pytest

from paceline.cluster.catalog import find_entry, match_driver_name, published_device, published_watts, read_catalog
from paceline.errors import ConfigError

# name: memory GB, bandwidth GB/s, dense bf16 or fp16 TFLOP/s, fp32 TFLOP/s, TDP W, as on the data sheets
PRINTED = {
    "v100-sxm2": (32, 900, 125, 15.7, 300),
    "a100-40": (40, 1555, 312, 19.5, 400),
    "a100-80": (80, 2039, 312, 19.5, 400),
    "h100-sxm": (80, 3350, 989.4, 67, 700),
    "h200": (141, 4800, 989.4, 67, 700),
    "b200": (180, 8000, 2250, 75, 1000),
    "l4": (24, 300, 121, 30.3, 72),
    "l40s": (48, 864, 362, 91.6, 350),
    "t4": (16, 320, 65, 8.1, 70),
    "rtx-4090": (24, 1008, 165.2, 82.6, 450),
    "mi300x": (192, 5300, 1307.4, 163.4, 750),
}


@pytest.mark.parametrize("name", PRINTED)
def test_figures_equal_the_data_sheets(name):
    entry = find_entry(name)
    memory, bandwidth, half, single, watts = PRINTED[name]
    assert entry.memory_bytes == memory * 1e9 and entry.memory_bytes_per_second == bandwidth * 1e9
    assert entry.peak_flops["fp16"] == half * 1e12 and entry.peak_flops["fp32"] == single * 1e12
    assert entry.watts == watts and entry.source
    assert entry.peak_flops.get("bf16", entry.peak_flops["fp16"]) == entry.peak_flops["fp16"]


def test_every_entry_is_tested_and_prices_say_where_they_are_from():
    assert set(read_catalog()) == set(PRINTED)
    for entry in read_catalog().values():
        assert (entry.price_usd_per_hour is None) == (entry.price_note == "")
        assert entry.price_usd_per_hour is None or "202" in entry.price_note  # a date
        assert entry.node_bytes_per_second > (entry.network_bytes_per_second or 0)


def test_devices_tag_their_figures():
    device = published_device(find_entry("h100-sxm"))
    assert device.matmul_flops["bf16"] == ((0, 989.4e12),) and device.matmul_source == "published"
    assert device.memory_bytes.source == "published" and device.launch_seconds.source == "assumed"
    assert published_watts(find_entry("h100-sxm")).value == pytest.approx(875)


def test_names_are_matched_exactly_or_not_at_all():
    assert match_driver_name("NVIDIA H100 80GB HBM3").name == "h100-sxm"
    assert match_driver_name("NVIDIA H100 PCIe") is None
    with pytest.raises(ConfigError, match="not in the catalog") as error:
        find_entry("h100")
    assert "h100-sxm" in error.value.try_
    assert all(math.isfinite(entry.watts) for entry in read_catalog().values())
