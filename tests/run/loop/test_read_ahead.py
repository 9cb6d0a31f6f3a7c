"""However many batches are read ahead, a run trains on what it would have read, and saves where it has trained."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import wait_until
from tests_shared import SEQ_LEN, PaddedText, decoder_task, plan_of

from paceline.run.loop.loader import BatchStream
from paceline.run.loop.step import Stepper, StepStats
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.cluster import ClusterSpec
from paceline.spec.journal.planned import PlannedRecord
from paceline.spec.journal.reading import read_journal
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.run import RunSpec
from paceline.supervise.told.brief import Brief
from paceline.task.data.depth import DepthRule
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.read_ahead import THREAD_NAME, ReadAhead
from paceline.units import Amount

STEPS, BATCH, DEPTH = 12, 6, 5
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "os.system")
ALONE = World(0, 1, 0, torch.device("cpu"))


class Readable(PaddedText):
    """Rows that any thread may read; it keeps which batches were asked for, and by whom."""

    reads_in_threads = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self._lock = threading.Lock()

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return the rows."""
        with self._lock:
            self.asked.append((int(positions[0]) if positions is not None else -1, threading.current_thread().name))
        return super().read(ids, positions)


class KilledHere(Exception):
    """What ends a process in the tests, at once."""


def training(run_dir: Path, source: Readable) -> Training:
    run = RunSpec(checkpoint_every=Amount(3, "steps"), evaluate_every=None, record_samples=True)
    task = decoder_task(stop=Amount(STEPS, "steps"), data=source)
    brief = Brief(plan_of(Layout(), batch=BATCH, micro_batch=6), STEPS, SEQ_LEN, "tokens", "cpu", 1, 1.0, math.nan,
                  1.0, math.nan, PlannedRecord())  # fmt: skip
    made = Training(Spec(task=task, cluster=ClusterSpec(learn=False), run=run), brief, ALONE, run_dir)
    made._under._rule.depth = DEPTH  # as after reads that wait for long
    return made


def until(run: Training, step: int) -> None:
    """Train up to a step, and leave as a process does that is killed: nothing is saved or ended."""
    with pytest.raises(KilledHere):
        for batch in run:
            stats = run.step(batch)
            if stats.step == step:
                raise KilledHere


@pytest.mark.parametrize("killed_at", [4, 5, 8])
def test_what_is_saved_is_the_position_of_what_was_trained(tmp_path: Path, killed_at: int) -> None:
    first, second = Readable(), Readable()
    run = training(tmp_path, first)
    until(run, killed_at)
    beyond = (killed_at + 2) * BATCH
    wait_until(lambda: max(position for position, _ in first.asked) >= beyond)  # far beyond what it trains on
    run.take_down()
    assert any(name.startswith("paceline-read") for _, name in first.asked)
    saved = killed_at // 3 * 3
    again = training(tmp_path, second)
    assert again.progress.position == saved * BATCH
    for batch in again:
        again.step(batch)
    steps: dict[int, Any] = {each["step"]: each for each in read_journal(tmp_path) if each["kind"] == "step"}
    read = [sample for step in range(1, STEPS + 1) for sample in steps[step]["sample_ids"]]
    order = sample_ids(again.spec.task.seed, np.arange(STEPS * BATCH, dtype=np.int64), PaddedText.samples)
    assert read == order.tolist(), "each sample of the order once, whatever was read ahead"


class Waits(Readable):
    """Rows that are waited for: twice as long as the most that was ever done between two reads."""

    def __init__(self) -> None:
        super().__init__()
        self._read_at, self._longest = time.perf_counter(), 0.0

    def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
        """Return the rows, late."""
        self._longest = max(self._longest, time.perf_counter() - self._read_at)  # threads come sooner: it stays slow
        time.sleep(2 * self._longest)  # what is slow, and no synchronisation
        found = super().read(ids, positions)
        self._read_at = time.perf_counter()
        return found


def test_a_run_whose_reads_wait_gives_them_to_threads_and_says_why(tmp_path: Path) -> None:
    source = Waits()
    run = training(tmp_path, source)
    run._under._rule.depth = 0  # as a CPU begins
    for batch in run:
        run.step(batch)
    names = [name for _, name in source.asked]
    assert names[0] == "MainThread" and names[-1].startswith("paceline-read")
    told = [each for each in read_journal(tmp_path) if each.get("what") == "read ahead"]
    assert told and told[0]["from"] == "0 batches" and told[0]["because"].startswith("reads take up to")
    assert told[0]["evidence"]["waited_seconds"] > 0 and told[0]["evidence"]["batch_bytes"] > 0
    (ranks,) = [each for each in read_journal(tmp_path) if each["kind"] == "ranks"][-1:]
    assert ranks["spreads"]["read"]["max"] > 0 and 0 <= ranks["spreads"]["ready"]["min"] <= 1


FORKED: list[str] = []


def test_a_run_that_reads_ahead_forks_nothing_and_starts_no_process(tmp_path: Path) -> None:
    """Batches are read by threads: a forked process would share locks and devices, another one would copy the rows."""
    FORKED.clear()
    sys.addaudithook(lambda event, given: FORKED.append(event) if event in STARTS else None)  # it stays
    source = Readable()
    run = training(tmp_path, source)
    for batch in run:
        run.step(batch)
    run.take_down()
    assert any(name.startswith(THREAD_NAME) for _, name in source.asked) and FORKED == []
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    assert FORKED == ["os.posix_spawn"], "a process would have been seen"


def test_batches_for_a_gpu_are_pinned_by_the_thread_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that trains finds them where the device can fetch them by itself."""
    pinned_by: list[str] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned_by.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    plan = plan_of(Layout(), batch=BATCH, micro_batch=6)
    stream = BatchStream(Readable(), 0, plan, 0, torch.device("cuda"))
    rule = DepthRule(most_bytes=10**9, on_device=True, bytes_of=lambda _: 0)
    ahead = ReadAhead(stream.on_host, prepare=lambda: None, rule=rule)
    for step in (1, 2):
        ahead.begin(BATCH * (step - 1), step)
    for step in (1, 2):
        ahead.take(BATCH * (step - 1), step)
    ahead.close()
    leaves = len(Readable().read(np.arange(1)))
    assert len(pinned_by) == 2 * leaves and all(name.startswith(THREAD_NAME) for name in pinned_by)


def test_a_cpu_that_computes_reads_nothing_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a device of its own leaves the host free: on a CPU the step would wait for the read."""
    made, told = Stepper.step, list[Any]()

    def step(self: Stepper, *args: Any, **more: Any) -> StepStats:
        told.append(more.get("while_busy"))
        return made(self, *args, **more)

    monkeypatch.setattr(Stepper, "step", step)
    run = training(tmp_path, Readable())
    for batch in run:
        run.step(batch)
    assert told == [None] * STEPS
