"""Mistakes outside of a step: in the loop, the evaluations, the checkpoint and the restart of a run.

None of them changes an update, so that a proof of updates says "equal"; the story must name each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests_shared import VOCAB, decoder_task, plan_of
from torch.distributed.tensor import DTensor

from paceline.plan.layout import Layout
from paceline.plan.plan import Plan
from paceline.run import evaluate as evaluate_module
from paceline.run import recorder, resume, training
from paceline.run.checkpoint import load
from paceline.run.resume import Progress, Restored
from paceline.run.world import World
from paceline.task.task import ModelSpec, OptimizerSpec, Task

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch, World], None]


@dataclass(frozen=True)
class Told:
    """One mistake: its family, what is planted, into which case, and what the story must name at which step."""

    family: str
    what: str
    case: str
    plant: Plant
    quantity: str
    step: int
    says: str  # part of the likely cause


STORY_PLANS: dict[str, Plan] = {
    "copies": plan_of(Layout(dp_replicate=2), batch=7, precision="fp64"),
    "shards": plan_of(Layout(dp_shard=2), batch=7, precision="fp64"),
    "experts": plan_of(Layout(dp_shard=2, ep=2), batch=7, precision="fp64"),
}


def nothing(patch: Patch, world: World) -> None:
    """Plant no mistake."""


def expert_task() -> Task:
    """Return a small mixture of experts whose balance is kept by a bias, which is a buffer."""
    shape = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 8, "experts": 4, "vocab": VOCAB}
    model = ModelSpec("moe-2m", **shape, balance="bias")
    return decoder_task(model=model, optimizer=OptimizerSpec(lr=3e-3, eps=1e-4))


def story_task(case: str) -> Task:
    """Return the task of a case."""
    if case == "experts":
        return expert_task()
    shape = {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 24, "tied": False}
    model = dataclasses.replace(decoder_task().model, **shape)
    return decoder_task(model=model, optimizer=OptimizerSpec(lr=1e-2, eps=1e-5, clip_norm=0.5))


# ---- the learning rate -----------------------------------------------------------------------------------------------


def rate_changed_after(patch: Patch, concerns: Callable[[Restored], bool], change: Callable[..., float]) -> None:
    """Have starts that go on from a checkpoint which `concerns` is true of use another learning rate."""
    restore, rate, changed = training.restore, training.learning_rate, [False]

    def restored(*arguments: Any) -> Restored | None:
        found = restore(*arguments)
        changed[0] = found is not None and concerns(found)
        return found

    def other(*arguments: Any) -> float:
        return change(rate, *arguments) if changed[0] else rate(*arguments)

    patch.setattr(training, "restore", restored)
    patch.setattr(training, "learning_rate", other)


def resharded(found: Restored) -> bool:
    return any("resharded" in note for note in found.notes)


def rate_one_step_late(patch: Patch, world: World) -> None:
    rate_changed_after(patch, lambda found: True, lambda rate, s, peak, step, *r: rate(s, peak, step - 1, *r))


def schedule_lost_with_the_layout(patch: Patch, world: World) -> None:
    rate_changed_after(patch, resharded, lambda rate, schedule, peak, *rest: peak)


def schedule_scaled_by_the_world(patch: Patch, world: World) -> None:
    """The length of the run is counted in steps of a world that was twice as large."""
    rate_changed_after(patch, resharded, lambda rate, s, peak, step, total, *r: rate(s, peak, step, total * 2, *r))


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def saved_changed_by(patch: Patch, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    """Have a checkpoint made of other tensors than those that were trained."""
    write = resume.save_checkpoint

    def changed(root: Any, step: int, tensors: Mapping[str, torch.Tensor], *rest: Any, **options: Any) -> Any:
        return write(root, step, change(dict(tensors)), *rest, **options)

    patch.setattr(resume, "save_checkpoint", changed)


def on_local(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a tensor like this one whose local part is changed."""
    if not isinstance(tensor, DTensor):
        return change(tensor.detach())
    local = change(tensor.detach().to_local())
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


def experts_of_the_next_rank(patch: Patch, world: World) -> None:
    def of_the_next(local: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(local) for _ in range(world.size)]
        dist.all_gather(parts, local.contiguous())
        return parts[(world.rank + 1) % world.size]

    saved_changed_by(
        patch,
        lambda held: {n: on_local(t, of_the_next) if ".experts." in n and t.dim() else t for n, t in held.items()},
    )


def weights_saved_in_bf16(patch: Patch, world: World) -> None:
    def rounded(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: on_local(t, lambda x: x.bfloat16().to(x.dtype)) if name.startswith("model.") else t
            for name, t in held.items()
        }

    saved_changed_by(patch, rounded)


def moments_saved_as_zeros(patch: Patch, world: World) -> None:
    zeros = lambda x: torch.zeros_like(x)  # noqa: E731
    saved_changed_by(
        patch, lambda held: {n: on_local(t, zeros) if n.endswith(".exp_avg_sq") else t for n, t in held.items()}
    )


