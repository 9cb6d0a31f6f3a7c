"""A real probe of two ranks in a tiny budget, and how its failures are told."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from runs import environment, is_running, wait_until

from paceline.cluster.machine import threads_per_device
from paceline.cluster.probe import probe, worker
from paceline.cluster.probe.duration import probe_seconds
from paceline.cluster.probe.passes import fastest
from paceline.cluster.probe.probe import _beyond, _start, combine, probe_lines, probe_machine
from paceline.cluster.probe.rank import Rank
from paceline.cluster.probe.records import RankProbe
from paceline.cluster.probe.worker import operand
from paceline.cluster.resolve import resolve_cluster
from paceline.errors import ConfigError, PacelineError
from paceline.spec.cluster import ClusterSpec


def test_two_ranks_are_measured_and_the_planner_uses_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    record = probe_machine(2, "cpu", said.append, seconds_budget=0.2)
    assert any("between devices" in line for line in said) and "stored" in said[-1]
    for precision in ("fp32", "bf16", "fp64"):
        assert all(rate > 1e7 for _, rate in record["matmul"][precision])
    assert set(record["link"]["bytes_per_second"]) == {"all_reduce", "all_gather", "reduce_scatter"}
    assert record["runtime_bytes"] > 1e8 and 0 < record["launch_seconds"] < 1e-2
    cluster, _ = resolve_cluster(ClusterSpec("cpu", devices=2))
    assert cluster.device.matmul_source == "measured" and cluster.date == record["date"]
    step = next(step for step in cluster.device.calibration if step.precision == "fp32")
    assert step.matmul_flops == 2 * 1024 * 2 * (4 * 128**2 + 3 * 128 * 384)  # tokens x layers x matrices
    assert step.operators > 10 and step.moved_elements > 1024 * 128 and step.seconds > 0


STARTS = """
import os, subprocess, sys
worker = [sys.executable, "-m", "paceline.cluster.probe.worker", sys.argv[1], "0"]
process = subprocess.Popen(worker, env={**os.environ, "PACELINE_PARENT": str(os.getpid())})
print(process.pid, flush=True)
process.wait()
"""


def test_a_rank_ends_with_the_process_that_probes(tmp_path):
    """One whose parent was killed went on for as long as it would have, on cores that the next probe takes for free."""
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"devices": 1, "kind": "cpu", "threads": 1, "seconds_budget": 20.0,
                                   "fair_share": 1.0, "passes": 1}))  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", STARTS, request], stdout=subprocess.PIPE, env=environment()) as parent:
        assert parent.stdout is not None
        rank = int(parent.stdout.readline())
        parent.kill()
    try:
        wait_until(lambda: not is_running(rank), timeout=10)
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)


def test_a_failing_rank_is_an_error_with_its_own_words(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe.sys, "executable", "/bin/false")
    with pytest.raises(PacelineError, match="process 0 failed"):
        probe_machine(1, "cpu", lambda line: None, seconds_budget=0.2)


def test_kinds_that_are_not_there():
    with pytest.raises(ConfigError, match="cannot probe 'tpu'"):
        probe_machine(1, "tpu", lambda line: None)
    with pytest.raises(ConfigError, match="cannot probe 99 CUDA"):
        probe_machine(99, "cuda", lambda line: None)


def test_operands_are_ones_on_a_cpu_and_random_on_an_accelerator():
    def of(kind: str):
        rank = Rank.__new__(Rank)
        rank.kind, rank.device = kind, torch.device("cpu")
        return operand(rank, (64, 8), "bfloat16")

    assert bool((of("cpu") == 1).all()) and of("cpu").dtype == of("cuda").dtype == torch.bfloat16
    assert len(of("cuda").unique()) > 100, "hardly a bit flips in products of one number"


def test_shares_of_threads():
    assert [threads_per_device(8, devices) for devices in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_the_slowest_rank_counts():
    def result(scale: float) -> dict:
        timed = {"seconds": 1e-3 * scale, "spread": 0.1, "repeats": 5}
        rate = {"at": 64, "flops": 1e9 / scale, **timed}
        sizes = [
            {"collective": name, "bytes": 4e6, **timed, "seconds": 1e-2 * scale}
            for name in ("all_reduce", "all_gather", "reduce_scatter")
        ]
        return {
            "torch": "2",
            "matmul": {"fp32": [rate]},
            "attention": {"fp32": [rate]},
            "attention_narrow": {"fp32": [rate]},
            "head_widths": [64, 32],
            "memory": {name: {"bytes_per_second": 1e9 / scale} for name in ("triad", "elementwise", "picked")},
            "launch": {"autograd": timed, "plain": timed},
            "optimizer": {"bytes_per_second": 1e9 / scale},
            "runtime_bytes": 100 * scale,
            "blocks": [timed],
            "core_share": 1 / scale,
            "refused": int(scale) - 1,
            "collectives": {"latency": timed, "sizes": sizes, "groups": {}},
            "steps": {
                "plain_seconds": 0.1,
                "sharded_seconds": 0.1 + 0.08 * scale,
                "moved_seconds": 0.1 + 0.1 * scale,
                "work_seconds": 4e-3 * scale,
                "few_plain_seconds": 4e-3,
                "few_sharded_seconds": 4e-3 + 0.05 * scale,
                "few_kept_seconds": 4e-3 + 2e-3 * scale,
                "units": 4,
                "unit_bytes": 9e5,
                "moves": 16,
                "move_bytes": 1.8e6,
            },
        }

    record = combine([result(1.0), result(2.0)])
    assert record["matmul"]["fp32"] == [[64, 5e8]] and record["memory"]["triad"] == 5e8
    assert record["launch_seconds"] == 2e-3 and record["runtime_bytes"] == 200 and record["core_share"] == 0.5
    assert record["refused"] == 1
    # a collective of one number over two ranks is one hop; half of 4 MB twice, in 20 ms less that
    assert record["link"]["hop_seconds"] == pytest.approx(2e-3)
    assert record["link"]["bytes_per_second"]["all_reduce"] == pytest.approx(4e6 / (20e-3 - 2e-3))
    assert record["link"]["bytes_per_second"]["all_gather"] == pytest.approx(2e6 / (20e-3 - 2e-3))
    assert math.isclose(record["relative_spread"], 0.1)
    assert record["link"]["groups"] == []
    # Each of 4 units made the slowest rank's step 40 ms longer, and its three collectives take 2 ms and half of 0.9 MB
    # at 111 MB/s, 4.05 ms each; each of 16 moves 12.5 ms, of which its own 2 + 8.1 ms.
    assert record["link"]["unit_seconds"] == pytest.approx(40e-3 - 3 * 6.05e-3)
    assert record["link"]["move_seconds"] == pytest.approx(12.5e-3 - 10.1e-3)
    # On a few tokens each unit adds 25 ms, its collectives aside, and 1 ms where it keeps its gradients.
    assert record["link"]["least_unit_seconds"] == pytest.approx(25e-3 - 3 * 6.05e-3)
    assert record["link"]["kept_unit_seconds"] == pytest.approx(1e-3)
    assert record["link"]["work_seconds"] == pytest.approx(8e-3)


def test_an_operators_start_is_what_a_step_takes_on_no_rows():
    """300 us an operator on all rows, 170 on half of them: 130 go with the rows of a half, 40 with none."""

    def timed(all_rows: float) -> dict:
        return {"autograd": each_of(3e-6), "passes": rows_of(11e-6, all_rows, 170e-6)}

    assert _start(timed(300e-6)) == pytest.approx(40e-6)
    assert _start(timed(335e-6)) == pytest.approx(11e-6), "no less than an operator that has hardly anything to do"
    busy = timed(100e-6)
    assert _start(busy) == pytest.approx(170e-6), "half the rows met another program: no more than all that they took"
    assert _start({"autograd": busy["autograd"]}) == 3e-6, "beside an accelerator nothing else is timed"
    assert _start({**busy, "passes": {"few_tokens": each_of(11e-6), "all_and_half": None}}) == 11e-6, "of one thread"


def each_of(seconds: float) -> dict:
    return {"seconds": seconds, "spread": 0.0, "repeats": 3}


def rows_of(few: float, all_rows: float, half: float) -> dict:
    return {"few_tokens": each_of(few), "all_and_half": (each_of(all_rows), each_of(half))}


@pytest.mark.parametrize(("passed", "takes"), [(41e-3, 41e-3), (60e-3, 40e-3)])
@pytest.mark.parametrize("alone", [True, False])
def test_a_call_takes_what_the_clock_says_unless_another_program_held_it_up(monkeypatch, passed, takes, alone):
    """It runs 40 ms: what else 41 hold the core loses by itself, and of 60 a third was somebody else's.

    Of ranks that share cores nobody can tell: each waits for its turn.
    """
    clock, rank = {"wall": 0.0, "ran": 0.0}, object.__new__(Rank)
    rank.kind, rank.knows_own_time, rank.slot_seconds = "cpu", alone, 0.3
    monkeypatch.setattr("paceline.cluster.probe.rank.time.perf_counter", lambda: clock["wall"])
    monkeypatch.setattr("paceline.cluster.probe.rank.time.process_time", lambda: clock["ran"])
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)

    def call() -> None:
        clock["wall"] += passed
        clock["ran"] += 40e-3

    assert rank.time(call)["seconds"] == pytest.approx(takes if alone else passed)
    assert rank.time(call, repeats=3)["seconds"] == pytest.approx(passed), "a collective waits for its peers"


def test_of_two_passes_the_faster_counts_and_their_distance_is_the_drift():
    """The host took a third of the first pass's speed away: products, collectives and a block are the second's.

    What calls of one pass spread by is another thing: there is less of it in a mean of many.
    """
    slow, fast = one_pass(1.5), one_pass(1.0)
    found = fastest(slow, fast)
    assert found == fastest(fast, slow) and found["steps"] == fast["steps"]
    assert found["matmul"]["fp32"][0]["flops"] == 1e9 and found["attention"]["fp32"][0]["seconds"] == 1e-3
    assert found["blocks"][0]["seconds"] == 1e-3 and found["blocks"][0]["spread"] == pytest.approx(0.1)
    assert found["blocks"][0]["drift"] == pytest.approx(0.5)
    assert found["memory"]["triad"]["bytes_per_second"] == 1e9 and found["launch"]["plain"]["repeats"] == 10
    assert found["collectives"]["latency"]["seconds"] == 1e-3 and found["collectives"]["sizes"][0]["seconds"] == 1e-2
    assert found["collectives"]["groups"]["2"]["latency"]["seconds"] == 1e-3
    assert (found["cpu_seconds"], found["wall_seconds"]) == (2.0, 4.0)


def test_the_start_of_an_operator_is_what_passes_of_a_block_leave_on_no_rows():
    """Of a CPU the faster pass counts for each number of rows; 30 us of all rows and 17 of half leave 4 on none."""
    slow, fast = one_pass(1.5), one_pass(1.0)
    slow["launch"]["passes"], fast["launch"]["passes"] = rows_of(4.5e-6, 45e-6, 25.5e-6), rows_of(3e-6, 30e-6, 17e-6)
    found = fastest(slow, fast)["launch"]
    assert found["passes"]["few_tokens"]["seconds"] == 3e-6 and found["passes"]["all_and_half"][0]["seconds"] == 30e-6
    assert _start(found) == pytest.approx(4e-6) and _start(fastest(slow, one_pass(1.0))["launch"]) == 1e-3
    slow["launch"]["passes"] = rows_of(3e-6, 27e-6, 24e-6)
    for pair in ((slow, fast), (fast, slow)):  # half of them was slow: with the other pass's it would leave 7
        assert _start(fastest(*pair)["launch"]) == pytest.approx(4e-6)


def test_what_differences_are_read_from_takes_turns(monkeypatch):
    """The machine is half as fast for 150 ms: one after the other, half the rows alone would be, and leave 20 ms."""
    clock, rank = {"now": 0.0}, object.__new__(Rank)
    rank.kind, rank.knows_own_time = "cpu", True
    monkeypatch.setattr("paceline.cluster.probe.rank.time.perf_counter", lambda: clock["now"])
    monkeypatch.setattr("paceline.cluster.probe.rank.time.process_time", lambda: clock["now"])

    def taking(seconds: float) -> Callable[[], None]:
        def call() -> None:
            clock["now"] += seconds * (2 if 0.1 < clock["now"] < 0.25 else 1)

        return call

    took = rank.in_turns([taking(30e-3), taking(17e-3), taking(1e-3)], 7)
    assert [timed["seconds"] for timed in took] == pytest.approx([30e-3, 17e-3, 1e-3])
    assert {timed["repeats"] for timed in took} == {7}


def test_calls_that_meet_begin_together_and_the_first_of_each_makes_buffers(monkeypatch):
    rank, said = object.__new__(Rank), []
    rank.kind = "cpu"
    monkeypatch.setattr("torch.distributed.barrier", lambda: said.append("meet"))
    samples = rank.samples_in_turns([lambda: said.append("a"), lambda: said.append("b")], 2, meets=True)
    assert said == ["meet", "a", "meet", "b"] * 3
    assert [(len(passed), len(own)) for passed, own in samples] == [(2, 2)] * 2


class Ended:
    """A worker of a probe that has failed."""

    returncode = 1

    def poll(self) -> int:
        return 1


@pytest.mark.parametrize("words", ["Connection closed by peer [127.0.0.1]:4711", "Connection reset by peer. GLHF!"])
def test_a_probe_that_fails_tells_of_the_process_that_failed_first(tmp_path, words):
    """A process that lost its peer only says so, in one of gloo's words; the lower number was blamed for the second."""
    gloo = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:50893: "
    (tmp_path / "stderr-0").write_text(f"Traceback\n{gloo}{words}\n")
    (tmp_path / "stderr-1").write_text("Traceback\nValueError: the device is no longer there\n")
    with pytest.raises(PacelineError, match=r"process 1 failed\n.*the device is no longer there"):
        probe._wait([Ended(), Ended()], tmp_path, 5.0)


