"""A run's task under a plan on this rank: built, in the run's newest state, taken down, and built under another."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from paceline.checkpoint.tiers.held_by_ranks import HeldByRanks
from paceline.errors import ConfigError, StorageError
from paceline.run.assemble import assemble
from paceline.run.loop.loader import BatchSizes, BatchStream, RepeatedBatches, StepBatch, bytes_of
from paceline.run.loop.resume import Restored, RunIdentity, restore
from paceline.run.memory.device_copies import DeviceCopies
from paceline.run.numerics.precision import MASTER_DTYPES
from paceline.run.process.world import World
from paceline.run.survive.health.guard import guard_of
from paceline.run.updates.growth import followed_before, growth_of
from paceline.run.updates.selection import CandidateBatches, selection_of
from paceline.spec.arguments import has_checkpoint
from paceline.spec.import_paths import is_import_path, load_object
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.plan import Plan, rows_refusal
from paceline.spec.sync import refuse_resync
from paceline.spec.task import ModelSpec, Task
from paceline.task.coupling import is_coupled
from paceline.task.data.depth import DepthRule
from paceline.task.data.order.budget import budget_of
from paceline.task.data.order.of_source import order_of
from paceline.task.data.protocol import Source
from paceline.task.data.read_ahead import BeginsReads, ReadAhead, may_read_in_a_thread
from paceline.task.data.rows.packed import for_device
from paceline.task.models.build import fill_weights
from paceline.task.models.factory import gives_weights
from paceline.task.models.sizes import is_named


class UnderPlan:
    """Model, optimizer and step that a plan makes of a run's task, and the batches that this rank reads.

    Every rank of the world makes one. `restored` is the checkpoint whose state it has, None where there was none.
    """

    def __init__(
        self,
        run: RunIdentity,
        plan: Plan,
        world: World,
        source: Source,
        items_per_sample: int,
        root: Path | HeldByRanks | None = None,
        looks_far: bool = True,
    ) -> None:
        """`root` is the folder of checkpoints whose newest is restored, the run's own if none is given, or a state.

        Without `looks_far` remote storage is asked only where the run's directory has no checkpoint.
        """
        task, device = run.spec.task, world.device
        self.plan, self.world = plan, world
        resumes = root is not None or bool(world.share(has_checkpoint(run.dir) if world.is_first else None))
        self.is_down = False  # whether nothing of it is left
        self.built = assemble(task, plan, world, source, items_per_sample, read=not resumes)
        self.built.stepper.guard = guard_of(run.spec.run.health, plan)
        self.built.stepper.freezes = True
        self.decided: list[DecisionRecord] = []  # by the step at hand, and not on record yet
        self.data_rank = plan.layout.data_rank(world.rank)
        source = for_device(source, device.type, task.model)
        self.order = order_of(source)
        self.growth = self.built.stepper.growth = growth_of(task, plan, items_per_sample)
        sizes: BatchSizes | None = self.growth
        if task.batch_rows != "fixed":
            sizes = budget_of(source, task.seed, int(task.global_batch.value))
        elif task.selection.selects:
            sizes = CandidateBatches(task.selection, plan.batch_samples)
        if sizes is not None and self.sees_whole_batch:
            raise ConfigError(
                "task.growth, task.selection, or task.batch_rows = 'by_length'",
                "the rows of this model's batch see each other, so a batch is read in one piece, of the planned size",
                'task.growth.by = "nothing", task.selection.by = "nothing" and task.batch_rows = "fixed"',
            )
        self._stream = BatchStream(source, task.seed, plan, self.data_rank, device, sizes)
        lengths = None if task.batch_rows != "fixed" else getattr(source, "lengths", None)
        self._lengths = None if lengths is None else np.asarray(lengths)
        self._rule = DepthRule(run.spec.run.read_ahead_limit, device.type == "cuda", bytes_of)
        self.batches = self._ahead(self._stream.on_host, self._stream.gathered)
        self.selection = selection_of(task, self._stream, self.built.stepper, run.dir, run.fingerprint)
        self.restored = restore(run, self.built, plan, world, root, looks_far)
        if self.growth is not None and self.growth.measures:
            made = self.restored.progress.step if self.restored else 0
            followed = followed_before(run.dir, made, run.fingerprint) if world.is_first else None
            self.growth.repeat(world.share(followed))
        if resumes and self.restored is None and gives_weights(task.model):
            raise StorageError(
                f"the checkpoints of {run.dir} cannot be read",
                "the run has begun, so the weights that it started from were not read again",
                "restore a checkpoint, or start a new run in another run.dir",
            )
        if resumes and self.restored is None and isinstance(task.model, ModelSpec) and is_named(task.model.name):
            fill_weights(self.built.model, task.model, task.seed)  # they were not drawn either

    def read_ahead(self, batch: StepBatch, last_step: int, position_from: Callable[[int], int]) -> None:
        """Ask for the batches after one, as many as are read ahead, up to that of `last_step`.

        `position_from` says where a batch starts that would start at a position, but for what is passed over. What is
        saved of a run is the position of the batch that was trained, whatever is asked for here.
        """
        position, samples = batch.position, batch.samples
        for step in range(batch.step + 1, min(batch.step + max(1, self.batches.depth), last_step) + 1):
            position = position_from(position + samples)
            self.batches.begin(position, step)
            samples = self._stream.samples_at(position, step)

    def longest(self, position: int, step: int) -> int:
        """Return how long the longest sample of a step's batch is, on any rank, without asking another one.

        0 where the data do not say lengths, and where batches have fewer rows the longer these are.
        """
        if self._lengths is None:
            return 0
        positions = np.arange(position, position + self._stream.samples_at(position, step), dtype=np.int64)
        return int(self._lengths[self.ids_of(positions)].max())

    def ids_of(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the ids of the samples that stand at positions of the run. Any thread may call."""
        return self._stream.ids_of(positions)

    def read_until(self, step: int) -> None:
        """Read no batch after a step: those that were read are given again. It measures steps without their loader."""
        self.batches.close()
        self.batches = self._ahead(RepeatedBatches(self._stream.on_host, step).at)

    def _ahead(
        self, read: Callable[..., StepBatch], begin_reads: BeginsReads[StepBatch] | None = None
    ) -> ReadAhead[StepBatch]:
        """Return what calls `read` ahead: in threads where the source allows it, and on to the device."""
        device, in_threads = self.world.device, may_read_in_a_thread(self._stream.source)
        copies = DeviceCopies(self._stream) if device.type == "cuda" else None
        prepare = partial(torch.cuda.set_device, device) if copies else _nothing
        return ReadAhead(
            read,
            prepare if in_threads else None,
            self._rule if in_threads else None,
            copies.send if copies else None,
            copies.receive if copies else None,
            begin_reads,
        )

    def read_decisions(self) -> list[DecisionRecord]:
        """Return how many batches are read ahead from now on, and why, where that has changed since the last call."""
        return self._rule.news()

    def go_back(self, run: RunIdentity) -> Restored | None:
        """Put the run into the state of its newest checkpoint, else into that before the step. All ranks do.

        The step has come to its update and has made none. Until the state is whole, survivors have nothing to bring.
        """
        self.batches.forget()
        self.built.stepper.buffers.put_back()  # those of the step, which no later loss of a peer may bring back
        restored = restore(run, self.built, self.plan, self.world)
        self.built.stepper.is_whole = True
        return restored

    def first_of(self, batch: StepBatch, samples: int) -> StepBatch:
        """Return this rank's part of the first `samples` of a global batch."""
        return self._stream.at(batch.position, batch.step, samples)

    @property
    def sees_whole_batch(self) -> bool:
        """Whether the rows of a batch see each other: then ranks meet inside of a pass, and passes stay as planned."""
        return any(is_coupled(self.built.model, turn.turn.objective) for turn in self.built.stepper.turns)

    def recut(self, plan: Plan) -> None:
        """Read the coming batches in the parts of another plan, which differs in rows, micro-batch and passes alone.

        Nothing is built anew: what a rank holds does not depend on what it reads. Every rank calls it between steps.
        """
        now = self.plan
        same = dataclasses.replace(plan, rows=now.rows, accumulation=now.accumulation, micro_batch=now.micro_batch)
        assert same == self.plan and rows_refusal(plan) is None, "another plan is another build"
        self.batches.forget()
        self.plan = self._stream.plan = self.built.stepper.plan = plan

    def take_down(self) -> None:
        """Let go of all that the plan made, device memory included."""
        self.batches.close()
        self.is_down = True
        del self.built, self.batches, self._stream, self.selection
        gc.collect()  # hooks and modules know each other
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _nothing() -> None:
    """Do nothing: a thread that reads for a CPU needs no preparation."""


