"""Mistakes outside of a step: in the loop, the evaluations, the checkpoint and the restart of a run.

None of them changes an update, so that every part of the proof before the story says "equal".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from planted import Patch, Planted
from torch.distributed.tensor import DTensor

from paceline.checkpoint import load
from paceline.run.assemble import Assembled
from paceline.run.loop import between_steps, passes, training, under_plan
from paceline.run.loop import evaluate as evaluate_module
from paceline.run.loop.resume import Progress, Restored
from paceline.run.process.world import World
from paceline.run.record import recorder
from paceline.run.survive.saving import keeper
from paceline.task.data.order import many_steps

# ---- the learning rate -----------------------------------------------------------------------------------------------


def rate_changed_after(patch: Patch, concerns: Callable[[Restored], bool], change: Callable[..., float]) -> None:
    """Have starts that go on from a checkpoint which `concerns` is true of use another learning rate."""
    restore, rate, changed = under_plan.restore, training.learning_rate, [False]

    def restored(*arguments: Any) -> Restored | None:
        found = restore(*arguments)
        changed[0] = found is not None and concerns(found)
        return found

    def other(*arguments: Any) -> float:
        return change(rate, *arguments) if changed[0] else rate(*arguments)

    patch.setattr(under_plan, "restore", restored)
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


def schedule_once_per_process(patch: Patch, world: World) -> None:
    lr = training.learning_rate
    patch.setattr(training, "learning_rate", lambda s, peak, step, total, *r: lr(s, peak, step * world.size, total, *r))


def schedule_from_the_start(patch: Patch, world: World) -> None:
    lr, start = training.learning_rate, started_at(patch, "step")
    patch.setattr(training, "learning_rate", lambda s, peak, step, *r: lr(s, peak, step - start[0], *r))


# ---- what a restart goes on with -------------------------------------------------------------------------------------


def after_restoring(patch: Patch, change: Callable[[Restored | None, tuple[Any, ...]], None]) -> None:
    """Have something done after every start that looks for a checkpoint."""
    restore = under_plan.restore

    def restored(*arguments: Any) -> Restored | None:
        found = restore(*arguments)
        change(found, arguments)
        return found

    patch.setattr(under_plan, "restore", restored)


def started_at(patch: Patch, what: str) -> list[int]:
    """Return a list of one number, which every start sets to its `step` or `position`."""
    start = [0]

    def remember(found: Restored | None, arguments: tuple[Any, ...]) -> None:
        start[0] = getattr(found.progress, what) if found else 0

    after_restoring(patch, remember)
    return start


def order_from_the_start(patch: Patch, world: World) -> None:
    ids, start = many_steps.ids_at, started_at(patch, "position")
    patch.setattr(
        many_steps, "ids_at", lambda source, seed, at: ids(source, seed, np.where(at < start[0], at, at - start[0]))
    )


def masks_from_the_start(patch: Patch, world: World) -> None:
    """Random numbers follow from the samples since the start of the process instead of from the position."""
    rows, start = passes.sample_rows, started_at(patch, "position")

    def since(micro: Any, *rest: Any) -> Any:
        found = rows(micro, *rest)
        return dataclasses.replace(found, positions=found.positions - start[0]) if rest else found

    patch.setattr(passes, "sample_rows", since)


def optimizer_not_restored(patch: Patch, world: World) -> None:
    def forget(found: Restored | None, arguments: tuple[Any, ...]) -> None:
        built = next(given for given in arguments if isinstance(given, Assembled))
        for state in built.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    after_restoring(patch, forget)


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def saved_changed_by(patch: Patch, change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]) -> None:
    """Have a checkpoint made of other tensors than those that were trained."""
    held = keeper.saved_state

    def changed(*arguments: Any) -> Any:
        tensors, extra = held(*arguments)
        return change(dict(tensors)), extra

    patch.setattr(keeper, "saved_state", changed)


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
    held = keeper.saved_state

    def ahead(*arguments: Any) -> Any:
        read = [each for each in arguments if isinstance(each, Progress)]
        assert len(read) == 1
        later = Progress(read[0].step, read[0].position + 7)
        return held(*(later if each is read[0] else each for each in arguments))

    patch.setattr(keeper, "saved_state", ahead)


# ---- the loop and what it says ---------------------------------------------------------------------------------------


def rows_of_the_first_rank(patch: Patch, world: World) -> None:
    stream = under_plan.BatchStream
    patch.setattr(
        under_plan, "BatchStream", lambda source, seed, plan, rank, *rest: stream(source, seed, plan, 0, *rest)
    )


def evaluation_divided_by_ranks(patch: Patch, world: World) -> None:
    evaluate = between_steps.evaluate

    def divided(*arguments: Any) -> evaluate_module.EvaluationResult:
        told = evaluate(*arguments)
        return dataclasses.replace(told, loss=told.loss / world.size)

    patch.setattr(between_steps, "evaluate", divided)


def evaluation_of_the_first_part(patch: Patch, world: World) -> None:
    read = evaluate_module.held_out_batches
    patch.setattr(
        evaluate_module, "held_out_batches", lambda s, samples, plan, rank, *rest: read(s, samples, plan, 0, *rest)
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


STORY_PROOFS = [
    Planted("learning rate", "the learning rate is one step late after a resume", "zero 3",
            rate_one_step_late, "lr", "learning rate", "lr",
            "after a resume as dp_replicate=2: the schedule is not", "story", 4),
    Planted("learning rate", "the schedule is lost where the layout changes", "copies",
            schedule_lost_with_the_layout, "lr", "learning rate", "lr",
            "after a resume as dp_shard=2: the schedule is not", "story", 4),
    Planted("learning rate", "the length of the schedule follows the number of ranks", "copies",
            schedule_scaled_by_the_world, "lr", "learning rate", "lr",
            "after a resume as dp_shard=2: the schedule is not", "story", 4),
    Planted("learning rate", "the schedule starts again after a restart", "zero 3",
            schedule_from_the_start, "lr", "learning rate", "lr", "it starts again", "story", 4),
    Planted("learning rate", "the schedule is stepped once per process", "zero 3",
            schedule_once_per_process, "lr", "learning rate", "lr", "runs fast", "story", 1),
    Planted("checkpoint", "experts are saved under the wrong rank", "experts",
            experts_of_the_next_rank, "weights", "checkpoint", ".experts.",
            "weights are not those that were trained", "story", 3),
    Planted("checkpoint", "weights are rounded to bf16 in a checkpoint", "zero 3",
            weights_saved_in_bf16, "weights", "checkpoint", "embed_tokens",
            "weights are not those that were trained", "story", 3),
    Planted("checkpoint", "second moments are lost in a checkpoint", "zero 3",
            moments_saved_as_zeros, "moments", "checkpoint", "exp_avg_sq",
            "the optimizer's moments are not", "story", 3),
    Planted("checkpoint", "the count of updates is lost in a checkpoint", "zero 3",
            count_of_updates_lost, "moments", "checkpoint", "step", "the optimizer's moments are not", "story", 3),
    Planted("checkpoint", "shards are read from the wrong place", "copies",
            shards_read_from_the_wrong_place, "error", "", "", "their fingerprint is", "story"),
    Planted("resume state", "the optimizer's moments are not restored", "zero 3",
            optimizer_not_restored, "moments", "checkpoint", "", "the optimizer's moments are not", "story", 3),
    Planted("resume state", "dropout masks start again after a restart", "dropout",
            masks_from_the_start, "loss", "dropout", "loss", "on where a run starts", "story", 4),
    Planted("prefetched position", "the saved position is that of the prefetched batch", "zero 3",
            position_one_batch_ahead, "position", "resume state", "position",
            "does not go on at the sample", "story", 3),
    Planted("sample order", "the order of samples starts again after a restart", "zero 3",
            order_from_the_start, "samples", "resume state", "", "other samples are read", "story", 4),
    Planted("sample order", "rank 1 trains on rank 0's rows", "copies",
            rows_of_the_first_rank, "samples", "sample order", "", "several ranks read the same samples", "story", 1),
    Planted("evaluation", "the held-out loss is divided by the ranks", "copies",
            evaluation_divided_by_ranks, "evaluation", "evaluation", "",
            "off by the number of ranks, 2", "story", 1),
    Planted("evaluation", "every rank evaluates the same part of the held-out samples", "copies",
            evaluation_of_the_first_part, "evaluation", "evaluation", "", "not their mean", "story", 1),
    Planted("evaluation", "the held-out loss is a mean of the ranks' means", "copies",
            evaluation_as_mean_of_ranks, "evaluation", "evaluation", "", "not their mean", "story", 1),
    Planted("record", "the journal says another learning rate than was used", "copies",
            journal_of_another_rate, "lr", "record", "in the journal",
            "the journal does not say what the run did", "story", 1),
]  # fmt: skip
