"""A rank that computes longer than the others is named, and no other."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nvml import FakeGpu, FakeNvml, NVMLError
from runs import records_of
from storm import Story, told
from thread_worlds import InThreads, on_threads

from paceline.run.process.spread import spread_over
from paceline.run.process.world import World
from paceline.run.survive.health import computing
from paceline.run.survive.health import stragglers as stragglers_module
from paceline.run.survive.health.computing import device_facts
from paceline.run.survive.health.stragglers import Stragglers
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.survive.health import HealthSpec


def named(curves: list[list[float]]) -> list[tuple[int, str]]:
    stragglers = Stragglers(HealthSpec(straggler_checks=3), World(0, len(curves[0]), 0, torch.device("cpu")))
    decisions = [each for step, seconds in enumerate(curves) for each in stragglers.judged(step, seconds, [{}] * 9)]
    return [(each.evidence["rank"], each.after.partition(";")[0]) for each in decisions]


def test_a_rank_is_named_once_that_stays_slow_and_again_when_it_no_longer_is() -> None:
    healthy, slow = [1.0, 1.1, 0.9, 1.05], [1.0, 1.1, 1.6, 1.05]
    assert named([healthy] * 20) == []
    assert named([slow] * 2 + [healthy] + [slow] * 2) == []  # a moment is none
    assert named([slow] * 9) == [(2, "slow")]
    assert named([slow] * 5 + [healthy] * 5 + [slow] * 3) == [(2, "slow"), (2, "as fast as the others"), (2, "slow")]
    assert named([[1.0, 1.5]] * 3) == [(1, "slow")]


@pytest.mark.parametrize(("ranks", "looks"), [(1, 0), (2, 1)])
def test_a_model_is_not_walked_through_in_every_step(ranks: int, looks: int) -> None:
    """Where a GPU computes, all modules are asked whether they meet other ranks: in the first step compared."""
    seen: list[str] = []

    class Under(SimpleNamespace):
        """What trains a whole copy of a model."""

        @property
        def sees_whole_batch(self) -> bool:
            seen.append("walk")
            return False

    under: Any = Under(plan=Plan(layout=Layout(dp_replicate=ranks), batch_samples=4 * ranks))
    stragglers = Stragglers(HealthSpec(), World(0, ranks, 0, torch.device("cpu")), under)
    seen.clear()
    stats: Any = SimpleNamespace(waiting_seconds=None, seconds={"forward_backward": 2.0})
    batch: Any = SimpleNamespace(micro_batches=[SimpleNamespace(ids=[1, 2])])
    for _ in range(8):
        stragglers.add(stats, batch)
    assert len(seen) == looks
    assert (stragglers._seconds, stragglers._rows) == ((16.0, 16) if ranks > 1 else (0.0, 0))


def facts_of(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setattr(computing, "device_name", lambda device: "GPU-a")
    return device_facts(torch.device("cuda", 0), FakeNvml({"GPU-a": gpu}))


def told_of(facts: dict[str, float]) -> DecisionRecord:
    """Return what is said of the second of two ranks whose device tells this."""
    stragglers = Stragglers(HealthSpec(straggler_checks=1), World(0, 2, 0, torch.device("cpu")))
    (found,) = stragglers.judged(1, [1.0, 1.6], [{}, facts])
    assert found.evidence is not None and found.evidence["device"] == facts
    return found


def test_a_slow_rank_is_named_with_what_its_gpu_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = facts_of(FakeGpu(celsius=91, reasons=0x40, clock=1100), monkeypatch)
    expected = {"celsius": 91, "throttled": 1, "power_capped": 0, "clock_share": 0.55}
    assert {name: hot[name] for name in expected} == expected
    words = "of its device stands out: throttled, hot (91 °C), its clock at 55% of its highest"
    assert told_of(hot).because.endswith(words)
    assert "stands out" not in told_of(facts_of(FakeGpu(), monkeypatch)).because
    denied = NVMLError(FakeNvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions")
    calls = ("nvmlDeviceGetTemperature", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetClockInfo")
    unread = facts_of(FakeGpu(refuses=dict.fromkeys(calls, denied)), monkeypatch)
    assert not {"celsius", "throttled", "clock_share"} & set(unread), "what is not known is not there"
    assert "stands out" not in told_of(unread).because


def test_a_slow_rank_is_named_with_what_its_processor_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for zone, degrees in (("thermal_zone0", "48000"), ("thermal_zone1", "93000"), ("thermal_zone2", "unknown")):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "temp").write_text(degrees)
    (tmp_path / "scaling_cur_freq").write_text("1200000")
    (tmp_path / "cpuinfo_max_freq").write_text("3000000")
    monkeypatch.setattr(computing, "THERMAL", tmp_path)
    monkeypatch.setattr(computing, "CLOCKS", tmp_path)
    facts = device_facts(torch.device("cpu"))
    assert facts == {"hottest_celsius": 93.0, "clock_of_highest": 0.4}
    assert told_of(facts).because.endswith("of its device stands out: its clock at 40% of its highest")


def test_a_run_whose_rank_is_slow_goes_on_and_names_it(tmp_path: Path) -> None:
    run = {"health": {"straggler_checks": 1, "straggler_factor": 2.0}}
    slow = {"kind": "slow", "rank": 1, "step": 1, "steps": 8, "factor": 6.0}
    ended = told(tmp_path, [Story("slow", {"dp_shard": 2}, [slow], run, micro_batch=2)])
    assert [start.code for start in ended["slow"]] == [0]
    found = [each for each in records_of(tmp_path / "slow", "decision") if each["what"] == "straggler"]
    assert found and {each["evidence"]["rank"] for each in found} == {1}
    seconds = found[0]["evidence"]["compute_seconds"]
    assert seconds[1] > 2 * seconds[0]


def test_a_place_is_taken_once_and_others_still_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = DecisionRecord("straggler", "", "", "", {"rank": 2, "replaced": 2})
    monkeypatch.setattr(stragglers_module, "read_kind", lambda run_dir, kind: iter([before]))
    monkeypatch.setattr(stragglers_module, "is_supervised", lambda: True)
    health = HealthSpec(straggler_checks=1, on_straggler="replace")
    world = World(0, 4, 0, torch.device("cpu"))
    monkeypatch.setattr(World, "share", lambda self, item, root=0: item)
    for rank, replaced, says in ((2, None, "was slow too"), (1, 1, "another process takes its place")):
        slow = [1.6 if at == rank else 1.0 for at in range(4)]
        (told_of,) = Stragglers(health, world, None, tmp_path).judged(1, slow, [{}] * 4)
        assert told_of.evidence.get("replaced") == replaced and says in told_of.after


def decided(curves: list[list[float]], always: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], int]:
    """Return what all ranks decide over comparisons, and how often each was asked for what it takes."""
    asked = []

    def rank_of(world: World) -> list[Any]:
        stragglers = Stragglers(HealthSpec(straggler_checks=2), world)
        found: list[Any] = []
        for step, seconds in enumerate(curves):
            stragglers._seconds, stragglers._rows, stragglers._steps = 4 * seconds[world.rank], 4, 4
            found += [{**vars(each), "time": None} for each in stragglers.compare(step)]
        return found

    with monkeypatch.context() as patch:
        gather = InThreads.gather
        patch.setattr(stragglers_module, "spread_over", functools.partial(spread_over, few=0))
        patch.setattr("paceline.run.survive.health.stragglers.device_facts", lambda device: {})
        patch.setattr(InThreads, "gather", lambda world, item: (asked.append(world.rank), gather(world, item))[1])
        if always:
            patch.setattr(Stragglers, "_is_worth_asking", lambda *own: True)
        ranks = on_threads(len(curves[0]), rank_of)
    assert all(found == ranks[0] for found in ranks)
    return ranks[0], asked.count(0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_ranks_are_asked_where_one_is_slow_and_else_by_reductions(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(ranks)
    curves = [[draw.choice([1.0, 1.0, 1.1, 1.2, 2.0]) for _ in range(ranks)] for _ in range(30)]
    found, asked = decided(curves, False, monkeypatch)
    every, in_all = decided(curves, True, monkeypatch)
    assert found == every and found and asked < in_all == 30
    assert decided([[1.0 + 0.01 * rank for rank in range(ranks)]] * 5, False, monkeypatch) == ([], 0)