def test_collectives_vary_by_themselves_so_their_mean_counts():
    """1.0 and 1.2 ms are 1.1, and of steps the differences are means as well: 100 and 120 ms more make 110."""
    slow, fast = one_pass(1.2), one_pass(1.0)
    found = fastest(slow, fast)
    assert found["matmul"]["fp32"][0]["seconds"] == 1e-3 and found["blocks"][0]["seconds"] == 1e-3
    assert found["collectives"]["latency"]["seconds"] == pytest.approx(1.1e-3)
    assert found["collectives"]["sizes"][0]["seconds"] == pytest.approx(1.1e-2)
    assert found["collectives"]["groups"]["2"]["sizes"][0] == {
        "collective": "all_reduce", "bytes": 4e6, "seconds": pytest.approx(1.1e-2)}  # fmt: skip
    steps = found["steps"]
    assert steps["sharded_seconds"] - steps["plain_seconds"] == pytest.approx(0.11) and steps["units"] == 4


def test_what_a_second_pass_leaves_out_stays():
    """fp16 was hopelessly slow in the first pass; a rank without peers has no collectives."""
    first, second = one_pass(1.0), one_pass(2.0)
    first["matmul"]["fp16"] = first["matmul"]["fp32"]
    first["collectives"] = second["collectives"] = first["steps"] = second["steps"] = None
    found = fastest(first, second)
    assert found["matmul"]["fp16"] == first["matmul"]["fp16"] and found["collectives"] is found["steps"] is None


