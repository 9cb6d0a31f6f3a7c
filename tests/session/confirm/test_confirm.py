"""`micro_batch = "auto"`: confirmed before the first step, repeated by a resumed run, halved where memory is short."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import in_process, paceline, records_of, steps_of, write_spec

from paceline.plan.search.micro_batch import TriedMicroBatch, taken
from paceline.session.confirm.device import cut
from paceline.spec.arguments import make_spec
from paceline.spec.load import load_spec
from paceline.spec.plan import CONFIRMED, PlanSpec
from paceline.task.data.order.of_source import FiledOrder
from paceline.units import Amount


def tried(micro_batch: int, seconds: float, spread: float = 0.0) -> TriedMicroBatch:
    return TriedMicroBatch(micro_batch, seconds, spread, 0.0)


@pytest.mark.parametrize(
    ("made", "best"),
    [
        ([tried(1, 1.0), tried(2, 0.9), tried(4, 0.7)], 4),
        ([tried(4, 0.99), tried(1, 1.0), tried(2, 0.995)], 1),  # faster by less than can be told
        ([tried(1, 1.0, spread=0.2), tried(2, 0.85)], 1),
        ([tried(1, 1.0), tried(2, 0.85, spread=0.2), tried(4, 0.7)], 4),
        ([tried(1, 1.0), tried(2, 1.5), tried(4, 0.9)], 4),
    ],
)
def test_a_larger_one_is_taken_only_where_it_is_measurably_faster(made: list[TriedMicroBatch], best: int) -> None:
    assert taken(made).micro_batch == best


def test_auto_is_a_word_of_files_and_of_python(tmp_path: Path) -> None:
    spec = load_spec(write_spec(tmp_path, tmp_path / "run", plan='micro_batch = "auto"'))
    assert spec.plan.micro_batch == CONFIRMED and spec.plan.confirms and not spec.plan.asked_micro_batch
    assert make_spec(spec.task, {"micro_batch": "auto"}).plan.confirms and PlanSpec(micro_batch="auto").confirms  # type: ignore[arg-type]
    assert PlanSpec(micro_batch=3).asked_micro_batch == 3 and not PlanSpec().confirms


def test_a_probe_settles_it_and_the_run_changes_it_where_memory_gets_short(tmp_path: Path) -> None:
    """Two ranks; any use of memory is too much, so the first look halves it. The resumed run begins with that."""
    run_dir = tmp_path / "run"
    path = write_spec(tmp_path, run_dir, 2, 'dp_replicate = 2\nmicro_batch = "auto"', steps=6, precision="fp64")
    pressed = ["--set", "run.health.memory_pressure=0.000001"]
    first = paceline("train", path, *pressed, "--set", "run.time_limit=1 s")
    assert first.returncode in (0, 75), first.stderr
    settled, *later = [each for each in records_of(run_dir, "decision") if each["what"] == "micro_batch"]
    sizes = [each["micro_batch"] for each in settled["evidence"]["tried"]]
    assert settled["to"] in sizes and sizes == sorted(sizes) and len(sizes) >= 2 and "measured" in settled["because"]
    assert all(each["seconds"] > 0 and each["peak_bytes"] > 0 for each in settled["evidence"]["tried"])
    (halved, *_) = later
    assert halved["from"] == settled["to"] and halved["to"] == max(1, settled["to"] // 2)
    again = paceline("train", path)
    assert again.returncode == 0, again.stderr
    told = [each for each in records_of(run_dir, "decision") if each["what"] == "micro_batch"][-1]
    if first.returncode:
        assert told["because"] == "an earlier start of this run has settled it" and told["to"] == later[-1]["to"]
    plain = tmp_path / "plain"
    one = write_spec(tmp_path, plain, 1, "micro_batch = 7", steps=6, precision="fp64")
    assert in_process("train", one).returncode == 0
    for own, other in zip(steps_of(run_dir), steps_of(plain), strict=True):
        assert own["sample_ids"] == other["sample_ids"] and own["loss"] == pytest.approx(other["loss"], rel=1e-10)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)


def test_the_probe_cuts_a_budget_of_tokens_as_a_run_does() -> None:
    """Rows of two tokens where the longest has eight: micro-batches of the longest pass four times as many."""
    source = SimpleNamespace(lengths=[2] * 6 + [8], order=FiledOrder(7), samples=7)
    by_length = SimpleNamespace(batch_rows="by_length", seed=0, global_batch=Amount(12, "tokens"))
    assert cut(by_length, source, 1, [1]) == (4, {1: 4}), "one of the longest is as many tokens as four"
    assert cut(by_length, source, 4, [1, 2]) == (6, {1: 4, 2: 8}), "no more than the first batch has"
    assert cut(SimpleNamespace(batch_rows="fixed", seed=0), source, 4, [1, 2]) == (4, {1: 1, 2: 2})


def test_a_plan_is_the_same_but_for_its_passes() -> None:
    from paceline.plan.feasible.micro_batch import with_micro_batch
    from paceline.spec.layout import Layout
    from paceline.spec.plan import Plan

    plan = Plan(Layout(dp_replicate=3), batch_samples=13, micro_batch=5, accumulation=1)
    halved = with_micro_batch(plan, 2)
    assert (halved.micro_batch, halved.accumulation) == (2, 3)
    assert dataclasses.replace(halved, micro_batch=5, accumulation=1) == plan
    assert with_micro_batch(plan, 100).micro_batch == 5, "no more than the largest part of the batch"
