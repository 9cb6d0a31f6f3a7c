"""Selection among a step's candidates: scored at the weights of the moment, drawn, and trained on with their weights.

With the loss sums l_i and the item counts w_i of K candidates, the gradient of a step on all of them is that of
sum(l_i) / sum(w_i). The step trains on the n that are drawn, each of chance pi_i, and its gradient is that of
sum(l_i / pi_i) over those drawn, over the same sum(w_i): its expectation over the draws is exactly the gradient of all.
The scores take no part in that but by the chances. What follows is not exact in expectation: clipping, and update rules
that are not linear in the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.run.loop.loader import BatchStream, MicroBatch, StepBatch
from paceline.run.loop.passes import SequentialPasses
from paceline.run.loop.step import Stepper
from paceline.run.numerics.host_numbers import NumbersOnTheWay
from paceline.run.parallel.pipeline.passes import PipelinePasses
from paceline.spec.journal.kinds import SelectionRecord
from paceline.spec.journal.reading import reading_of, records_of_kind, starts_on
from paceline.spec.journal.record import read
from paceline.spec.steps.selection import LARGEST, SelectionSpec
from paceline.spec.task import Task
from paceline.task.data.order import chosen
from paceline.task.models.build import evaluating
from paceline.task.objective import by_row
from paceline.task.placed import objective_on
from paceline.task.turns import objective_of

APART = 0.01  # an objective's sum may be so far from that of its rows: low precision adds them up in another order
ScoresRows = Callable[[nn.Module, Any, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
_Passes = SequentialPasses | PipelinePasses
Earlier = Mapping[tuple[int, int, int], str]  # by step, position and number of candidates: which were chosen


@dataclasses.dataclass(frozen=True)
class CandidateBatches:
    """How large batches are that are chosen from; a rank passes as many samples at once as when it trains."""

    selection: SelectionSpec
    samples: int

    def at(self, step: int, position: int) -> int:
        """Return the candidates of any step."""
        return self.selection.candidates_of(self.samples)

    def at_once(self, position: int, samples: int, micro_batch: int) -> int:
        """Return the plan's micro-batch."""
        return micro_batch


