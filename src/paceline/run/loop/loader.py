"""Which rows a rank reads in a step, and in how many micro-batches: a pure function of the sample position."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.run.numerics.nested import each_leaf, leaves_of
from paceline.spec.layout import accumulation_for
from paceline.spec.plan import Plan, rows_refusal
from paceline.task.data.order.lengths import lengths_of
from paceline.task.data.order.many_steps import StepIds
from paceline.task.data.order.mixture import past_end
from paceline.task.data.order.of_source import ids_at, is_scattered, order_of
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.protocol import (
    FinishesBatches,
    ReadsAhead,
    Source,
    filled_for,
    finishing,
    read_scattered,
    reading_ahead,
)
from paceline.task.data.rows_together import RowsTogether, StepRows

HELD_OUT_SEED = 0
MOST_KEPT = 8  # batches that a measurement trains on again


@dataclass(slots=True)  # frozen, each would take a microsecond more to make: a tenth of reading a row
class MicroBatch:
    """The rows of one forward pass. `counts` is False for a stand-in that only keeps the ranks in step.

    `step` is the number of the update that the rows are read for; evaluations have none.
    """

    data: Any
    ids: np.ndarray  # int64 [rows], sample ids
    position: int  # global position of the first row
    counts: bool = True
    step: int = 0
    places: np.ndarray | None = None  # int64 [rows], positions of rows that do not follow each other
    objective: Any = None  # of these rows, in the place of the task's


@dataclass(slots=True)
class StepBatch:
    """This rank's part of one global batch."""

    step: int  # 1-based number of the update this batch makes
    position: int  # samples consumed before it, over all ranks and epochs
    samples: int  # samples in the global batch
    micro_batches: tuple[MicroBatch, ...]

    def __iter__(self) -> NoReturn:
        """Refuse `inputs, labels = batch`, as a loop over a DataLoader has it."""
        raise ConfigError(
            "a batch of a run was taken apart",
            "it is this device's part of the global batch, in micro-batches, and is given to run.step as it is",
            "stats = run.step(batch); rows are changed in the data set, inputs and labels in the objective, and "
            "batch.micro_batches[0].data is a look at them",
        )

    def __getitem__(self, name: object) -> NoReturn:
        """Refuse `batch["images"]`, as `__iter__` does."""
        self.__iter__()