def test_what_disturbs_steps_on_a_few_tokens_is_seen_though_long_steps_hide_it():
    """28 ms more in four units of a few tokens are 7 ms a unit: lost in a step of 300 ms, and most of one of 8."""
    calm, disturbed = one_pass(1.0), one_pass(1.0)
    disturbed["steps"] = {**disturbed["steps"], "few_sharded_seconds": 36e-3}
    steps = fastest(calm, disturbed)["steps"]
    assert steps == fastest(disturbed, calm)["steps"] == calm["steps"]
    late = one_pass(1.0)
    late["steps"] = {**late["steps"], "moved_seconds": 0.32, "sharded_seconds": 0.9}
    assert fastest(calm, late)["steps"] == calm["steps"], "and the other way round"


@pytest.mark.parametrize(("took", "calls", "counted"), [(0.4, 3, 2), (0.1, 5, 3)])
def test_a_call_that_is_longer_than_its_slot_is_not_made_once_for_nothing(monkeypatch, took, calls, counted):
    """The first one warms up. Of 0.4 s in slots of 0.25 the second counts; of 0.1 it says how many fit, which is 3."""
    clock, rank, made = {"now": 0.0}, object.__new__(Rank), []
    rank.kind, rank.knows_own_time, rank.slot_seconds = "cpu", False, 0.25
    monkeypatch.setattr("paceline.cluster.probe.rank.time.perf_counter", lambda: clock["now"])
    monkeypatch.setattr("paceline.cluster.probe.rank.time.process_time", lambda: clock["now"])
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)

    def call() -> None:
        made.append(1)
        clock["now"] += took

    timed = rank.time(call)
    assert (len(made), timed["repeats"]) == (calls, counted) and timed["seconds"] == pytest.approx(took)


