"""The catalog against figures printed by the manufacturers, against itself, and with a file of the user's own."""

import math
import re
import runpy
from pathlib import Path

import pytest

from paceline.cluster.catalog import file
from paceline.cluster.catalog.devices import (
    find_entry,
    find_node,
    match_driver_name,
    published_device,
    published_links,
    published_price,
    published_watts,
    read_catalog,
)
from paceline.cluster.catalog.file import PRECISIONS, load_catalog
from paceline.cluster.catalog.power import power_model
from paceline.cluster.override import with_tf32
from paceline.cluster.resolve import resolve_cluster
from paceline.config.document import read_document
from paceline.errors import ConfigError
from paceline.plan.cost.intervals import TIME_ERROR
from paceline.plan.cost.rates import Rates
from paceline.plan.cost.unknown import PEAK, time_widths
from paceline.spec.cluster import ClusterSpec

# name: memory GB, bandwidth GB/s, dense bf16 (fp16 where there is none) and fp32 TFLOP/s, watts, as on the data sheets
PRINTED = {
    "v100-sxm2": (32, 900, 125, 15.7, 300),
    "v100-sxm2-16": (16, 900, 125, 15.7, 300),
    "v100-sxm3": (32, 981, 125, 15.7, 350),
    "t4": (16, 320, 65, 8.1, 70),
    "a100-40": (40, 1555, 312, 19.5, 400),
    "a100-80": (80, 2039, 312, 19.5, 400),
    "a100-pcie-40": (40, 1555, 312, 19.5, 250),
    "a100-pcie": (80, 1935, 312, 19.5, 300),
    "a800": (80, 2039, 312, 19.5, 400),
    "h100-sxm": (80, 3350, 989.4, 67, 700),
    "h100-hbm2e": (96, 2400, 989.4, 67, 500),
    "h100-pcie": (80, 2000, 756, 51.2, 350),
    "h100-nvl": (94, 3900, 835.5, 60, 400),
    "h800": (80, 3350, 989.4, 67, 700),
    "h20": (96, 4000, 148, 44, 400),
    "gh200": (96, 4000, 989.4, 67, 700),
    "h200": (141, 4800, 989.4, 67, 700),
    "b200": (180, 8000, 2250, 75, 1000),
    "gb200": (186, 8000, 2500, 80, 1200),
    "b300": (270, 8000, 2250, 75, 1100),
    "gb300": (277, 8000, 2500, 83, 1400),
    "l4": (24, 300, 121, 30.3, 72),
    "l40": (48, 864, 181.05, 90.5, 300),
    "l40s": (48, 864, 362, 91.6, 350),
    "a10": (24, 600, 125, 31.2, 150),
    "a40": (48, 696, 149.7, 37.4, 300),
    "rtx-a6000": (48, 768, 154.8, 38.7, 300),
    "rtx-3090": (24, 936, 71, 35.6, 350),
    "rtx-4090": (24, 1008, 165.2, 82.6, 450),
    "mi250": (64, 1638.4, 181, 45.3, 280),
    "mi250x": (64, 1638.4, 191.5, 47.9, 280),
    "mi300x": (192, 5300, 1307.4, 163.4, 750),
    "mi300a": (128, 5300, 980.6, 122.6, 550),
    "mi325x": (256, 6000, 1307.4, 163.4, 1000),
    "mi350x": (288, 8000, 2306.9, 144.2, 1000),
    "mi355x": (288, 8000, 2516.6, 157.3, 1400),
    "gaudi2": (96, 2460, 432, None, 600),
    "gaudi3": (128, 3700, 1835, None, 900),
    "tpu-v3": (34.36, 900, 123, None, 262),
    "tpu-v4": (34.36, 1200, 275, None, 192),
    "tpu-v5e": (16, 819, 197, None, None),
    "tpu-v5p": (96, 2765, 459, None, None),  # the sheet prints 95; XLA finds 95.74 GiB free beside what it reserves
    "tpu-v6e": (32, 1638, 918, None, None),
    "rtx-5090": (32, 1792, 209.5, 104.8, 575),
    "rtx-6000-ada": (48, 960, 364.2, 91.1, 300),
    "rtx-pro-6000": (96, 1792, 503.8, 125, 600),
    "a10g": (24, 600, 70, 35, 300),
    "max-1550": (64, 1638.4, 419.5, 26, 300),
    "trn1": (32, 880, 190, 47.5, None),
    "trn2": (96, 2900, 667, 181, None),
    "tpu-v7x": (192, 7380, 2307, None, None),
}
# What the rates follow from, as the manufacturers' architecture papers have it: multiprocessors or compute units, dense
# bf16 (fp16) operations of one in a clock, GHz of the boost clock; bits of the memory bus, Gbit/s of one of its pins.
ARCHITECTURE = {
    "v100-sxm2": (80, 1024, 1.53, 4096, 1.758),
    "t4": (40, 1024, 1.59, 256, 10),
    "a100-40": (108, 2048, 1.41, 5120, 2.43),
    "a100-80": (108, 2048, 1.41, 5120, 3.186),
    "h100-sxm": (132, 4096, 1.83, 5120, 5.234),
    "l4": (58, 1024, 2.04, 192, 12.5),
    "l40s": (142, 1024, 2.52, 384, 18),
    "a10": (72, 1024, 1.695, 384, 12.5),
    "a40": (84, 1024, 1.74, 384, 14.5),
    "rtx-a6000": (84, 1024, 1.8, 384, 16),
    "rtx-3090": (82, 512, 1.695, 384, 19.5),
    "rtx-4090": (128, 512, 2.52, 384, 21),
    "mi250": (104, 1024, 1.7, 4096, 3.2),
    "mi250x": (110, 1024, 1.7, 4096, 3.2),
    "mi300x": (304, 2048, 2.1, 8192, 5.2),
    "rtx-5090": (170, 512, 2.407, 512, 28),
    "rtx-6000-ada": (142, 1024, 2.505, 384, 20),
    "rtx-pro-6000": (188, 1024, 2.617, 512, 28),
    "a10g": (80, 512, 1.71, 384, 12.5),
}
# GiB that PyTorch's out-of-memory messages state as the device's total capacity, in public issues.
REPORTED = {"a100-80": 79.14, "a100-40": 39.50, "t4": 14.75, "rtx-4090": 23.65, "v100-sxm2": 31.74, "l4": 22.03,
            "v100-sxm2-16": 15.78, "h200": 139.80, "rtx-3090": 23.70, "rtx-5090": 31.37}  # fmt: skip