class BatchSizes(Protocol):
    """Says how large batches are, where they differ. Alike on all ranks."""

    def at(self, step: int, position: int) -> int:
        """Return the samples of update `step`, before which `position` samples are consumed."""

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return how many samples of that batch a rank passes at once, where it usually passes `micro_batch`."""


def split_rows(rows: range, parts: int) -> list[range]:
    """Return `rows` in `parts` contiguous runs, as even as can be; with few rows some are empty."""
    count = len(rows)
    return [rows[count * part // parts : count * (part + 1) // parts] for part in range(parts)]


def to_device(data: object, device: torch.device) -> object:
    """Return the nested batch with its tensors on `device`, copied without waiting where the device allows it."""
    if device.type == "cpu":
        return data
    return each_leaf(
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf,
        pinned(data, device),
    )


def pinned(data: object, device: torch.device) -> object:
    """Return the nested batch with its tensors where `device` can fetch them by itself: in pinned host memory."""
    if device.type == "cpu":
        return data
    return each_leaf(lambda leaf: leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf, data)


def bytes_of(batch: StepBatch) -> int:
    """Return how many bytes the tensors of a batch take."""
    leaves = leaves_of([micro.data for micro in batch.micro_batches])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def moved(batch: StepBatch, move: Callable[[object], object]) -> StepBatch:
    """Return the batch with `move` called on the data of each micro-batch."""
    micro_batches = tuple(dataclasses.replace(micro, data=move(micro.data)) for micro in batch.micro_batches)
    return dataclasses.replace(batch, micro_batches=micro_batches)


@dataclass
class BatchStream:
    """Reads a rank's part of the global batch at any position. Holds no position of its own.

    The global batch of n samples at position p holds those at positions p to p + n - 1 of an endless stream in which
    every epoch is a fresh permutation; epochs may end inside a batch. Data rank r reads a contiguous part of the rows,
    so all layouts see the same samples in the same step. All ranks pass as many micro-batches, whatever the parts: a
    rank of fewer rows has fewer in each, and collectives within a pass find every rank.
    """

    source: Source
    seed: int
    plan: Plan
    data_rank: int
    device: torch.device
    sizes: BatchSizes | None = None  # of batches that differ

    def __post_init__(self) -> None:
        if because := rows_refusal(self.plan):
            raise ConfigError("the rows of the plan's data ranks", because, "rows that add up to the batch, or none")
        self.source = filled_for(self.source, self.device.type, self.plan.layout.tp, self.plan.precision)
        # Whether the device finishes batches that the source has only begun, as with images (task/data/protocol.py).
        self._is_cpu = self.device.type == "cpu"
        self.finishing: FinishesBatches | None = finishing(self.source) if self.device.type == "cuda" else None
        if is_scattered(order_of(self.source)):
            read_scattered([self.source])
        self._fetching = reading_ahead(self.source)
        self._end: int | None = getattr(order_of(self.source), "end", None)  # of a mixture whose sources have limits
        self._ids, self._lock = StepIds(self.source, self.seed), threading.Lock()
        self._together = RowsTogether(self.source, self._ids)
        self._cuts: tuple[Plan, dict[tuple[int | None, int | None], tuple[np.ndarray, list[range]]]] = self.plan, {}

    def at(
        self, position: int, step: int | None = None, samples: int | None = None, micro_batch: int | None = None
    ) -> StepBatch:
        """Return this rank's part of the global batch as `on_host` does, on the device."""
        batch = self.on_host(position, step, samples, micro_batch)
        return batch if self._is_cpu and self.finishing is None else moved(batch, self.on_device)

    def samples_at(self, position: int, step: int) -> int:
        """Return the samples of the global batch of update `step`, which starts at a position."""
        if self.sizes is None:
            return self.plan.batch_samples
        with self._lock:  # orders keep what they worked out last
            return self.sizes.at(step, position)

    def _at_once(self, position: int, samples: int) -> int:
        assert self.sizes is not None
        with self._lock:
            return self.sizes.at_once(position, samples, self.plan.micro_batch)

    def on_device(self, data: object) -> object:
        """Return the data of a micro-batch on the device, with what the source leaves to be done there."""
        data = to_device(data, self.device)
        return self.finishing.finish(data) if self.finishing is not None else data

    def on_host(
        self, position: int, step: int | None = None, samples: int | None = None, micro_batch: int | None = None
    ) -> StepBatch:
        """Return this rank's part of the global batch that starts at `position`, which is that of update `step`.

        It is in host memory, from which the device can fetch it. Any thread may call.

        The batch has the plan's size, or that of the step where they differ, or `samples` over all ranks, of which a
        rank passes `micro_batch` at once. All ranks ask for the same. Without a `step` all batches before are taken to
        be as large as the plan's. Raises DataError where the data end within the batch: on all ranks.
        """
        plan = self.plan
        step = position // plan.batch_samples + 1 if step is None else step
        if samples is None and self.sizes is not None:
            samples = self.samples_at(position, step)
            micro_batch = micro_batch or self._at_once(position, samples)
        offsets, parts = self._cut(samples, micro_batch)
        samples = samples or plan.batch_samples
        if self._ends_within(position, samples):
            raise past_end(self._end or 0)
        with self._lock:  # several threads may read several batches
            rows = self._together.at(position, offsets, samples)
            if self._fetching is not None:
                self._expect(self._fetching, rows.positions, samples)
        return self._made(rows, parts, position, step, samples)

    def gathered(self, calls: Sequence[tuple[int, int]]) -> list[Callable[[], StepBatch]] | None:
        """Return what gives the batches of `on_host` at those positions and steps, out of rows that are gathered now.

        What is left to be done neither waits nor takes long. None where rows are not gathered, or batches differ.
        """
        if self.sizes is not None:
            return None
        offsets, parts = self._cut(None, None)
        samples = self.plan.batch_samples
        if any(self._ends_within(position, samples) for position, _ in calls):
            return None
        with self._lock:
            rows = [self._together.at(position, offsets, samples) for position, _ in calls]
        if any(each.gathered is None for each in rows):
            return None
        return [partial(self._made, own, parts, *call, samples) for own, call in zip(rows, calls, strict=True)]

    def _ends_within(self, position: int, samples: int) -> bool:
        """Return whether the data end within a global batch: no rank reads it, though some would find their rows."""
        return self._end is not None and position + samples > self._end

    def _made(self, rows: StepRows, parts: Sequence[range], position: int, step: int, samples: int) -> StepBatch:
        return StepBatch(step, position, samples, tuple([self._read(rows, part, step) for part in parts]))

    def _cut(self, samples: int | None, micro_batch: int | None) -> tuple[np.ndarray, list[range]]:
        """Return this rank's rows of a batch, and its micro-batches in them; most batches are as the one before.

        Where a rank has no row, the batch's first one stands in.
        """
        plan = self.plan
        if self._cuts[0] is not plan:
            self._cuts = plan, {}
        if (known := self._cuts[1].get((samples, micro_batch))) is None:
            rows, passes = plan.rows_of(self.data_rank, samples or 0), plan.accumulation
            if samples is not None or micro_batch is not None:
                passes = _passes(plan, samples or plan.batch_samples, micro_batch or plan.micro_batch)
            offsets = np.arange(rows.start, rows.stop, dtype=np.int64) if rows else np.zeros(1, dtype=np.int64)
            known = self._cuts[1][samples, micro_batch] = offsets, split_rows(range(len(rows)), passes)
        return known

    def ids_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids of the samples at positions of the stream. Any thread may call: orders keep what they know."""
        with self._lock:
            return ids_at(self.source, self.seed, positions)

    def chosen(self, batch: StepBatch, places: np.ndarray) -> StepBatch:
        """Return this rank's part of the samples of a batch at these places of it, in micro-batches of the plan.

        It stands at the batch's position and for as many samples: what was not chosen was read all the same.
        """
        plan, own = self.plan, self.plan.rows_of(self.data_rank, len(places))
        positions = batch.position + (places[own.start : own.stop] if own else places[:1])
        ids = self.ids_of(positions)
        parts = split_rows(range(len(own)), plan.accumulation)
        rows = StepRows(ids, positions)
        micro_batches = tuple(self._read(rows, part, batch.step) for part in parts)
        return moved(dataclasses.replace(batch, micro_batches=micro_batches), self.on_device)

    def _expect(self, ahead: ReadsAhead, positions: np.ndarray, samples: int) -> None:
        """Tell a source that fetches what it reads which samples it will be asked for in the coming steps."""
        coming = self._ids.coming(positions, samples, ahead.steps_ahead + 1).reshape(-1)
        ahead.expect(ids_at(self.source, self.seed, coming))

    def _read(self, rows: StepRows, part: range, step: int) -> MicroBatch:
        """Return a part of a rank's rows in a step, read now where they were not gathered already."""
        ids, places, gathered, _ = rows
        start, stop = part.start, part.stop
        counts = stop > start
        if not counts:
            start, stop = 0, 1
        if stop - start < len(ids):
            ids, places = ids[start:stop], places[start:stop]
        if gathered is not None:
            data = self._together.batch(rows, start, stop)
        else:
            read = self.source.read if self.finishing is None else self.finishing.read_unfinished
            data = read(ids, places)
        if not self._is_cpu:
            data = pinned(data, self.device)
        return MicroBatch(data, ids if counts else ids[:0], places.item(0), counts, step, places)


