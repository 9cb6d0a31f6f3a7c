"""Sensors of a node: what they read is right, and what they cannot read is absent with its reason, never zero."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_nvml import FakeGpu, FakeNvml, NVMLError

from paceline.run.observe.sensors.gpu import AGAIN_SECONDS, NOT_INSTALLED, GpuSensor
from paceline.run.observe.sensors.processes import HostSensor, ProcessSensor
from paceline.run.observe.sensors.rapl import RaplSensor
from paceline.run.observe.sensors.sensor_reading import NodeSensor, RisingCounter, SeenRank, SensorReading

RANKS = [SeenRank(0, 11, "GPU-a"), SeenRank(1, 12, "GPU-b")]


def read(sensor: NodeSensor, seconds: float = 10.0) -> SensorReading:
    reading = SensorReading()
    sensor.read(reading, seconds)
    return reading


# ---- counters --------------------------------------------------------------------------------------------------------


def test_a_counter_counts_from_its_first_reading() -> None:
    counter = RisingCounter()
    assert [counter.added(now) for now in (100, 150, 150)] == [None, 50, 0]


def test_a_counter_wraps_where_that_is_known_and_plausible() -> None:
    counter = RisingCounter(limit=1000)
    assert counter.added(900) is None
    assert counter.added(100) == 200
    assert counter.added(50, most=500) is None  # 950 more would be too many: it has begun anew
    assert counter.added(80, most=500) == 30


def test_a_counter_that_begins_anew_says_nothing_of_that_time() -> None:
    counter = RisingCounter()
    counter.added(900)
    assert counter.added(5) is None
    assert counter.added(9) == 4


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def test_a_gpu_that_ranks_share_takes_its_energy_once() -> None:
    nvml = FakeNvml({"GPU-a": FakeGpu()})
    sensor = GpuSensor([SeenRank(0, 11, "GPU-a"), SeenRank(1, 12, "GPU-a")], nvml)
    read(sensor)
    nvml.devices["GPU-a"].millijoules += 5000
    found = read(sensor)
    assert found.host["device_joules"] == 5.0 and {own["joules"] for own in found.ranks.values()} == {5.0}


def test_a_healthy_gpu_is_read_whole() -> None:
    nvml = FakeNvml({"GPU-a": FakeGpu(), "GPU-b": FakeGpu(celsius=90, reasons=0x40 | 0x4)})
    sensor = GpuSensor(RANKS, nvml)
    read(sensor, 0.0)
    nvml.devices["GPU-a"].millijoules += 3_000_000
    nvml.devices["GPU-b"].millijoules += 2_000_000
    found = read(sensor)
    assert found.ranks[0] == {
        "celsius": 60, "watts": 300, "utilisation": 0.9, "memory_bytes": 40 << 30, "memory_share": 0.5,
        "clock_hz": 1.5e9, "clock_share": 0.75, "throttled": 0, "power_capped": 0, "joules": pytest.approx(3000),
    }  # fmt: skip
    assert found.ranks[1]["throttled"] == 1 and found.ranks[1]["power_capped"] == 1
    assert found.host == {"device_joules": pytest.approx(5000)} and found.absent == {}
    sensor.close()
    assert nvml.opened == 0


def test_the_energy_counter_of_a_gpu_wraps() -> None:
    nvml = FakeNvml({"GPU-a": FakeGpu(millijoules=2**64 - 1000)})
    sensor = GpuSensor(RANKS[:1], nvml)
    read(sensor, 0.0)
    nvml.devices["GPU-a"].millijoules = 2_000_000
    assert read(sensor).ranks[0]["joules"] == pytest.approx(2001, rel=1e-2)


def test_a_driver_loaded_anew_begins_its_energy_anew_and_that_is_no_wrap() -> None:
    nvml = FakeNvml({"GPU-a": FakeGpu(millijoules=10**9)})
    sensor = GpuSensor(RANKS[:1], nvml)
    read(sensor, 0.0)
    nvml.devices["GPU-a"].millijoules = 5
    found = read(sensor)
    assert "joules" not in found.ranks[0] and "device_joules" not in found.host
    nvml.devices["GPU-a"].millijoules = 1_000_005
    assert read(sensor).host["device_joules"] == pytest.approx(1000)


def test_what_may_not_be_read_is_absent_and_the_rest_is_there() -> None:
    denied = NVMLError(FakeNvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions")
    refused = {"nvmlDeviceGetPowerUsage": denied, "nvmlDeviceGetTotalEnergyConsumption": denied}
    found = read(GpuSensor(RANKS[:1], FakeNvml({"GPU-a": FakeGpu(refuses=refused)})))
    assert "watts" not in found.ranks[0] and "joules" not in found.ranks[0] and found.ranks[0]["celsius"] == 60
    assert found.absent["watts"] == "rank 0's GPU: Insufficient Permissions" and "joules" in found.absent
    assert "device_joules" not in found.host


def test_a_missing_gpu_leaves_the_others_and_is_looked_for_again() -> None:
    nvml = FakeNvml({"GPU-a": FakeGpu()})
    sensor = GpuSensor(RANKS, nvml)
    found = read(sensor)
    assert found.absent["gpu of rank 1"] == "Not Found" and set(found.ranks) == {0}
    assert "device_joules" not in found.host  # the sum of all would be too small
    nvml.devices["GPU-b"] = FakeGpu(celsius=70)
    assert read(sensor).absent["gpu of rank 1"] == "Not Found"  # not asked yet
    assert read(sensor, AGAIN_SECONDS).ranks[1]["celsius"] == 70


def test_a_gpu_that_falls_off_the_bus_is_told() -> None:
    lost = NVMLError(FakeNvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost")
    nvml = FakeNvml({"GPU-a": FakeGpu(), "GPU-b": FakeGpu()})
    sensor = GpuSensor(RANKS, nvml)
    read(sensor, 0.0)
    nvml.devices["GPU-b"].refuses = {"nvmlDeviceGetTemperature": lost}
    found = read(sensor)
    assert found.absent["gpu of rank 1"] == "GPU is lost" and set(found.ranks) == {0}


def test_a_driver_that_goes_and_comes_back() -> None:
    nvml = FakeNvml({"GPU-a": FakeGpu(), "GPU-b": FakeGpu()})
    sensor = GpuSensor(RANKS, nvml)
    read(sensor, 0.0)
    nvml.driver = False
    first, second = read(sensor), read(sensor)
    assert first.ranks == {} and "Driver Not Loaded" in str(first.absent)
    assert second.ranks == {} and second.absent == {"gpu": "Driver Not Loaded"}
    nvml.driver = True
    assert read(sensor, AGAIN_SECONDS).ranks[1]["celsius"] == 60


def test_no_driver_at_all_is_told_and_asked_for_now_and_then() -> None:
    nvml = FakeNvml({"GPU-a": FakeGpu()})
    nvml.driver = False
    sensor = GpuSensor(RANKS[:1], nvml)
    assert "does not answer: Driver Not Loaded" in read(sensor).absent["gpu"]
    nvml.driver = True
    assert "gpu" in read(sensor).absent
    assert read(sensor, AGAIN_SECONDS).ranks[0]["watts"] == 300


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert read(GpuSensor(RANKS)).absent == {"gpu": NOT_INSTALLED}


# ---- processors ------------------------------------------------------------------------------------------------------


def rapl(folder: Path, joules: dict[str, tuple[str, float]], limit: float = 1e6) -> Path:
    for name, (kind, value) in joules.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "name").write_text(kind)
        (folder / name / "energy_uj").write_text(str(int(value * 1e6)))
        (folder / name / "max_energy_range_uj").write_text(str(int(limit * 1e6)))
    return folder


def test_energy_of_packages_and_their_memory_with_a_wrap(tmp_path: Path) -> None:
    before = {"intel-rapl:0": ("package-0", 999_900.0), "intel-rapl:0:0": ("core", 5.0),
              "intel-rapl:0:1": ("dram", 10.0), "intel-rapl:1": ("psys", 7.0)}  # fmt: skip
    sensor = RaplSensor(rapl(tmp_path, before))
    assert "cpu_joules" not in read(sensor, 0.0).host
    rapl(tmp_path, before | {"intel-rapl:0": ("package-0", 400.0), "intel-rapl:0:1": ("dram", 40.0)})
    assert read(sensor).host["cpu_joules"] == pytest.approx(500 + 30)


def test_energy_that_only_root_may_read_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sensor = RaplSensor(rapl(tmp_path, {"intel-rapl:0": ("package-0", 1.0)}))
    before = Path.read_text

    def denied(self: Path, *more: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return before(self)

    monkeypatch.setattr(Path, "read_text", denied)
    found = read(sensor)
    assert found.host == {} and found.absent["cpu_joules"].startswith("permission denied (")


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    found = read(RaplSensor(tmp_path))
    assert found.host == {} and "no energy counter" in found.absent["cpu_joules"]
    bare = read(HostSensor(tmp_path, tmp_path))
    assert bare.host == {}
    assert {"cpu_share", "memory_available_bytes", "received_bytes_per_second", "celsius"} <= set(bare.absent)


def host(folder: Path, busy: int, received: int, sectors: int) -> HostSensor:
    (folder / "net").mkdir(exist_ok=True)
    (folder / "block" / "sda").mkdir(parents=True, exist_ok=True)
    (folder / "class" / "thermal" / "thermal_zone0").mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {1000 - busy} 0 0 0 0 0 0\ncpu0 1 2 3\n")
    (folder / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 400 kB\n")
    lines = [f"  lo: {10**9} 0 0 0 0 0 0 0 {10**9} 0", f"eth0:{received} 0 0 0 0 0 0 0 {2 * received} 0"]
    (folder / "net" / "dev").write_text("\n".join(["head", "head", *lines]))
    (folder / "diskstats").write_text(f"8 0 sda 1 0 {sectors} 0 1 0 {sectors} 0\n8 1 sda1 1 0 {sectors} 0 1 0 9 0\n")
    (folder / "class" / "thermal" / "thermal_zone0" / "temp").write_text("71000")
    return HostSensor(folder, folder)


def test_the_node_is_read_from_the_kernel(tmp_path: Path) -> None:
    sensor = host(tmp_path, busy=100, received=0, sectors=0)
    read(sensor, 0.0)
    (tmp_path / "stat").write_text("cpu  400 0 0 1600 0 0 0 0 0 0\n")
    host(tmp_path, 100, received=5000, sectors=20)
    (tmp_path / "stat").write_text("cpu  400 0 0 1600 0 0 0 0 0 0\n")
    assert read(sensor).host == {
        "cpu_share": 0.3, "memory_available_bytes": 400 << 10, "memory_bytes": 1000 << 10,
        "received_bytes_per_second": 500, "sent_bytes_per_second": 1000, "read_bytes_per_second": 1024,
        "written_bytes_per_second": 1024, "celsius": 71,
    }  # fmt: skip


def test_a_process_is_read_and_one_that_has_gone_is_told() -> None:
    sensor = ProcessSensor([SeenRank(0, os.getpid()), SeenRank(1, 2**22 + 1)])
    read(sensor, 0.0)
    found = read(sensor)
    assert found.ranks[0]["resident_bytes"] > 1 << 20 and found.ranks[0]["cpu_cores"] >= 0
    assert "no such" in found.absent["rank 1"] and 1 not in found.ranks