def test_the_steps_that_all_terms_are_multiplied_by_are_timed_at_two_moments_of_a_pass(monkeypatch):
    """The host took a fifth of the speed away at the first of them: the second counts, and a drift of 25 % is told."""
    moments = iter([1.25e-3, 1.0e-3])
    timed = {"seconds": 1e-3, "spread": 0.1, "repeats": 2}
    others = ("launch_times", "collective_times", "step_times", "passes_by_rows", "attention_rates", "optimizer_rate",
              "memory_rates")  # fmt: skip
    for name in others:
        monkeypatch.setattr(worker, name, lambda *args, **kwargs: {})
    monkeypatch.setattr(worker, "matmul_rates", lambda *args: {"fp32": [{"flops": 1e9}]})
    monkeypatch.setattr(worker, "block_times", lambda *args: [{**timed, "seconds": next(moments)}])
    rank = object.__new__(Rank)
    rank.kind, rank.trial = "cpu", False
    monkeypatch.setattr(Rank, "any", lambda self, condition: condition)
    (block,) = worker.one_pass(rank)["blocks"]
    assert (block["seconds"], block["drift"], block["repeats"]) == (1e-3, pytest.approx(0.25), 4)


def one_pass(scale: float) -> dict:
    timed = {"seconds": 1e-3 * scale, "spread": 0.1, "repeats": 5}
    rate = {"at": 64, "flops": 1e9 / scale, **timed}
    moved = {"bytes_per_second": 1e9 / scale, **timed}
    group = {"latency": {"seconds": 1e-3 * scale}, "sizes": [
        {"collective": "all_reduce", "bytes": 4e6, "seconds": 1e-2 * scale}]}  # fmt: skip
    return {
        "launch": {"plain": timed, "autograd": timed}, "collectives": {**group, "groups": {"2": group}},
        "steps": {
            "plain_seconds": 0.1 * scale, "sharded_seconds": 0.2 * scale, "moved_seconds": 0.3 * scale,
            "work_seconds": 4e-3 * scale, "few_plain_seconds": 4e-3 * scale, "few_sharded_seconds": 8e-3 * scale,
            "few_kept_seconds": 1e-3, "units": 4,
        },
        "matmul": {"fp32": [rate]},
        "attention": {"fp32": [rate]}, "attention_narrow": {"fp32": [rate]},
        "usable": ["fp32"], "blocks": [timed], "optimizer": moved,
        "memory": {"triad": moved, "elementwise": moved, "picked": moved}, "cpu_seconds": 1.0, "wall_seconds": 2.0,
    }  # fmt: skip