class BatchSelection:
    """Chooses what a step trains on. Every rank makes one, and calls it for the same steps."""

    def __init__(
        self, task: Task, stream: BatchStream, stepper: Stepper, run_dir: Path, fingerprint: str | None = None
    ) -> None:
        """`run_dir` is that of a run whose earlier starts, on the data of the fingerprint, may have chosen for steps
        that are made again.

        Raises ConfigError for an objective that does not tell its rows apart, and for copies that differ.
        """
        self._spec, self._seed, self._stream, self._stepper = task.selection, task.seed, stream, stepper
        self._rows = _rows_of(task, stream, stepper)
        if stepper.plan.sync.has_outer_step:
            raise ConfigError(
                f"task.selection with {stepper.plan.sync}",
                "copies that are apart would score candidates by weights of their own",
                'plan.sync = "every-step"',
            )
        world = stepper.world
        self._earlier: Earlier = world.share(chosen_before(run_dir, fingerprint) if world.is_first else None)
        self._is_checked = False
        self._record: SelectionRecord | None = None

    def choose(self, batch: StepBatch) -> StepBatch:
        """Return this rank's part of those of a batch's samples that are trained on. Every rank calls it."""
        began = time.perf_counter()
        losses, items = self._scored(batch)
        count, candidates = self._stepper.plan.batch_samples, batch.samples
        units = None
        if self._spec.by == LARGEST:
            places = chosen.largest(losses / np.maximum(items, 1e-300) * (items > 0), count)
        else:
            units = chosen.chances(losses, count, self._spec.even)
            places = chosen.drawn(units, chosen.start_of(self._seed, batch.position))
        before = self._earlier.get((batch.step, batch.position, candidates))
        if before is not None:
            places = chosen.of_mask(before, candidates)
        found = self._stream.chosen(batch, places)
        if units is not None:
            weights = np.zeros(candidates)
            # The step divides by the items that it trains on; the sum over those drawn is one over all candidates.
            weights[places] = chosen.ONE / units[places] * (items[places].sum() / items.sum())
            weighted = tuple(self._weighted(micro, batch, weights) for micro in found.micro_batches)
            found = dataclasses.replace(found, micro_batches=weighted)
        self._record = SelectionRecord(
            step=batch.step,
            position=batch.position,
            candidates=candidates,
            chosen=chosen.as_mask(places, candidates),
            digest=chosen.digest_of(self._stream.ids_of(batch.position + places)),
            loss=float(losses.sum() / items.sum()),
            seconds=time.perf_counter() - began,
            spread=None if units is None else chosen.spread_ratio(losses, units, count),
            repeated=True if before is not None else None,
        )
        return found

    def take(self) -> SelectionRecord | None:
        """Return what was chosen last, once."""
        found, self._record = self._record, None
        return found

    def give_back(self, record: SelectionRecord | None) -> None:
        """Have `take` return what another world has chosen and not recorded."""
        self._record = record

    def _scored(self, batch: StepBatch) -> tuple[Any, Any]:
        """Return the loss sum and the items of every candidate over all ranks, in the order of the batch."""
        passes, device = self._stepper.passes, self._stepper.world.device
        assert isinstance(passes, _Passes)
        sums = torch.zeros(2, batch.samples, dtype=torch.float64, device=device)
        with evaluating(self._stepper.model), torch.no_grad():
            scored = passes.of_each(batch.micro_batches, functools.partial(_scores, self._rows))
            self._check(passes, batch.micro_batches[0], scored[0])
        for micro, found in zip(batch.micro_batches, scored, strict=True):
            if micro.counts and found is not None:  # of a pipeline the last stage knows them
                losses, items = found
                at = slice(micro.position - batch.position, micro.position - batch.position + len(micro.ids))
                sums[0, at], sums[1, at] = losses.double(), items.double()
        # Ranks of one sequence add their parts of it; those of one tensor-parallel group know the same.
        flat = sums.flatten() / self._stepper.plan.layout.tp
        self._stepper.sync.add_up(flat)
        both = np.array(NumbersOnTheWay(flat).arrived()).reshape(2, -1)
        return both[0], both[1]

    def _check(self, passes: _Passes, micro: MicroBatch, rows: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Hold the rows' losses against the objective, once. Raises ConfigError where they are not its parts."""
        if self._is_checked:
            return
        self._is_checked = True
        (found,) = passes.of_each([micro], passes.objective)
        if found is None or rows is None:
            return
        loss, items = found
        whole, parts = (float(loss), float(items)), (float(rows[0].sum()), float(rows[1].sum()))
        if any(abs(one - other) > APART * max(abs(one), abs(other)) for one, other in zip(whole, parts, strict=True)):
            raise ConfigError(
                f"the rows of the objective add up to {parts[0]:.6g} over {parts[1]:.6g} items",
                f"the objective itself returns {whole[0]:.6g} over {whole[1]:.6g} on the same samples",
                "an attribute by_row(model, batch) that returns losses [rows] and items [rows], whose sums are those of"
                " the objective",
            )

    def _weighted(self, micro: MicroBatch, batch: StepBatch, weights: Any) -> MicroBatch:
        """Return a micro-batch whose rows' losses count with their weights."""
        assert micro.places is not None
        own = torch.as_tensor(weights[micro.places - batch.position], device=self._stepper.world.device)
        return dataclasses.replace(micro, objective=functools.partial(_weighted_sum, self._rows, own))


def selection_of(
    task: Task, stream: BatchStream, stepper: Stepper, run_dir: Path, fingerprint: str
) -> BatchSelection | None:
    """Return what chooses among a task's candidates; None where it trains on all."""
    return BatchSelection(task, stream, stepper, run_dir, fingerprint) if task.selection.selects else None


def chosen_before(run_dir: Path, fingerprint: str | None = None) -> dict[tuple[int, int, int], str]:
    """Return which candidates earlier starts of a run have chosen, by step, position and number of candidates.

    A step that is made again on other ranks has losses that are rounded otherwise, and chooses the same all the same.
    Of starts on other data than those of the fingerprint nothing is known: their candidates were others.
    """
    with reading_of(run_dir):
        lines = [
            line for _, path in starts_on(run_dir, fingerprint) for line in records_of_kind(path, SelectionRecord.KIND)
        ]
    records = (read(SelectionRecord, line) for line in lines)
    return {(each.step or 0, each.position or 0, each.candidates or 0): each.chosen for each in records}


def _rows_of(task: Task, stream: BatchStream, stepper: Stepper) -> ScoresRows:
    objective = objective_of(task, stream.source.unit)
    found = by_row(objective, lambda own: objective_on(own, stepper.world.device))
    if found is None:
        name = getattr(objective, "__name__", type(objective).__name__)
        raise ConfigError(
            f"task.selection with the objective {name}",
            "it returns sums, of which no sample's loss can be told",
            "an attribute of it, by_row(model, batch), that returns losses [rows] and items [rows]",
        )
    return found


def _scores(rows: ScoresRows, model: nn.Module, data: object) -> tuple[torch.Tensor, torch.Tensor]:
    return rows(model, data, None)


def _weighted_sum(
    rows: ScoresRows, weights: torch.Tensor, model: nn.Module, data: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return rows(model, data, weights)