# GB/s in one direction: fabric per device, and a device's share of the adapters (None: no standard network)
LINKS = {
    "dgx-1v": (150, 6.25),
    "dgx-a100": (300, 25),
    "p4d": (300, 6.25),
    "hgx-a800": (200, None),
    "dgx-h100": (450, 50),
    "p5": (450, 50),
    "a3-highgpu": (450, 12.5),
    "a3-megagpu": (450, 25),
    "hgx-h800": (200, 50),
    "p5en": (450, 50),
    "gb200-nvl72": (900, 50),
    "cray-ex235a": (50, 12.5),
    "quad-gh200": (450, 25),
    "gb300-nvl72": (900, 100),
    "hls-gaudi2": (262.5, 37.5),
    "hlb-gaudi3": (525, 75),
    "tpu-v5e-pod": (200, 3.125),
    "tpu-v6e-pod": (400, 12.5),
    "tpu-v7x-pod": (600, 12.5),
    "trn1-32xlarge": (192, 6.25),
    "trn2-48xlarge": (512, 25),
}
OWN = """
[nodes.lab]
title = "the lab's nodes"
devices = 4
fabric = "PCIe 5"
fabric_bytes_per_second = 60e9
adapters = 2
adapter_bytes_per_second = 25e9
source = "measured in the lab"

[accelerators.x1]
title = "X1"
memory_bytes = 48e9
memory_bytes_per_second = 2e12
peak_flops = { bf16 = 500e12 }
watts = 400
nodes = ["lab"]
source = "a data sheet"

[[prices]]
accelerator = "x1"
class = "hyperscaler"
usd_per_device_hour = 2.5
what = "a contract"
date = "2026-01-31"
source = "the contract"
"""