class RepeatedBatches:
    """Reads batches up to a step, and then gives them again in turn, as those of the steps that follow.

    What a step takes without its loader is measured so. Steps that give what was trained on teach nothing.
    """

    def __init__(self, read: Callable[..., StepBatch], last_read: int) -> None:
        """`read` reads a batch, as `BatchStream.at` does; `last_read` is the last step whose batch is read."""
        self._read, self._last_read = read, last_read
        self._kept: list[StepBatch] = []

    def at(self, position: int, step: int) -> StepBatch:
        """Return the batch of update `step`, which starts at a position, or an earlier one in its place."""
        if step <= self._last_read or not self._kept:
            batch = self._read(position, step)
            self._kept = [*self._kept, batch][-MOST_KEPT:]
            return batch
        again = self._kept[step % len(self._kept)]
        micro_batches = tuple(dataclasses.replace(micro, step=step) for micro in again.micro_batches)
        return dataclasses.replace(again, step=step, position=position, micro_batches=micro_batches)


def _passes(plan: Plan, samples: int, micro_batch: int) -> int:
    """Return in how many micro-batches a batch of another size than the plan's is passed."""
    passes = accumulation_for(samples, plan.layout.data_degree, micro_batch, plan.rows)
    return -(-passes // plan.layout.pp) * plan.layout.pp  # every schedule of a pipeline takes a multiple of its ranks


def held_out_ids(source: Source, samples: int) -> np.ndarray:
    """Return the ids of the held-out samples that evaluations read: the same ones in every run and layout."""
    return sample_ids(HELD_OUT_SEED, np.arange(min(samples, source.samples), dtype=np.int64), source.samples)


@dataclass(frozen=True)
class HeldOutBatches(Sequence[MicroBatch]):
    """A data rank's share of the evaluated samples: each micro-batch is read when it is taken."""

    source: Source
    device: torch.device
    parts: Sequence[tuple[np.ndarray, int, bool]]  # ids, the place of the first one, whether they count

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, place: Any) -> Any:
        ids, position, counts = self.parts[place]
        return MicroBatch(to_device(self.source.read(ids, ids), self.device), ids, position, counts)

    @property
    def counted_ids(self) -> list[np.ndarray]:
        """The ids of the samples of each micro-batch that counts."""
        return [ids for ids, _, counts in self.parts if counts]


