"""Each of six artificially slowed runs gets its verdict, and a plain run is healthy: the decision, on recorded figures.

The figures are those that runs of test_verdict.py left in their journals (two ranks of a tiny decoder on a CPU, one of
them slowed, or all), in milliseconds, the least and the most of the ranks. What threads waited for a core is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import paceline, records_of, write_spec

from paceline.spec.journal.bound import VerdictRecord
from paceline.spec.journal.kinds import RanksRecord, parse
from paceline.spec.journal.rank_spread import RankSpread
from paceline.spec.journal.record import plain
from paceline.verdict.live import verdict_record
from paceline.verdict.promised import best_change, promise_of
from paceline.verdict.steps_seen import StepsSeen
from paceline.verdict.verdict import BoundVerdict, judge

Spans = dict[str, tuple[float, float]]
PLAIN: Spans = {
    "total": (42.6, 43.9), "data": (0.6, 1.05), "forward_backward": (38.0, 39.0), "reduce": (1.8, 2.5),
    "optimizer": (0.67, 0.67), "other": (0.1, 0.11), "waiting": (0.5, 0.9), "computing": (38.9, 40.1),
    "queued_here": (0.0, 0.1), "queued": (0.0, 0.2), "saving": (0.01, 0.01), "evaluating": (0.0, 0.0),
    "between": (1.2, 1.3),
}  # fmt: skip
SLOWED: dict[str, Spans] = {
    "data": {"total": (174, 174), "data": (0.67, 166), "forward_backward": (4.8, 5.9), "reduce": (1.2, 167),
             "waiting": (0.0, 159), "computing": (5.4, 5.48)},
    "communication": {"total": (216, 217), "forward_backward": (8.8, 9.9), "reduce": (206, 206),
                      "waiting": (197, 199), "computing": (5.36, 5.49)},
    "host": {"between": (31.7, 33.5), "total": (9.8, 10.0), "forward_backward": (6.6, 7.2), "computing": (5.2, 5.6)},
    "straggler": {"total": (86, 88.7), "forward_backward": (10.5, 83.7), "reduce": (3.49, 73.9),
                  "waiting": (0.0, 66.3), "computing": (5.12, 75.3)},
    "checkpoint": {"saving": (339, 340), "total": (24.5, 26.1), "forward_backward": (11.9, 13.3),
                   "reduce": (10.0, 10.7), "waiting": (3.35, 4.88), "computing": (5.46, 5.51)},
    "memory": {"total": (712, 712), "forward_backward": (660, 660), "reduce": (0.3, 0.3), "optimizer": (49, 49),
               "waiting": (0.0, 0.0), "computing": (650, 650)},
}  # fmt: skip
# What the planner said of 28 samples in passes of one, and of the same in one pass (seconds of a step, of its passes).
SMALL = {
    "step_seconds": 0.1354, "pass_seconds": 0.0430,
    "changes": [
        {"cause": "memory", "text": "plan.micro_batch = 2", "step_seconds": 0.0752, "pass_seconds": 0.0230,
         "fits": True},
        {"cause": "memory", "text": "plan.micro_batch = 28", "step_seconds": 0.0193, "pass_seconds": 0.0043,
         "fits": False},
        {"cause": "compute", "text": "matrix products 2 times as fast", "step_seconds": 0.1340, "pass_seconds": 0.0426,
         "fits": True},
    ],
}  # fmt: skip


def seen(kind: str, ranks: int = 2) -> StepsSeen:
    values = {**PLAIN, **SLOWED.get(kind, {})}
    spreads = {name: RankSpread(least / 1e3, (least + most) / 2e3, most / 1e3, 1)
               for name, (least, most) in values.items()}  # fmt: skip
    return StepsSeen(spreads, 7, ranks, "cpu")


def parts_of(verdict: BoundVerdict) -> dict[str, float]:
    return {part.kind: part.share for part in verdict.parts}


@pytest.mark.parametrize("kind", SLOWED)
def test_a_slowed_run_gets_its_verdict(kind: str) -> None:
    found = judge(seen(kind), SMALL if kind == "memory" else None)
    assert found.kind == kind and found.share > 0.5 and not found.healthy, found
    assert found.evidence and found.advice and f"{kind}-bound: " in found.text
    others = [share for name, share in parts_of(found).items() if name not in (kind, "compute")]
    assert max(others) < 0.25, "nothing else bounds it"


def test_a_plain_run_computes_and_is_healthy() -> None:
    found = judge(seen("plain"))
    assert (found.kind, found.healthy) == ("compute", True) and found.text.startswith("compute-bound, healthy: 9"), (
        found
    )


def test_passes_that_score_candidates_are_computing_and_not_the_hosts() -> None:
    """Four candidates a sample, on a CPU and on CUDA, where they run between two steps of the device's clock."""
    scored = {**PLAIN, "other": (55.0, 56.0), "scoring": (54.0, 55.5), "total": (97.0, 98.0)}
    spreads = {name: RankSpread(least / 1e3, least / 1e3, most / 1e3, 0) for name, (least, most) in scored.items()}
    found = judge(StepsSeen(spreads, 7, 2, "cpu"))
    assert found.kind == "compute" and parts_of(found)["host"] < 0.05
    on_cuda = {**spreads, "idle": RankSpread(0.055, 0.055, 0.056, 0), "awaited": RankSpread(0.02, 0.02, 0.02, 0)}
    for name in ("waiting", "computing", "queued", "queued_here"):
        del on_cuda[name]
    found = judge(StepsSeen(on_cuda, 7, 2, "cuda"))
    assert found.kind == "compute" and parts_of(found)["host"] < 0.05
    del on_cuda["scoring"]
    assert judge(StepsSeen(on_cuda, 7, 2, "cuda")).kind == "host", "what nothing explains is the host's"


