"""Resolving a `[cluster]` table: this machine, GPUs, probes, the catalog, and what the spec overrides."""

import dataclasses
import datetime
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster import machine, resolve
from paceline.cluster.machine import Gpu, Machine
from paceline.cluster.plain import cluster_from_dict
from paceline.cluster.probe.probe import probe_machine
from paceline.cluster.resolve import resolve_cluster
from paceline.cluster.store import SCHEMAS, cache_dir, probe_command, probe_path, read_probe, write_probe
from paceline.errors import ConfigError, StorageError
from paceline.spec.cluster import ClusterSpec

HOST = Machine("box", "A CPU", 8, 64 * 2**30)
STEP = {
    "precision": "fp32",
    "width": 100,
    "sequence": 128,
    "seconds": 0.1,
    "spread": 0.05,
    "repeats": 9,
    "parameters": 1000,
    "matmul_flops": 1e9,
    "attention_flops": 1e8,
    "moved_elements": 1e6,
    "operators": 40,
}
RECORD = {
    "schema": SCHEMAS["cpu"],
    "processor": "A CPU",
    "kind": "cpu",
    "date": "2026-01-01T00:00:00+00:00",
    "core_share": 1.0,
    "matmul": {"fp32": [[64, 1e11], [128, 2e11]]},
    "attention": {"fp32": [[128, 5e10]]},
    "memory": {"triad": 2e10, "elementwise": 4e10, "picked": 1e10},
    "launch_seconds": 2e-6,
    "runtime_bytes": 3e8,
    "optimizer_bytes_per_second": 3e10,
    "relative_spread": 0.05,
    "calibration": [STEP],
    "link": {"hop_seconds": 5e-5, "bytes_per_second": {"all_reduce": 1e9, "all_gather": 8e8, "reduce_scatter": 5e8}},
}


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(resolve, "visible_gpus", list)
    monkeypatch.setattr(resolve, "read_machine", lambda: HOST)


@pytest.fixture
def two_gpus(monkeypatch):
    def show(name="NVIDIA H200"):
        monkeypatch.setattr(resolve, "visible_gpus", lambda: [Gpu(name, 150 * 10**9)] * 2)
        monkeypatch.setattr(resolve, "read_machine", lambda: HOST)
        monkeypatch.setattr(resolve, "torch_without_cuda", lambda: False)

    return show


def test_cpu_devices_share_cores_and_memory(no_gpu, tmp_path, monkeypatch):
    cluster, remarks = resolve_cluster(ClusterSpec(devices=3), tmp_path)
    assert (cluster.device.kind, cluster.devices, cluster.device.threads) == ("cpu", 3, 2)
    assert cluster.device.memory_bytes.value == 64 * 2**30 // 3
    assert cluster.device.matmul_source == "assumed" and math.isnan(cluster.price_usd_per_device_hour.value)
    assert any("not probed" in remark for remark in remarks)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    crowded, remarks = resolve_cluster(ClusterSpec("cpu", devices=9), tmp_path)
    assert "OMP_NUM_THREADS = 8 is not heeded" in remarks[-1]
    assert crowded.device.threads == 1 and any("take turns" in remark for remark in remarks)


def test_heads_that_a_probe_timed_reach_the_device_and_come_back_from_a_journal(no_gpu, tmp_path):
    timed = {"attention_narrow": {"fp32": [[128, 4e10]]}, "head_widths": [64, 32]}
    record = {**RECORD, **timed, "calibration": [{**STEP, "head_width": 32}]}
    write_probe(record, probe_path("box", "cpu", 2, 4, tmp_path))
    cluster, _ = resolve_cluster(ClusterSpec(devices=2), tmp_path)
    back = cluster_from_dict(json.loads(json.dumps(dataclasses.asdict(cluster))))
    for device in (cluster.device, back.device):
        assert device.attention_narrow_flops == {"fp32": ((128, 4e10),)} and device.head_widths == (64, 32)
        assert device.calibration[0].head_width == 32
    assert resolve_cluster(ClusterSpec(devices=3), tmp_path)[0].device.head_widths == ()


