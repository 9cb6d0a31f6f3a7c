"""A running job is traced where its directory asks for that, and pays nothing where it does not."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import paceline, records_of, start, wait_for_step, wait_until, write_spec
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of

from paceline.errors import DataError
from paceline.lock import take
from paceline.observe.traces.trace_spans import read_trace
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.run.trace.tensors import grown, tensors_held
from paceline.session.verbs.tracing import summaries, take_trace
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.spec.watch.traced import (
    FOLDER,
    FRESH_SECONDS,
    NAME,
    TraceRequest,
    ask_for_trace,
    requested_trace,
    trace_file,
    trace_under_way,
)
from paceline.supervise.told.brief import Brief
from paceline.units import Amount


def train(run_dir: Path, steps: int, kept: list[torch.Tensor] | None = None, each: Any = None) -> Training:
    plan = plan_of(Layout(), batch=3, micro_batch=3)
    task = decoder_task(stop=Amount(steps, "steps"), data=PaddedText())
    run = RunSpec(checkpoint_every=None, evaluate_every=None)
    brief = Brief(plan, steps, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    world = World(0, 1, 0, torch.device("cpu"))
    training = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, world, run_dir)
    for batch in training:
        training.step(batch)
        if kept is not None:
            kept.append(torch.zeros(1000))
        if each is not None:
            each(training)
    return training


def test_the_steps_asked_for_are_traced_and_what_leaks_is_named(tmp_path: Path) -> None:
    asked = ask_for_trace(tmp_path, TraceRequest(first=3, last=5, memory=True, by="page"))
    before = threading.active_count()
    train(tmp_path, 6, kept=(kept := []))
    wait_until(lambda: threading.active_count() <= before)  # nobody looks on when the run has ended
    (record,) = records_of(tmp_path, "trace")
    assert (record["first"], record["last"], record["by"], record["ranks"]) == (3, 5, "page", None)
    (found,) = summaries(tmp_path)
    assert (found.first, found.last, found.rank) == (3, 5, 0) and found.step_seconds > 0
    names = {span.name for span in read_trace(trace_file(asked.folder(tmp_path), 0)).spans}
    assert {"paceline: wait for the batch", "paceline: forward and backward passes", "paceline: optimizer"} <= names
    assert any(each["tensors"].startswith("(1000,) float32") and each["more"] == 3 for each in found.grown), found.grown
    assert len(kept) == 6
    train(tmp_path.with_name("again"), 2)
    assert not (tmp_path.with_name("again") / FOLDER).exists(), "nobody asked"


def test_rank_0_names_the_steps_where_nobody_has(tmp_path: Path) -> None:
    asked = ask_for_trace(tmp_path, TraceRequest(last=2))
    train(tmp_path, 5)
    named = requested_trace(tmp_path)
    assert named is not None and named.number == asked.number and named.first is not None
    assert named.last == named.first + 1
    ask_for_trace(tmp_path, dataclasses.replace(named, first=1, last=2, number=0))
    train(tmp_path, 8)
    assert not trace_file(requested_trace(tmp_path).folder(tmp_path), 0).exists(), "those steps were over"  # type: ignore[union-attr]


def test_a_request_is_not_taken_away_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    journal = tmp_path / "journal" / "0001.jsonl"
    assert trace_under_way(tmp_path) is None
    asked = ask_for_trace(tmp_path, TraceRequest(last=3))
    assert trace_under_way(tmp_path) == asked, "no rank has seen it"
    named = ask_for_trace(tmp_path, dataclasses.replace(asked, first=100, last=102))
    assert trace_under_way(tmp_path) == named, "and now one has"
    old = dataclasses.replace(named, number=named.number - int((FRESH_SECONDS + 1) * 1e9))
    assert trace_under_way(tmp_path) is not None and ask_for_trace(tmp_path, old) == old
    assert trace_under_way(tmp_path) is None, "its steps are far ahead: it gives way"
    journal.write_text('{"kind": "step", "step": 100}\n')
    assert trace_under_way(tmp_path) == old, "they are being traced"
    with take(tmp_path), pytest.raises(DataError, match="steps 100 to 102 is under way"):
        take_trace(tmp_path, TraceRequest(last=2), 0, lambda line: None)
    assert requested_trace(tmp_path) == old
    journal.write_text('{"kind": "step", "step": 102}\n')
    with take(tmp_path):
        assert trace_under_way(tmp_path) is None and take_trace(tmp_path, TraceRequest(last=2), 0, print) is None
    assert requested_trace(tmp_path) != old


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"last": "x", "first": 1, "ranks": null, "number": 1}',
                                  '{"last": 3, "ranks": [null]}', '{"last": 3, "ranks": null, "more": 1}'])  # fmt: skip
def test_a_file_that_asks_for_nothing_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / NAME).write_text(text)
    assert requested_trace(tmp_path) is None


def test_what_has_grown_is_told_most_first() -> None:
    before = tensors_held(torch.nn.Linear(2, 2))
    kept = [torch.zeros(321, dtype=torch.float64) for _ in range(4)]
    found = grown(before, tensors_held(torch.nn.Linear(2, 2)))
    assert {"tensors": "(321,) float64 on cpu", "more": 4, "bytes": 4 * 321 * 8} in found and kept


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_runs_is_traced_without_stopping(ranks: int, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    plan = "dp_replicate = 2" if ranks == 2 else ""
    process = start("train", write_spec(tmp_path, run_dir, devices=ranks, plan=plan, steps=20_000),
                    "--set", "run.checkpoint_every='none'", "--set", "run.log_every='5000 steps'")  # fmt: skip
    wait_for_step(run_dir, 3, process)
    asked = paceline("trace", run_dir, "--steps", "2", "--memory", timeout=300)
    assert asked.returncode == 0, asked.stderr
    assert all(f"rank {rank}, steps" in asked.stdout for rank in range(ranks)) and "products" in asked.stdout
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: len(records_of(run_dir, "trace")) == 2, timeout=300)
    assert records_of(run_dir, "trace")[-1]["by"] == "signal"
    if ranks == 2:
        one = paceline("trace", run_dir, "--steps", "1", "--ranks", "1", timeout=300)
        assert one.returncode == 0 and "rank 1, step" in one.stdout and "rank 0" not in one.stdout, one.stderr
        assert "of communication" not in one.stdout or "hidden" in one.stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 75
    process.communicate()
    over = paceline("trace", run_dir, "--steps", "3")
    assert over.returncode == 2 and "nothing trains" in over.stderr
    assert paceline("trace", run_dir, "--summary", "--json").returncode == 0