def test_a_callback_of_one_rank_alone_is_the_hosts_and_counts_once() -> None:
    """Rank 0 logs for 30 ms of each 100; rank 1 waits for it inside of its own step, and nobody for the network."""
    times = {"total": (70.0, 100.0), "between": (0.1, 30.0), "waiting": (0.0, 30.0), "reduce": (1.0, 31.0),
             "forward_backward": (67.0, 67.5), "computing": (68.0, 68.5), "whole": (100.0, 100.1)}  # fmt: skip
    spreads = {name: RankSpread(least / 1e3, least / 1e3, most / 1e3, 0)
               for name, (least, most) in {**PLAIN, **times}.items()}  # fmt: skip
    found = judge(StepsSeen(spreads, 7, 2, "cpu"))
    assert found.kind == "host" and found.share == pytest.approx(0.3, abs=0.01), found
    assert parts_of(found)["communication"] == 0.0


def test_evaluations_that_take_longer_than_training_bound_it() -> None:
    """Held-out samples that are slow to read: four fifths of the run are evaluations, and training itself is fine."""
    times = {**PLAIN, "evaluating": (170.0, 172.0), "whole": (215.0, 216.0)}
    spreads = {name: RankSpread(least / 1e3, least / 1e3, most / 1e3, 0) for name, (least, most) in times.items()}
    found = judge(StepsSeen(spreads, 7, 2, "cpu"))
    assert found.kind == "evaluation" and found.share == pytest.approx(172 / 216) and not found.healthy
    assert "run.evaluate_every" in found.advice and "172 ms" in found.evidence[0]
    assert "is decided by evaluations" in found.because
    assert "evaluation" not in parts_of(judge(seen("plain"))), "a run that does not evaluate says nothing of it"


def test_many_small_causes_are_not_healthy() -> None:
    half = {"data": (9.0, 9.0), "between": (9.0, 9.0), "waiting": (9.0, 9.0)}
    spreads = {
        name: RankSpread(least, (least + most) / 2, most, 0) for name, (least, most) in {**PLAIN, **half}.items()
    }
    found = judge(StepsSeen(spreads, 7, 2, "cpu"))
    assert found.kind == "compute" and not found.healthy and "healthy" not in found.text


def test_who_is_slow_is_named_of_many_ranks_too() -> None:
    times = {
        name: RankSpread(least, least, most, 5) for name, (least, most) in {**PLAIN, **SLOWED["straggler"]}.items()
    }
    found = judge(StepsSeen(times, 7, 64, "cpu"))
    assert found.kind == "straggler" and found.evidence[0].startswith("rank 5 computes")
    assert parts_of(judge(StepsSeen(times, 7, 64, "cpu", whole=False))).keys().isdisjoint({"straggler"}), "only rank 0"


def test_on_cuda_a_rank_is_slow_only_where_others_wait_for_it() -> None:
    def cuda(reduce: tuple[float, float]) -> BoundVerdict:
        times = {"total": (1.0, 1.0), "data": (0.0, 0.0), "forward_backward": (0.3, 0.9), "reduce": reduce,
                 "idle": (0.0, 0.0), "awaited": (0.2, 0.8)}  # fmt: skip
        return judge(StepsSeen({name: RankSpread(a, a, b, 3) for name, (a, b) in times.items()}, 9, 8, "cuda"))

    assert cuda((0.05, 0.65)).kind == "straggler"
    assert "straggler" not in parts_of(cuda((0.05, 0.05))) or parts_of(cuda((0.05, 0.05)))["straggler"] == 0


def test_what_a_larger_micro_batch_would_bring_is_the_planners_word() -> None:
    found = judge(seen("memory"), SMALL)
    assert "plan.micro_batch = 28" in found.evidence[0] and found.evidence[1] == "which the memory does not hold"
    assert found.advice.startswith("plan.micro_batch = 2, and less memory")
    assert found.promise == "by forecast, with plan.micro_batch = 2 steps are 1.80 times as fast"
    assert judge(seen("memory")).kind == "compute", "a run by itself sees one micro-batch alone"
    best = {**SMALL, "changes": SMALL["changes"][-1:]}  # type: ignore[index]
    assert judge(seen("memory"), best).kind == "compute" and best_change(best, "memory") is None