def test_a_stored_probe_replaces_assumptions(no_gpu, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # which would be remarked on
    write_probe(RECORD, probe_path("box", "cpu", 2, 4, tmp_path))
    cluster, remarks = resolve_cluster(ClusterSpec(devices=2), tmp_path)
    device = cluster.device
    assert remarks == [] and device.matmul_source == "measured" and cluster.date.startswith("2026")
    assert device.matmul_flops["fp32"] == ((64, 1e11), (128, 2e11)) and device.attention_flops["fp32"] == ((128, 5e10),)
    assert device.picked_bytes_per_second is not None and device.picked_bytes_per_second.value == 1e10
    assert device.memory_bytes_per_second.value == 2e10 and device.calibration[0].relative_spread == 0.05
    assert cluster.links[0].collective_bytes_per_second["reduce_scatter"] == 5e8
    assert resolve_cluster(ClusterSpec(devices=4), tmp_path)[0].device.matmul_source == "assumed"


def test_a_probe_of_a_busy_machine_is_said_to_be_one(no_gpu, tmp_path):
    today = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_probe({**RECORD, "core_share": 0.5, "date": today}, probe_path("box", "cpu", 2, 4, tmp_path))
    assert "50% of its cores" in resolve_cluster(ClusterSpec(devices=2), tmp_path)[1][0]


@pytest.mark.parametrize(
    "text", ["{", "[]", json.dumps({**RECORD, "schema": 0}), json.dumps({**RECORD, "processor": "B"})]
)
def test_a_probe_that_cannot_be_used_says_why(no_gpu, tmp_path, text):
    path = probe_path("box", "cpu", 2, 4, tmp_path)
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    cluster, remarks = resolve_cluster(ClusterSpec(devices=2), tmp_path)
    assert cluster.device.matmul_source == "assumed" and "run `paceline probe --devices 2` again" in remarks[0]
    assert read_probe(tmp_path / "none.json", "A CPU") == (None, "")


def test_a_probe_that_cannot_be_stored_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot store"):
        write_probe(RECORD, tmp_path / "file" / "probe.json")


def test_gpus_are_matched_in_the_catalog(two_gpus, tmp_path):
    two_gpus()
    cluster, _ = resolve_cluster(ClusterSpec(), tmp_path)
    assert (cluster.devices, cluster.devices_per_node, cluster.device.name) == (2, 2, "NVIDIA H200 SXM5 141GB")
    assert cluster.device.memory_bytes.value == 150e9 and cluster.device.memory_bytes.source == "measured"
    with pytest.raises(ConfigError, match="machine with 2 GPU"):
        resolve_cluster(ClusterSpec("cuda", devices=3), tmp_path)


def test_an_unknown_gpu_is_unknown(two_gpus, tmp_path):
    two_gpus("NVIDIA Quite New")
    cluster, remarks = resolve_cluster(ClusterSpec(), tmp_path)
    assert cluster.device.matmul_flops == {} and cluster.device.matmul_source == "unknown"
    assert math.isnan(cluster.device.memory_bytes_per_second.value) and "not in the catalog" in remarks[0]


def test_a_probe_leaves_what_a_gpu_sustains_of_its_published_peak_and_knows_the_rest_better(two_gpus, tmp_path):
    two_gpus()
    published = resolve_cluster(ClusterSpec(), tmp_path)[0].device
    record = {**RECORD, "kind": "cuda", "schema": SCHEMAS["cuda"], "matmul": {"bf16": [[256, 2e13], [4096, 8.2e14]]}}
    write_probe(record, probe_path("box", "cuda", 2, 0, tmp_path))
    cluster, remarks = resolve_cluster(ClusterSpec(), tmp_path)
    device = cluster.device
    assert cluster.date and remarks == []
    assert (device.matmul_flops, device.matmul_source) == (published.matmul_flops, "published")
    assert device.calibration == () and not device.measured_peaks
    assert device.memory_bytes_per_second.source == device.launch_seconds.source == "measured"
    assert device.attention_flops == {"fp32": ((128, 5e10),)} and device.runtime_bytes.value == 3e8
    assert cluster.links[0].collective_bytes_per_second["all_gather"] == 8e8
    two_gpus("NVIDIA Quite New")
    new = resolve_cluster(ClusterSpec(), tmp_path)[0].device
    assert new.matmul_flops == {"bf16": ((0, 8.2e14),)} and new.measured_peaks and new.matmul_source == "measured"


def test_an_older_probe_is_told_and_that_of_another_kind_stays_valid(two_gpus, tmp_path):
    two_gpus()
    path = probe_path("box", "cuda", 2, 0, tmp_path)
    write_probe({**RECORD, "kind": "cuda", "schema": 8}, path)
    cluster, remarks = resolve_cluster(ClusterSpec(), tmp_path)
    assert not cluster.date and "has another format: run `paceline probe --kind cuda --devices 2` again" in remarks[0]
    write_probe(RECORD, tmp_path / "cpu.json")
    assert read_probe(tmp_path / "cpu.json", "A CPU")[0] is not None
    write_probe({**RECORD, "schema": 8}, tmp_path / "cpu.json")  # which counts the pages of libraries
    assert read_probe(tmp_path / "cpu.json", "A CPU")[0] is None


def test_a_cpu_build_of_torch_cannot_use_a_gpu(two_gpus, monkeypatch, tmp_path):
    two_gpus()
    monkeypatch.setattr(resolve, "torch_without_cuda", lambda: True)
    cluster, remarks = resolve_cluster(ClusterSpec(), tmp_path)
    assert cluster.device.kind == "cpu" and "CPU-only build" in remarks[0]
    with pytest.raises(ConfigError, match="without a usable GPU"):
        resolve_cluster(ClusterSpec("cuda"), tmp_path)


def test_catalog_clusters_have_nodes():
    cluster, remarks = resolve_cluster(ClusterSpec("h100-sxm", devices=32))
    assert cluster.devices_per_node == 8 and [link.level for link in cluster.links] == ["node", "network"]
    assert cluster.host == "" and "nothing was measured" in remarks[0]
    with pytest.raises(ConfigError, match="12 with 8 devices per node") as error:
        resolve_cluster(ClusterSpec("h100-sxm", devices=12))
    assert error.value.try_ == "devices = 8 or 16"
    assert any("network between nodes is assumed" in text for text in resolve_cluster(ClusterSpec("l4", devices=16))[1])


def test_the_spec_overrides_prices_power_and_memory():
    spec = ClusterSpec(
        "l4", 2, price_usd_per_device_hour=0.0, watts_per_device=90.0, carbon_g_per_kwh=50.0, memory_per_device=10**9
    )
    cluster, _ = resolve_cluster(spec)
    assert cluster.price_usd_per_device_hour.value == 0.0 and cluster.watts_per_device.value == 90.0
    assert cluster.carbon_g_per_kwh.value == 50.0 and cluster.device.memory_bytes.note == "from the spec"


def test_cgroups_and_visible_devices_limit_the_machine(monkeypatch, tmp_path):
    (tmp_path / "cpu.max").write_text("150000 100000")
    (tmp_path / "memory.max").write_text("1000000")
    monkeypatch.setattr(machine, "_cgroup_folders", lambda: [tmp_path])
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert machine.usable_cores() == 2 and machine.usable_memory_bytes() == 1_000_000
    gpus = [Gpu("a", 1), Gpu("b", 2), Gpu("c", 3)]
    monkeypatch.setattr(machine, "_gpus_of_nvidia_smi", lambda: gpus)
    for visible, expected in (("2,0", "ca"), ("", ""), ("-1", ""), ("1,9,0", "b")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert "".join(gpu.name for gpu in machine.visible_gpus()) == expected


SMI = """#!/bin/sh
case "$*" in
-L) cat <<'LIST'
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)
  MIG 3g.40gb     Device  0: (UUID: MIG-cccc)
  MIG 1g.10gb     Device  1: (UUID: MIG-dddd)
GPU 1: Tesla T4 (UUID: GPU-bbbb)
LIST
;;
*mig.mode*) WITH_MIG;;
*uuid*) printf 'NVIDIA A100-SXM4-80GB, 81920, GPU-aaaa\\nTesla T4, 15360, GPU-bbbb\\n';;
*) exit 2;;
esac
"""
MIG_ROWS = "printf 'NVIDIA A100-SXM4-80GB, 81920, GPU-aaaa, Enabled\\nTesla T4, 15360, GPU-bbbb, [N/A]\\n'"
A100, T4 = ("NVIDIA A100-SXM4-80GB", 80 * 2**30), ("Tesla T4", 15 * 2**30)
LARGE, SMALL = (
    (f"{A100[0]} MIG {name}", int(0.88 * size * 2**30)) for name, size in (("3g.40gb", 40), ("1g.10gb", 10))
)
SEEN = {  # of the GPUs of which the first is cut into slices, and is not: what CUDA_VISIBLE_DEVICES leaves
    None: ([T4], [A100, T4]), "0": ([LARGE], [A100]), "1": ([T4], [T4]), "1,0": ([T4, LARGE], [T4, A100]),
    "GPU-bbbb": ([T4], [T4]), "GPU-b": ([T4], [T4]), "GPU-x": ([], []), "MIG-dddd": ([SMALL], None), "7": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("is_cut", [True, False])
def test_gpus_are_those_that_are_named_and_slices_have_their_own_memory(monkeypatch, tmp_path, is_cut):
    """A name was taken for the first GPU, and a slice for the whole of it."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.replace("WITH_MIG", MIG_ROWS if is_cut else "exit 2"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for visible, (cut, uncut) in SEEN.items():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        expected = cut if is_cut else uncut
        if expected is not None:
            assert [(gpu.name, gpu.memory_bytes) for gpu in machine.visible_gpus()] == expected, visible


def test_a_probe_counts_for_the_gpu_that_it_measured(two_gpus, tmp_path):
    """One of the host's other GPU was taken: a T4 computed as an A100."""
    record = {**RECORD, "kind": "cuda", "schema": SCHEMAS["cuda"], "device_name": "NVIDIA H200"}
    write_probe(record, probe_path("box", "cuda", 2, 0, tmp_path))
    two_gpus()
    cluster, _ = resolve_cluster(ClusterSpec("cuda"), tmp_path)
    assert cluster.date == RECORD["date"] and cluster.device.memory_bytes.source == "measured"
    two_gpus("Tesla T4")
    cluster, remarks = resolve_cluster(ClusterSpec("cuda"), tmp_path)
    assert not cluster.date and any("another GPU (NVIDIA H200)" in remark for remark in remarks)


def test_what_says_that_nothing_was_probed_names_the_command_that_probes_it(no_gpu, tmp_path):
    """`paceline probe` measures one CPU: whoever planned on several, or on GPUs, was told the same again."""
    for spec, command, devices in (
        (ClusterSpec("cpu"), "`paceline probe`", 1), (ClusterSpec("cpu", devices=2), "`paceline probe --devices 2`", 2),
        (ClusterSpec("cpu", devices=4, devices_per_node=2), "`paceline probe --devices 2`", 2),
    ):  # fmt: skip
        _, remarks = resolve_cluster(spec, tmp_path / "none")
        assert any(f"not probed: {command} measures {devices} x cpu" in remark for remark in remarks), remarks
    assert probe_command("cuda", 1) == "paceline probe --kind cuda"


def test_what_a_node_measured_is_for_all_that_are_alike(no_gpu, two_gpus, tmp_path):
    """The probe of as many devices as the cluster has was looked for, and none of several nodes can be made."""
    write_probe(RECORD, probe_path("box", "cpu", 2, 4, tmp_path))
    alone, _ = resolve_cluster(ClusterSpec("cpu", 2), tmp_path)
    several, remarks = resolve_cluster(ClusterSpec("cpu", 4, devices_per_node=2), tmp_path)
    assert several.device == alone.device and several.date == RECORD["date"] and remarks == []
    assert several.links[0].bytes_per_second.source == "assumed", "a network's rate is not that within a node"
    two_gpus()
    write_probe({**RECORD, "kind": "cuda", "schema": SCHEMAS["cuda"]}, probe_path("box", "cuda", 2, 0, tmp_path))
    nodes, _ = resolve_cluster(ClusterSpec("cuda", 4, devices_per_node=2), tmp_path)
    assert [link.bytes_per_second.source for link in nodes.links] == ["measured", "published"]


def test_a_probe_that_cannot_be_kept_is_not_made_and_a_user_without_a_home_is_told(monkeypatch, tmp_path):
    """Half a minute was measured at every start, and then thrown away."""
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = []
    with pytest.raises(StorageError, match="cannot store"):
        probe_machine(1, say=said.append)
    assert said == []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home")))
    with pytest.raises(StorageError, match="no home folder"):
        cache_dir()


def test_gpus_that_differ_are_told(monkeypatch, two_gpus, tmp_path):
    two_gpus()
    gpus = [Gpu("NVIDIA H200", 150 * 10**9), Gpu("Tesla T4", 15 * 10**9)]
    monkeypatch.setattr(resolve, "visible_gpus", lambda: gpus)
    cluster, remarks = resolve_cluster(ClusterSpec("cuda"), tmp_path)
    assert cluster.device.memory_bytes.value == 15 * 10**9 and any("GPUs differ" in remark for remark in remarks)


def test_resolving_imports_no_torch():
    code = (
        "import sys; from paceline.cluster.resolve import ClusterSpec, resolve_cluster; resolve_cluster(ClusterSpec());"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