@pytest.mark.parametrize(
    ("groups", "told"), [("{ 8 = 25e9 }", "of '8' devices"), ("{ pair = 25e9 }", "of 'pair'"), ("{ 2 = 0 }", "= 0")]
)
def test_a_mesh_has_rates_of_groups_that_a_node_can_form(tmp_path, groups, told):
    path = tmp_path / "own.toml"
    path.write_text(OWN.replace('fabric = "PCIe 5"', f'fabric = "PCIe 5"\nfabric_groups = {groups}'))
    with pytest.raises(ConfigError, match=told):
        load_catalog(str(path))


@pytest.mark.parametrize("name", PRINTED)
def test_figures_equal_the_data_sheets(name):
    entry = find_entry(name)
    memory, bandwidth, half, single, watts = PRINTED[name]
    # Sheets print GB; drivers report up to as many GiB, less what error correction takes.
    assert memory * 0.98e9 <= entry.memory_bytes <= memory * 2**30 and entry.memory_bytes_per_second == bandwidth * 1e9
    if name in REPORTED:
        assert entry.memory_bytes == pytest.approx(REPORTED[name] * 2**30, rel=0.002)
    assert entry.peak_flops.get("bf16", entry.peak_flops.get("fp16")) == half * 1e12
    assert entry.peak_flops.get("fp32") == (single and single * 1e12)
    assert entry.watts == watts and entry.source


@pytest.mark.parametrize("name", ARCHITECTURE)
def test_rates_follow_from_the_architecture(name):
    entry = find_entry(name)
    units, operations, clock, bits, pin = ARCHITECTURE[name]
    assert entry.peak_flops.get("bf16", entry.peak_flops.get("fp16")) == pytest.approx(
        units * operations * clock * 1e9, rel=0.015
    )
    assert entry.memory_bytes_per_second == pytest.approx(bits * pin / 8 * 1e9, rel=0.01)


def test_every_entry_is_tested_and_peaks_are_dense():
    assert set(read_catalog()) == set(PRINTED)
    for entry in read_catalog().values():
        peaks = entry.peak_flops
        assert list(peaks) == [precision for precision in PRECISIONS if precision in peaks]
        if {"bf16", "fp16"} <= set(peaks):
            assert peaks["bf16"] == peaks["fp16"]
        if (
            "fp8" in peaks and entry.name != "gaudi3"
        ):  # its fp8 is no faster; sparse rates are twice as high: mixing the two would show here
            assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)
        if "tf32" in peaks and entry.name != "l4":
            assert peaks["bf16"] / peaks["tf32"] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("name", LINKS)
def test_fabrics_are_per_device_and_in_one_direction(name):
    node = load_catalog().nodes[name]
    fabric, network = LINKS[name]
    assert node.fabric_bytes_per_second == fabric * 1e9
    assert node.network_bytes_per_second == (network and network * 1e9)


# What a source says of figures that nobody read a document for, in the catalog's own words.
UNREAD = re.compile(r"from memory|not read|unread|assumed|guess")


def test_what_no_document_was_read_for_is_assumed():
    catalog = load_catalog()
    for entry in (*catalog.accelerators.values(), *catalog.nodes.values()):
        assert bool(UNREAD.search(entry.source)) <= bool(entry.assumed), entry.name
    for entry in catalog.accelerators.values():
        assert (entry.sustained_share is None) == ("sustained_share" not in entry.assumed), entry.name
        for name in entry.assumed:
            assert name.startswith("peak_flops.") or getattr(entry, name) is not None, (entry.name, name)
    assert not any(UNREAD.search(price.source) for price in catalog.prices)


