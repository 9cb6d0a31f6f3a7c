"""Passes of a pipelined model: torch's schedules decide the order, the last stage knows the loss.

The micro-batches of a step are the micro-batches of the pipeline. The last stage knows the labels, so the last stage
computes the loss sum and counts the weight, micro-batch by micro-batch: 3 rows and then 1 row weigh 3 and 1. A block
may add to the loss by itself, as experts do to balance their load; the stage that holds the block adds that term to
its own loss sum and starts the term's backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import ConfigError
from paceline.plan.feasible.stages import stage_count
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.passes import AnyObjective, in_double
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.parallel.pipeline.rng_state import random_state
from paceline.run.parallel.pipeline.split import Pipeline
from paceline.run.parallel.pipeline.stage_module import StageModule, refuse_call, rows_in
from paceline.spec.plan import Plan
from paceline.task.models.build import modes_of, put_into, start_training


def schedules() -> dict[str, Any]:
    """Return torch's schedules by their names in a plan. Their package loads torch.export, so only pipelines do."""
    from torch.distributed import pipelining

    return {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }


@dataclass(frozen=True)
class _Border:
    """What one stage hands to the next for a single row, and whether it drew random numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    draws: bool

    def example(self, rows: int) -> Tensor:
        """Return hidden states of so many rows, without storage."""
        return torch.empty((rows, *self.shape), dtype=self.dtype, device="meta", requires_grad=True)


class PipelinePasses:
    """Runs the micro-batches of a step through this rank's stages."""

    def __init__(
        self,
        pipeline: Pipeline,
        objective: AnyObjective,
        plan: Plan,
        device: torch.device,
        randomness: SampleRandomness,
        take_part: Callable[[Any], Any] = lambda data: data,
        after_forward: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._pipeline, self._plan, self._device, self._randomness = pipeline, plan, device, randomness
        self._stages = [
            StageModule(stage, objective, plan, device, randomness, take_part, after_forward)
            for stage in pipeline.stages
        ]
        if len(self._stages) > 1:
            pipeline.model.register_forward_pre_hook(refuse_call)  # stages are called one by one, never their union
        self._indices = [stage.index for stage in pipeline.stages]
        self._ranks = dist.get_process_group_ranks(pipeline.group)
        self._borders: dict[Any, list[_Border]] = {}  # by the shapes of a row
        self._schedules: dict[Any, Any] = {}

    def accumulate(self, micro_batches: Sequence[MicroBatch], down: float) -> tuple[Any, Any]:
        """Run forward and backward on the loss times `down`; return this rank's share of (loss sum, weight)."""
        borders = self._borders_for(micro_batches)
        rows = max(map(rows_in, micro_batches))
        relays = any(border.draws for border in borders)
        for stage in self._stages:
            stage.begin(micro_batches, down, rows, relays)
        count = len(micro_batches)
        numbers = torch.arange(count)
        self._schedule(rows, count, relays, borders).step(index=numbers, target=numbers, return_outputs=False)
        self._randomness.rest()
        loss_total = sum(stage.loss_total for stage in self._stages)
        return self._share(loss_total), self._share(self._stages[-1].weight_total)

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], seen: Callable[[], None] | None = None
    ) -> tuple[float, float]:
        """Run forward only; return this rank's share of the loss sum and the weight."""
        loss_total: Any = 0.0
        weight_total: Any = 0.0
        for number, found in self._forwarded(micro_batches):
            if micro_batches[number].counts:
                loss_total = loss_total + in_double(found[0])
                weight_total = weight_total + in_double(found[1])
                if seen is not None:
                    seen()
        return self._share(float(loss_total)), self._share(float(weight_total))

    def of_each(self, micro_batches: Sequence[MicroBatch], objective: AnyObjective) -> list[Any]:
        """Run another objective forward only; return what it returns for each micro-batch, None but on the last stage.

        Every rank of the pipeline calls it.
        """
        found: list[Any] = [None] * len(micro_batches)
        for number, value in self._forwarded([replace(micro, objective=objective) for micro in micro_batches]):
            found[number] = value
        return found

    @property
    def objective(self) -> AnyObjective:
        """The objective, as every stage of this rank calls it."""
        return self._stages[0].objective

    def _forwarded(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[int, Any]]:
        """Run forward only; yield the number of each micro-batch and what the objective returns, on the last stage.

        At every beat a rank runs one stage on one micro-batch (`beats`), and then gives and takes at once what the next
        beat needs: a rank that only sent, to one that only sends, would wait for ever where sends wait for receivers.
        """
        borders = self._borders_for(micro_batches)
        relays = any(border.draws for border in borders)
        own = beats(self._pipeline.group.rank(), len(self._ranks), len(self._stages), len(micro_batches))
        received: list[Tensor] = []
        for now, following in zip(own, [*own[1:], None], strict=True):
            sent: list[Tensor] = []
            if now is not None:
                turn, micro = now[0], micro_batches[now[1]]
                found = self._stages[turn].run(micro, *received) if received else self._stages[turn].run(micro, None)
                if self._indices[turn] < stage_count(self._plan) - 1:
                    sent = [found.contiguous(), *((random_state(self._device),) if relays else ())]
                else:
                    yield now[1], found
            received = []
            if following is not None and (before := self._indices[following[0]] - 1) >= 0:
                example = borders[before].example(rows_in(micro_batches[following[1]]))
                received = [torch.empty_like(example, device=self._device)]
                received += [torch.empty_like(random_state(self._device))] if relays else []
            self._exchange(sent, received)
        self._randomness.rest()

    def _exchange(self, sent: list[Tensor], received: list[Tensor]) -> None:
        """Send tensors to the next rank of the pipeline and fill those that come from the rank before, together."""
        group = self._pipeline.group
        at, ranks = group.rank(), group.size()
        calls = [dist.P2POp(dist.isend, tensor, group=group, group_peer=(at + 1) % ranks) for tensor in sent]
        calls += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=(at - 1) % ranks) for tensor in received]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()

    def wrap_objective(self, wrapper: Callable[[AnyObjective], AnyObjective]) -> None:
        """Call `wrapper(objective)` in the place of the objective from now on, on every stage of this rank."""
        for stage in self._stages:
            stage.objective = wrapper(stage.objective)

    def _schedule(self, rows: int, count: int, relays: bool, borders: list[_Border]) -> Any:
        """Return torch's schedule for micro-batches of at most `rows` rows; made once per number of rows."""
        from torch.distributed.pipelining import PipelineStage

        key = (rows, count, relays, tuple(borders))
        if key not in self._schedules:
            stages = [
                PipelineStage(
                    module,
                    index,
                    stage_count(self._plan),
                    self._device,
                    input_args=() if index == 0 else self._travels(borders[index - 1], rows, relays),
                    output_args=self._travels(borders[index], rows, relays)
                    if index < len(borders) - 1
                    else torch.empty((), dtype=borders[-1].dtype, device="meta"),
                    group=self._pipeline.group,
                )
                for index, module in zip(self._indices, self._stages, strict=True)
            ]
            several = self._plan.schedule in ("interleaved", "zero-bubble")
            self._schedules[key] = schedules()[self._plan.schedule](
                stages if several else stages[0], count, loss_fn=_same, scale_grads=False
            )
        return self._schedules[key]

    def _travels(self, border: _Border, rows: int, relays: bool) -> tuple[Tensor, ...]:
        """Return what one stage sends to the next, without storage."""
        state = (torch.empty_like(random_state(self._device), device="meta"),) if relays else ()
        return border.example(rows), *state

    def _borders_for(self, micro_batches: Sequence[MicroBatch]) -> list[_Border]:
        """Return what every stage hands on, the last one its loss; found by one forward pass for each shape of rows.

        Each stage runs on hidden states of zeros and says what comes out of it; weights and buffers stay as they are.
        """
        micro = max(micro_batches, key=rows_in)
        key = tuple(
            (leaf.shape[1:], leaf.dtype) for leaf in tree_leaves(micro.data) if isinstance(leaf, Tensor) and leaf.dim()
        )
        if key not in self._borders:
            borders: list[_Border] = []
            for index in range(stage_count(self._plan)):
                box: list[Any] = [None]
                if index in self._indices:
                    hidden = None
                    if index:
                        hidden = torch.zeros_like(borders[-1].example(rows_in(micro)), device=self._device)
                    box = [self._look(self._stages[self._indices.index(index)], micro, hidden)]
                dist.broadcast_object_list(box, src=self._rank_of(index), group=self._pipeline.group)
                borders.append(box[0])
            # Whether the last stage draws matters to nobody but itself.
            self._borders[key] = [*borders[:-1], replace(borders[-1], draws=False)]
        return self._borders[key]

    def _look(self, stage: StageModule, micro: MicroBatch, hidden: Tensor | None) -> _Border:
        """Run a stage once for what it hands on, and leave no trace."""
        part = stage.part
        modes = modes_of(part)
        buffers = [(buffer, buffer.clone()) for buffer in part.buffers()]
        start_training(part)  # dropout draws in training alone
        with torch.no_grad():
            found = stage.run(micro, hidden)
            for buffer, kept in buffers:
                buffer.copy_(kept)
        draws = self._randomness.has_drawn
        put_into(part, modes)
        if isinstance(found, tuple):  # the last stage's loss and weight
            return _Border((), found[0].dtype, draws)
        if not isinstance(found, Tensor) or not found.dim() or found.shape[0] != rows_in(micro):
            raise ConfigError(
                f"a pipeline stage hands on {_described(found)}",
                "hidden states between blocks must be one tensor whose first dimension counts samples",
                "pp = 1",
            )
        return _Border(tuple(found.shape[1:]), found.dtype, draws)

    def _rank_of(self, stage: int) -> int:
        return self._ranks[stage % len(self._ranks)]

    def _share(self, value: Any) -> Any:
        """Return this rank's share of what all ranks of a tensor-parallel group hold alike."""
        return value / self._plan.layout.tp


def beats(rank: int, ranks: int, turns: int, micro_batches: int) -> list[tuple[int, int] | None]:
    """Return what a rank of a pipeline runs beat by beat: (which of its `turns` stages, micro-batch), None for nothing.

    Micro-batches go round in groups of as many as there are ranks, so that what a stage makes in one beat is what the
    next stage, on the next rank, runs in the next beat (Narayanan et al. 2021, arXiv:2104.04473, figure 4, forward).
    """
    groups = -(-micro_batches // ranks)
    found: list[tuple[int, int] | None] = [None] * rank
    for group in range(groups):
        for turn in range(turns):
            numbers = range(group * ranks, (group + 1) * ranks)
            found += [(turn, number) if number < micro_batches else None for number in numbers]
    return [*found, *[None] * (ranks - 1 - rank)]


def _same(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss, which the last stage has computed itself."""
    return output


def _described(found: Any) -> str:
    return f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
