"""Batches that a thread has read ahead are those that would be read in time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests_shared import PaddedText, plan_of

from paceline.errors import DataError
from paceline.run.loop.loader import BatchStream, StepBatch
from paceline.spec.layout import Layout
from paceline.task.data.ahead import ReadAhead, may_read_in_a_thread
from paceline.task.data.rows.packed import SaysStarts
from paceline.task.data.rows.windows import TokenSource
from paceline.task.data.sources.mapped import MapSource

CPU = torch.device("cpu")


def same(one: StepBatch, other: StepBatch) -> bool:
    pairs = zip(one.micro_batches, other.micro_batches, strict=True)
    return (one.step, one.position) == (other.step, other.position) and all(
        np.array_equal(a.ids, b.ids) and torch.equal(a.data["tokens"], b.data["tokens"]) for a, b in pairs
    )


def test_a_thread_reads_what_the_loop_would_read() -> None:
    plan = plan_of(Layout(dp_replicate=2))
    readers: list[str] = []

    class Watched(PaddedText):
        def read(self, ids: np.ndarray, positions: np.ndarray | None = None) -> dict[str, torch.Tensor]:
            readers.append(threading.current_thread().name)
            return super().read(ids, positions)

    prepared: list[str] = []
    stream = BatchStream(Watched(), 7, plan, 1, CPU)
    ahead = ReadAhead(stream.at, prepare=lambda: prepared.append(threading.current_thread().name))
    alone = BatchStream(PaddedText(), 7, plan, 1, CPU)
    for step in range(1, 5):
        position = (step - 1) * plan.batch_samples
        batch = ahead.take(position, step)
        ahead.begin(position + plan.batch_samples, step + 1)
        assert same(batch, alone.at(position, step))
    ahead.begin(999, 9)  # of a plan that is no more
    assert same(ahead.take(0, 1), alone.at(0, 1)), "what was not asked for is dropped"
    ahead.close()
    assert len(set(readers)) == 1 and readers[0].startswith("paceline-read") and prepared == [readers[0]]
    assert threading.main_thread().name not in readers
    assert not [thread for thread in threading.enumerate() if thread.name == readers[0]]


def test_an_error_is_raised_where_the_batch_is_taken() -> None:
    def read(position: int) -> Any:
        raise DataError(f"row {position} cannot be read", "the disk is gone", "another disk")

    for prepare in (None, lambda: None):
        ahead = ReadAhead(read, prepare)
        ahead.begin(3)
        with pytest.raises(DataError, match="row 3 cannot be read"):
            ahead.take(3)
        ahead.begin(4)
        ahead.close()


def test_without_a_thread_this_one_reads_when_it_has_time() -> None:
    reads: list[int] = []

    def read(position: int) -> int:
        reads.append(position)
        return position * position

    ahead = ReadAhead(read)
    ahead.begin(3)
    assert reads == [], "on a CPU the loop reads when it comes to it"
    assert ahead.take(3) == 9 and reads == [3]
    ahead.begin(4)
    ahead.read_begun()
    ahead.read_begun()
    assert reads == [3, 4] and ahead.take(4) == 16 and reads == [3, 4]
    ahead.begin(5)
    ahead.read_begun()
    assert ahead.take(6) == 36 and reads == [3, 4, 5, 6]
    ahead.read_begun()
    assert reads == [3, 4, 5, 6], "nothing was begun"


def test_who_may_be_read_in_a_thread() -> None:
    assert may_read_in_a_thread(TokenSource.__new__(TokenSource))
    assert may_read_in_a_thread(SaysStarts(TokenSource.__new__(TokenSource)))
    assert not may_read_in_a_thread(MapSource([1, 2], seed=0)), "its rows set the global generators"
    assert not may_read_in_a_thread(PaddedText()), "it does not say so"