def held_out_batches(
    source: Source, samples: int, plan: Plan, data_rank: int, device: torch.device, coupled: bool = False
) -> HeldOutBatches:
    """Return a data rank's share of the evaluated samples; over all ranks each is read once.

    Samples of different lengths, which are filled up to the longest beside them, come in the order of their lengths,
    the longest first: hardly anything is filled up then. Where rows of a batch are `coupled` the order is as ever.
    """
    chosen, degree = held_out_ids(source, samples), plan.layout.data_degree
    if not coupled and (lengths := lengths_of(source)) is not None:
        chosen = chosen[np.argsort(-np.asarray(lengths)[chosen], kind="stable")]
    source = filled_for(source, device.type, plan.layout.tp, plan.precision)
    # All ranks' micro-batches together are rows in a run, a global batch at most: losses of coupled rows need it.
    together = min(plan.batch_samples, plan.micro_batch * degree)
    if plan.rows:  # no rank has more than its micro-batch of them
        together = max(1, min(plan.batch_samples, plan.micro_batch * plan.batch_samples // max(plan.rows)))
    parts = []
    for start in range(0, len(chosen), together):
        own = plan.rows_of(data_rank, min(together, len(chosen) - start))
        part = range(start + own.start, start + own.stop)
        ids = chosen[part.start : part.stop] if len(part) else chosen[:1]
        parts.append((ids, part.start, len(part) > 0))
    return HeldOutBatches(source, device, parts)