def test_assumed_figures_are_tagged_so_wherever_they_stand():
    card, part, chip = (published_device(find_entry(name)) for name in ("rtx-5090", "h100-sxm", "tpu-v4"))
    assert {name: card.rate_source(name) for name in ("fp32", "bf16", "fp4", "fp64")} == {
        "fp32": "published", "bf16": "assumed", "fp4": "published", "fp64": "unknown"}  # fmt: skip
    assert (part.rate_source("bf16"), part.memory_bytes.source) == ("published", "assumed")
    assert chip.rate_source("bf16") == "assumed" and chip.memory_bytes.source == "published"
    assert (
        "assumed)" in published_watts(find_entry("a10g")).note
        and "published)" in published_watts(find_entry("a10")).note
    )
    near, far = published_links(find_entry("trn2"))
    assert near.bytes_per_second.source == far.bytes_per_second.source == "assumed"
    assert published_links(find_entry("max-1550"))[0].bytes_per_second.source == "assumed"


def test_stated_rates_are_not_assumed_and_tf32_takes_its_own_with_it():
    cluster, _ = resolve_cluster(ClusterSpec("rtx-5090", figures={"peak_flops": {"bf16": 209.5e12}}))
    assert cluster.device.rate_source("bf16") == "published" and cluster.device.rate_source("fp8") == "assumed"
    assert with_tf32(cluster).device.rate_source("fp32") == "assumed"
    share, _ = resolve_cluster(ClusterSpec("tpu-v4", figures={"sustained_share": 0.8}))
    assert share.device.rate_source("bf16") == "published"


def test_an_assumed_peak_prices_as_a_published_one_and_is_less_sure(tmp_path):
    found = {}
    for name, added in (("read", ""), ("unread", 'assumed = ["peak_flops", "memory_bytes_per_second"]\n')):
        path = tmp_path / f"{name}.toml"
        path.write_text(OWN.replace("watts = 400\n", f"watts = 400\n{added}"))
        device = resolve_cluster(ClusterSpec("x1", 4, catalog=str(path)))[0].device
        rates = Rates(device, "bf16")
        widths = time_widths(rates.constants, device.name, "bf16", "Paceline", 4, device.assumed_rates)
        found[name] = rates, widths
    (read, sure), (unread, unsure) = found["read"], found["unread"]
    assert (read.large_product_rate, read.memory_rate) == (unread.large_product_rate, unread.memory_rate)
    assert (read.product_source, unread.product_source) == ("published", "assumed")
    assert unsure.narrow == pytest.approx(math.hypot(sure.narrow, PEAK)) and "read nowhere" in unsure.because
    beyond = math.log(1 + TIME_ERROR["assumed"]) ** 2 - math.log(1 + TIME_ERROR["published"]) ** 2
    assert abs(math.sqrt(beyond) - PEAK) < 0.005


def test_every_node_type_is_used_and_says_where_it_is_from():
    catalog = load_catalog()
    assert {name for entry in catalog.accelerators.values() for name in entry.nodes} == set(catalog.nodes)
    for node in catalog.nodes.values():
        assert node.source and node.fabric_bytes_per_second > (node.network_bytes_per_second or 0)


def test_prices_have_dates_and_an_accelerator():
    catalog = load_catalog()
    for price in catalog.prices:
        assert price.accelerator in catalog.accelerators and price.source and price.what
        assert price.date[:4] >= "2025" and 0.05 < price.usd_per_device_hour < 50


def test_devices_tag_their_figures():
    device = published_device(find_entry("h200"))
    assert device.matmul_flops["bf16"] == ((0, 989.4e12),) and device.matmul_source == "published"
    assert device.memory_bytes.source == "published" and device.launch_seconds.source == "assumed"


def test_power_is_the_tdp_times_the_fitted_ratio_and_unknown_without_one():
    busy, waiting = published_watts(find_entry("h100-sxm")), published_watts(find_entry("h100-sxm"), busy=0.0)
    assert busy.value == pytest.approx(700 * power_model().over_tdp(1.0)) and 800 < busy.value < 950
    assert 0.4 < waiting.value / busy.value < 0.8 and "700 W" in busy.note
    assert math.isnan(published_watts(find_entry("tpu-v5p")).value)