def test_a_pipeline_that_fills_and_drains_is_no_communication() -> None:
    """Four stages and four micro-batches: of seven turns each stage waits for three."""
    turns = {"total": (70.0, 70.0), "forward_backward": (70.0, 70.0), "reduce": (0.0, 0.0), "waiting": (30.0, 31.0),
             "computing": (39.0, 40.0), "between": (0.0, 0.0), "data": (0.0, 0.0)}  # fmt: skip
    spreads = {name: RankSpread(least / 1e3, least / 1e3, most / 1e3, 1) for name, (least, most) in turns.items()}
    ran = StepsSeen(spreads, 7, 4, "cpu")
    told = {"step_seconds": 0.07, "pass_seconds": 0.04, "bubble_seconds": 0.03, "changes": [
        {"cause": "pipeline", "text": "plan.micro_batch = 1", "step_seconds": 0.05, "pass_seconds": 0.04,
         "bubble_seconds": 0.01, "fits": True}]}  # fmt: skip
    found = judge(ran, told)
    assert found.kind == "pipeline" and found.share == pytest.approx(30 / 70) and "more micro-batches" in found.advice
    assert parts_of(found)["communication"] == pytest.approx(0.0, abs=1e-9)
    assert found.promise == "by forecast, with plan.micro_batch = 1 steps are 1.40 times as fast"
    slow = StepsSeen({**spreads, "waiting": RankSpread(0.055, 0.055, 0.055, 1)}, 7, 4, "cpu")
    assert parts_of(judge(slow, told))["communication"] == pytest.approx(25 / 70), "what is beyond the bubble"
    assert "pipeline" not in parts_of(judge(ran, {**told, "bubble_seconds": 0.0})), "no pipeline"
    on_gpu = {**spreads, "idle": RankSpread(0.0, 0.0, 0.0, 0)}
    del on_gpu["waiting"], on_gpu["computing"]
    assert parts_of(judge(StepsSeen(on_gpu, 7, 4, "cuda"), told))["pipeline"] == pytest.approx(30 / 70)


@pytest.mark.parametrize("outlook", [{}, {"changes": None}, {"changes": []}, {"step_seconds": "nan", "changes": []}])
def test_a_journal_that_tells_of_no_change_promises_nothing(outlook: dict[str, Any]) -> None:
    assert best_change(outlook, "memory") is None and promise_of(outlook, "compute") == ""
    assert judge(seen("plain"), outlook).promise == ""


def test_the_record_of_a_live_run_reads_back() -> None:
    spreads = {name: {"min": least / 1e3, "median": least / 1e3, "max": most / 1e3, "rank": 1}
               for name, (least, most) in {**PLAIN, **SLOWED["straggler"]}.items()}  # fmt: skip
    found = verdict_record(RanksRecord(20, 20, 2, "cpu", spreads), None)
    assert found is not None and found.short == f"straggler-bound {found.shares['straggler']:.0%}"
    again = parse(plain(found))
    assert isinstance(again, VerdictRecord) and again == found
    assert verdict_record(RanksRecord(20, 20, 2, "cpu", {}), None) is None


@pytest.mark.deep
def test_a_run_of_small_micro_batches_is_told_so(tmp_path: Path) -> None:
    found = {}
    for name, plan in (("small", "micro_batch = 1"), ("plain", "")):
        spec = write_spec(tmp_path, tmp_path / name, plan=plan)
        more = ["--set", "task.global_batch='56 samples'", "--set", "run.check_every='8 steps'"]
        ended = paceline("train", spec, *more, "--set", "run.checkpoint_every='none'", timeout=240)
        assert ended.returncode == 0, ended.stderr
        found[name] = records_of(tmp_path / name, "verdict")[-1]
        assert f"{found[name]['bound']}-bound" in ended.stdout
    small, usual = found["small"]["shares"], found["plain"]["shares"]
    # A thread without a core is the host's: on a busy machine that is most of it.
    assert small["memory"] > 0.1 and usual.get("memory", 0.0) == 0.0
    assert found["small"]["bound"] in ("memory", "host") and found["plain"]["bound"] in ("compute", "host")
    assert found["small"]["bound"] == "host" or "plan.micro_batch = " in found["small"]["promise"]


def test_a_run_that_computes_is_told_what_would_make_it_compute_less() -> None:
    def change(text: str, seconds: float, fits: bool = True) -> dict[str, Any]:
        return {"cause": "cheaper", "text": text, "step_seconds": seconds, "pass_seconds": seconds, "fits": fits}

    outlook: dict[str, Any] = {
        "step_seconds": 0.04, "pass_seconds": 0.03,
        "changes": [
            change("plan.compile = true", 0.0398), change("plan.recompute = 'selective'", 0.032),
            change("plan.precision = 'bf16'", 0.02), change("plan.recompute = 'none'", 0.01, fits=False),
        ],
    }  # fmt: skip
    words = "more devices or by forecast plan.precision = 'bf16' (2.00 times as fast), plan.recompute = 'selective'"
    assert judge(seen("plain"), outlook).advice == f"{words} (1.25 times as fast)"
    spent = {**outlook, "changes": [change("plan.compile = true", 0.0398)]}
    assert judge(seen("plain"), spent).advice == "more devices"
    assert "--explain" in judge(seen("plain")).advice, "nobody has priced anything"