def count_of_updates_lost(patch: Patch, world: World) -> None:
    """Adam's count of updates, by which it corrects its moments, starts again."""
    ones = lambda x: torch.ones_like(x)  # noqa: E731
    saved_changed_by(patch, lambda held: {n: ones(t) if n.endswith(".step") else t for n, t in held.items()})


def shards_read_from_the_wrong_place(patch: Patch, world: World) -> None:
    """Every part of a tensor is filled with the beginning of the chunk that holds it."""
    read = load.ShardReader.read

    def at_the_start(self: Any, chunk: Any, dtype: str, offsets: Any, lengths: Any) -> torch.Tensor:
        return read(self, chunk, dtype, [0] * len(lengths), lengths)

    patch.setattr(load.ShardReader, "read", at_the_start)


def position_one_batch_ahead(patch: Patch, world: World) -> None:
    save = training.save

    def ahead(*arguments: Any) -> Any:
        *rest, progress = arguments
        return save(*rest, Progress(progress.step, progress.position + 7))

    patch.setattr(training, "save", ahead)


# ---- the loop and what it says ---------------------------------------------------------------------------------------


def rows_of_the_first_rank(patch: Patch, world: World) -> None:
    stream = training.BatchStream
    patch.setattr(
        training, "BatchStream", lambda source, seed, plan, rank, device: stream(source, seed, plan, 0, device)
    )


def evaluation_divided_by_ranks(patch: Patch, world: World) -> None:
    evaluate = training.evaluate

    def divided(*arguments: Any) -> dict[str, float]:
        told = evaluate(*arguments)
        return {**told, "loss": told["loss"] / world.size}

    patch.setattr(training, "evaluate", divided)


def evaluation_of_the_first_part(patch: Patch, world: World) -> None:
    read = evaluate_module.held_out_batches
    patch.setattr(
        evaluate_module, "held_out_batches", lambda s, samples, plan, rank, device: read(s, samples, plan, 0, device)
    )


def evaluation_as_mean_of_ranks(patch: Patch, world: World) -> None:
    """Every rank's mean counts alike, however many items it is over."""
    add = World.sum

    def means(self: World, values: list[float]) -> list[float]:
        return add(self, [values[0] / values[1], 1.0]) if len(values) == 2 else add(self, values)

    patch.setattr(World, "sum", means)


def journal_of_another_rate(patch: Patch, world: World) -> None:
    step = recorder.Recorder.step

    def wrong(self: Any, stats: Any, *rest: Any) -> None:
        step(self, dataclasses.replace(stats, lr=stats.lr * 2), *rest)

    patch.setattr(recorder.Recorder, "step", wrong)


STORIES = [
    Told("learning rate", "the learning rate is one step late after a resume", "shards",
         rate_one_step_late, "lr", 4, "after a resume as dp_replicate=2: the schedule is not"),
    Told("learning rate", "the schedule is lost where the layout changes", "copies",
         schedule_lost_with_the_layout, "lr", 4, "after a resume as dp_shard=2: the schedule is not"),
    Told("learning rate", "the length of the schedule follows the number of ranks", "copies",
         schedule_scaled_by_the_world, "lr", 4, "after a resume as dp_shard=2: the schedule is not"),
    Told("checkpoint", "experts are saved under the wrong rank", "experts",
         experts_of_the_next_rank, "weights", 3, "weights are not those that were trained"),
    Told("checkpoint", "weights are rounded to bf16 in a checkpoint", "shards",
         weights_saved_in_bf16, "weights", 3, "weights are not those that were trained"),
    Told("checkpoint", "second moments are lost in a checkpoint", "shards",
         moments_saved_as_zeros, "moments", 3, "the optimizer's moments are not"),
    Told("checkpoint", "the count of updates is lost in a checkpoint", "shards",
         count_of_updates_lost, "moments", 3, "the optimizer's moments are not"),
    Told("resume state", "the position in the checkpoint is a batch ahead", "shards",
         position_one_batch_ahead, "position", 3, "does not go on at the sample"),
    Told("sample order", "rank 1 trains on rank 0's rows", "copies",
         rows_of_the_first_rank, "samples", 1, "several ranks read the same samples"),
    Told("evaluation", "the held-out loss is divided by the ranks", "copies",
         evaluation_divided_by_ranks, "evaluation", 1, "off by the number of ranks, 2"),
    Told("evaluation", "every rank evaluates the same part of the held-out samples", "copies",
         evaluation_of_the_first_part, "evaluation", 1, "not their mean"),
    Told("evaluation", "the held-out loss is a mean of the ranks' means", "copies",
         evaluation_as_mean_of_ranks, "evaluation", 1, "not their mean"),
    Told("record", "the journal says another learning rate than was used", "copies",
         journal_of_another_rate, "lr", 1, "the journal does not say what the run did"),
]  # fmt: skip