def refuse_replan(task: Task, before: Plan, plan: Plan) -> None:
    """Raise ConfigError where a run of the task under one plan cannot go on under another in the same process."""
    if plan.batch_samples != before.batch_samples:
        raise ConfigError(
            f"the new plan has a global batch of {plan.batch_samples} samples",
            f"the run's is {before.batch_samples}, and another one makes another experiment",
            f"a plan for {before.batch_samples} samples",
        )
    if MASTER_DTYPES[plan.precision] != MASTER_DTYPES[before.precision]:
        raise ConfigError(
            f"the new plan's precision is {plan.precision}, and the run's is {before.precision}",
            f"weights are kept in {str(MASTER_DTYPES[before.precision])[6:]}, and would be rounded, or made of others",
            f"a plan in {before.precision}",
        )
    refuse_resync(dataclasses.asdict(before), plan.sync, plan.layout.dp_replicate)
    model = task.model
    if isinstance(model, ModelSpec) and is_import_path(model.name):
        model = load_object(model.name, "task.model.name")
    if isinstance(model, nn.Module):
        raise ConfigError(
            f"another plan for the model {type(model).__name__}, which was given as an object",
            "the plan before has split its weights in place, so it cannot be built again",
            "give a function that returns the model, or start the run again: it resumes under the new plan",
        )