def test_names_are_matched_exactly_or_not_at_all():
    assert match_driver_name("NVIDIA H100 80GB HBM3").name == "h100-sxm"
    assert match_driver_name("NVIDIA H100 PCIe").name == "h100-pcie"
    assert match_driver_name("NVIDIA H100") is None
    with pytest.raises(ConfigError, match="not in the catalog") as error:
        find_entry("h100")
    assert "h100-sxm" in error.value.try_


def test_node_types_change_the_links():
    entry = find_entry("h100-sxm")
    assert published_links(entry)[1].bytes_per_second.value == 50e9
    assert published_links(entry, find_node(entry, "a3-highgpu"))[1].bytes_per_second.value == 12.5e9
    with pytest.raises(ConfigError, match="node = 'p4d'") as error:
        find_node(entry, "p4d")
    assert "comes in dgx-h100" in error.value.because
    lonely = published_links(find_entry("rtx-4090"))[1].bytes_per_second
    assert lonely.source == "assumed" and lonely.value == 12.5e9 / 4


def test_prices_by_class_and_spot():
    entry = find_entry("h100-sxm")
    by_class = {name: published_price(entry, name).value for name in ("cheapest", "hyperscaler", "specialised")}
    assert by_class["cheapest"] == by_class["specialised"] < by_class["hyperscaler"] == 6.88
    assert published_price(entry, "hyperscaler", spot=True).value < by_class["hyperscaler"]
    missing = published_price(find_entry("h200"), "hyperscaler")
    assert math.isnan(missing.value) and "price_usd_per_device_hour" in missing.note and "specialised" in missing.note
    assert math.isnan(published_price(find_entry("mi300x")).value)


def test_a_file_of_ones_own_adds_and_replaces(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN + OWN.split("[[prices]]")[0].replace("lab]", "lab2]").replace('"lab"', '"lab2"').replace(
        "[accelerators.x1]", "[accelerators.h200]"))  # fmt: skip
    spec = ClusterSpec("x1", 8, catalog=str(path))
    cluster, remarks = resolve_cluster(spec)
    assert cluster.device.peak_flops == {"bf16": 500e12} and cluster.devices_per_node == 4
    assert [link.bytes_per_second.value for link in cluster.links] == [60e9, 12.5e9]
    assert cluster.price_usd_per_device_hour.value == 2.5 and "a contract" in cluster.price_usd_per_device_hour.note
    assert "X1 in the lab's nodes" in remarks[0]
    own = load_catalog(str(path))
    assert find_entry("h200", own).memory_bytes == 48e9 and find_entry("h200").memory_bytes == 150.1e9
    assert math.isclose(
        resolve_cluster(ClusterSpec("h200", catalog=str(path)))[0].price_usd_per_device_hour.value, 3.99
    )


def test_a_file_of_ones_own_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    reads = []
    monkeypatch.setattr(file, "read_document", lambda name: (reads.append(name), read_document(name))[1])
    resolve_cluster(ClusterSpec("x1", 8, node="lab", spot=True, catalog=str(path)))
    assert reads == [str(path)]