def test_a_step_that_costs_no_more_than_its_collectives_adds_nothing():
    steps = {"plain_seconds": 0.1, "sharded_seconds": 0.11, "moved_seconds": 0.09, "work_seconds": 4e-3,
             "units": 4, "unit_bytes": 0, "moves": 16, "move_bytes": 0, **few(0.01)}  # fmt: skip
    rates = {"all_reduce_latency_seconds": 1e-3, "bytes_per_second": {"all_gather": 1e9, "reduce_scatter": 1e9}}
    assert _beyond([steps], rates, 2) == {
        "unit_seconds": 0.0, "least_unit_seconds": 0.0, "kept_unit_seconds": 0.0, "move_seconds": 0.0,
        "work_seconds": 4e-3,
    }  # fmt: skip


def few(sharded_seconds: float) -> dict[str, float]:
    return {"few_plain_seconds": 4e-3, "few_sharded_seconds": sharded_seconds, "few_kept_seconds": 5e-3}


def test_another_programs_doing_is_not_taken_for_a_cost_of_communication():
    """Sharing its cores makes a layer's 25 ms at most 50: a second per unit is somebody else's."""
    steps = {"plain_seconds": 0.1, "sharded_seconds": 4.1, "moved_seconds": 8.1, "work_seconds": 4e-3,
             "units": 4, "unit_bytes": 0, "moves": 16, "move_bytes": 0, **few(4.0)}  # fmt: skip
    rates = {"all_reduce_latency_seconds": 1e-3, "bytes_per_second": {"all_gather": 1e9, "reduce_scatter": 1e9}}
    found = _beyond([steps], rates, 2)
    assert (found["unit_seconds"], found["move_seconds"]) == pytest.approx((25e-3, 6.25e-3))
    assert (found["least_unit_seconds"], found["kept_unit_seconds"]) == pytest.approx((25e-3, 0.25e-3))


