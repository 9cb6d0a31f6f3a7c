"""Sinks: whoever starts a run adds one of his own, and it takes every record that the journal holds."""

from __future__ import annotations

import dataclasses
import math
import threading
from pathlib import Path

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.observe.exports.tensorboard import TensorBoardSink, asked_sinks
from paceline.run.loop.training import Training
from paceline.run.process.brief import Brief
from paceline.run.process.world import World
from paceline.run.record.sink import Sink
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.kinds import StepRecord
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.journal.record import Record, now, plain, read
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.units import Amount


class Kept:
    """A sink that keeps what it takes."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.closed = run_dir, 0
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        assert not self.closed
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


class Torn(Kept):
    """A sink that fails at a step."""

    def write(self, record: Record) -> None:
        super().write(record)
        if isinstance(record, StepRecord):
            raise OSError("no pipe")


def train(run_dir: Path, *sinks: Sink) -> None:
    task = decoder_task(stop=Amount(2, "steps"))
    run = RunSpec(checkpoint_every=None, evaluate_every=None, record_samples=True)
    spec = Spec(task=task, cluster=ClusterSpec(learn=False), run=run)
    brief = Brief(plan_of(Layout()), 2, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan, 1.0, math.nan, PlannedRecord())
    opened = [lambda folder, sink=sink: sink for sink in sinks]  # type: ignore[misc]
    training = Training(spec, brief, World(0, 1, 0, torch.device("cpu")), run_dir, opened)
    for batch in training:
        training.step(batch)


def test_a_sink_takes_every_record_of_the_journal_and_is_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept(tmp_path)
    train(tmp_path, kept)
    said = list(read_journal(tmp_path))
    assert [record.KIND for record in kept.records] == [line["kind"] for line in said]
    assert {"run_started", "step", "memory", "checkpoint", "run_ended"} <= {line["kind"] for line in said}
    steps = [plain(record) for record in kept.records if isinstance(record, StepRecord)]
    assert [(step["loss"], step["step"], list(step["sample_ids"])) for step in steps] == [
        (line["loss"], line["step"], line["sample_ids"]) for line in said if line["kind"] == "step"
    ]
    assert all(dataclasses.is_dataclass(record) for record in kept.records) and kept.closed == 1
    out = capsys.readouterr().out
    assert "step  1/2" in out and "done" in out, "the status line is one of the sinks"


def test_a_sink_that_fails_ends_the_run_on_record_and_all_are_closed(tmp_path: Path) -> None:
    torn, kept = Torn(tmp_path), Kept(tmp_path)
    with pytest.raises(OSError, match="no pipe"):
        train(tmp_path, kept, torn)
    assert torn.closed == kept.closed == 1
    end = list(read_journal(tmp_path))[-1]
    assert (end["kind"], end["status"]) == ("run_ended", "failed") and "no pipe" in end["error"]["what"]


def test_tensorboard_is_a_sink_that_the_options_ask_for() -> None:
    assert asked_sinks(RunSpec()) == []
    assert asked_sinks(RunSpec(tensorboard=True)) == [TensorBoardSink]


def test_a_full_disk_ends_the_pictures_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # TensorBoard's own thread ends with the error
    sink = TensorBoardSink(tmp_path)
    assert sink._writer is not None
    with Path("/dev/full").open("wb", buffering=0) as full:
        sink._writer._file._async_writer._writer._writer = full  # what its thread writes to
        for step in range(1, 50):
            sink.write(now(read(StepRecord, {"step": step, "loss": 1.0, "seconds": {"total": 1.0}})))
        sink.close()
    told = capsys.readouterr().out
    assert told.count("warning  event files") == 1 and "No space left on device" in told