WRONG = {
    "an unknown table": (OWN + "\n[machines.a]\n", "unknown key 'machines'"),
    "an unknown option": (OWN.replace("watts = 400", "wats = 400"), "own.toml:16: unknown key 'wats'"),
    "a missing option": (OWN.replace('fabric = "PCIe 5"\n', ""), "own.toml:2: nodes.lab lacks fabric"),
    "a wrong type": (OWN.replace("devices = 4", 'devices = "4"'), "own.toml:4: devices"),
    "out of range": (OWN.replace("memory_bytes = 48e9", "memory_bytes = 0"), "out of range"),
    "an unknown precision": (OWN.replace("bf16", "bf61"), "bf61 is not a precision"),
    "a negative rate": (OWN.replace("500e12", "-1"), "peak_flops.bf16 = -1"),
    "an assumed figure that is none": (OWN.replace("watts = 400", 'assumed = ["wats"]'), "own.toml:16: assumed names"),
    "an assumed rate that is none": (OWN.replace("watts = 400", 'assumed = ["peak_flops.fp8"]'), "peak_flops.fp8"),
    "an unknown node type": (OWN.replace('nodes = ["lab"]', 'nodes = ["lap"]'), "no node type 'lap'"),
    "no node type": (OWN.replace('nodes = ["lab"]', "nodes = []"), "no node type ''"),
    "a price of nothing": (OWN.replace('accelerator = "x1"', 'accelerator = "x2"'), "prices\\[1\\] is of 'x2'"),
    "a price without a date": (OWN.replace("2026-01-31", "soon"), "the date 'soon'"),
    "a price class": (OWN.replace('"hyperscaler"', '"friend"'), "not a choice"),
    "no table": ("accelerators = 3", "accelerators is not a table"),
    "no list": ("[prices]", "prices is not a list"),
    "an internal name": (OWN.replace("watts = 400", 'name = "a"'), "unknown key 'name'"),
    "no TOML": ("[", "cannot be read as TOML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_file_is_told_by_its_place(case, tmp_path):
    text, message = WRONG[case]
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_catalog(str(tmp_path / "own.toml"))


def test_single_figures_are_overridden():
    figures = {
        "network_bytes_per_second": 25e9,
        "node_latency_seconds": 1e-6,
        "peak_flops": {"bf16": 900e12},
        "sustained_share": 0.5,
        "waiting_watts": 300,
        "memory_bytes_per_second": 3e12,
    }
    cluster, _ = resolve_cluster(ClusterSpec("h100-sxm", 16, figures=figures))
    assert cluster.links[1].bytes_per_second.value == 25e9 and cluster.links[0].latency_seconds.value == 1e-6
    assert cluster.device.matmul_flops["bf16"] == ((0, 900e12),) and cluster.device.peak_flops["fp8"] == 1978.9e12
    assert cluster.device.sustained_share == 0.5 and cluster.waiting_watts_per_device.value == 300
    assert cluster.device.memory_bytes_per_second.note == "from the spec"
    alone, _ = resolve_cluster(ClusterSpec("cpu", 2, figures={"network_bytes_per_second": 1e9}))
    assert [link.level for link in alone.links] == ["process", "network"]


@pytest.mark.parametrize(
    ("figures", "message"),
    [({"network": 1e9}, "is no figure"), ({"launch_seconds": -1}, "launch_seconds = -1"),
     ({"peak_flops": 1e12}, "peak_flops = "), ({"peak_flops": {"bf61": 1e12}}, "bf61"),
     ({"launch_seconds": True}, "launch_seconds = true"), ({"sustained_share": 55}, "1 at most")],
)  # fmt: skip
def test_figures_that_cannot_be_are_refused(figures, message):
    with pytest.raises(ConfigError, match=message):
        resolve_cluster(ClusterSpec("h100-sxm", figures=figures))


def test_the_page_of_the_catalog_says_what_the_catalog_says():
    docs = Path(__file__).parents[2] / "docs"
    written = runpy.run_path(str(docs / "scripts" / "write_catalog.py"))["catalog_page"]()
    on_disk = (docs / "reference" / "catalog.md").read_text(encoding="utf-8")
    assert on_disk == written, "run: python docs/scripts/write_catalog.py"


@pytest.mark.parametrize(("name", "like", "share"), [("mi350x", "mi355x", 2.2 / 2.4), ("mi300a", "mi300x", 228 / 304)])
def test_what_is_worked_out_from_a_sister_chip_is_called_assumed(name, like, share):
    """By the clock, and by the number of compute units: no document was read for these rates."""
    own, sister = (find_entry(each, load_catalog("")) for each in (name, like))
    for precision, rate in own.peak_flops.items():
        assert rate == pytest.approx(share * sister.peak_flops[precision], rel=1e-3)
        assert f"peak_flops.{precision}" in own.assumed
    assert resolve_cluster(ClusterSpec(device=name, devices=8))[0].device.rate_source("bf16") == "assumed"