@pytest.mark.deep
def test_groups_of_two_among_four_ranks_are_measured_and_priced(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record = probe_machine(4, "cpu", lambda line: None, seconds_budget=0.2)
    (group,) = record["link"]["groups"]
    assert group["size"] == 2 and set(group["bytes_per_second"]) == set(record["link"]["bytes_per_second"])
    assert any(line.startswith("  groups of 2") for line in probe_lines(record))
    link = resolve_cluster(ClusterSpec(device="cpu", devices=4))[0].links[0]
    assert link.groups[0].collective_bytes_per_second == group["bytes_per_second"]


@pytest.mark.parametrize(("kind", "devices", "busy", "seconds"), [
    ("cpu", 1, [], 15), ("cuda", 1, [], 30), ("cpu", 2, [], 33), ("cpu", 4, [], 51), ("cpu", 2, ["others"], 14),
])  # fmt: skip
def test_a_probe_says_how_long_it_takes_wherever_it_is_named(
    kind: str, devices: int, busy: list[str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU its start comes on top, one took 33 s where 15 were told; of two CPU devices what they do together."""

    def refused(request: object, **limits: object) -> list[RankProbe]:
        raise PacelineError("enough was seen")

    monkeypatch.setattr(probe, "_run_workers", refused)
    monkeypatch.setattr(probe, "look_around", lambda: busy)
    monkeypatch.setattr(probe, "visible_gpus", lambda: ["a GPU"])
    monkeypatch.setattr(probe, "torch_without_cuda", lambda: False)
    said: list[str] = []
    with pytest.raises(PacelineError, match="enough"):
        probe_machine(devices, kind, said.append)
    assert f"about {seconds} s" in said[-1]
    if not busy:
        assert f"{probe_seconds(kind, devices=devices):.0f}" == str(seconds)


@pytest.mark.parametrize(("kind", "longest"), [("cpu", 1024), ("cuda", 2048)])
def test_attention_in_fp64_is_timed_at_lengths_that_take_no_seconds(
    kind: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "HEAD_WIDTHS", {kind: (1, 1)})  # the shapes alone matter: nothing is computed
    still = SimpleNamespace(kind=kind, trial=False, device="cpu", time=lambda call: {"seconds": 1.0})
    rates = worker.attention_rates(still, {"fp32": "float32", "fp64": "float64"})  # type: ignore[arg-type]
    every = worker.CPU_SEQUENCES if kind == "cpu" else worker.CUDA_SEQUENCES
    assert [point["at"] for point in rates["fp32"]] == list(every)
    assert [point["at"] for point in rates["fp64"]] == [each for each in every if each <= longest]
