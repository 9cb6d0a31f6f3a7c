"""Mistakes of the axes that split a model: tensor, pipeline and context parallel, planted as in planted.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planted import Planted
from torch import Tensor, nn
from torch.distributed import ReduceOp

from paceline.run import assemble as assemble_module
from paceline.run.loop.passes import SequentialPasses
from paceline.run.loop.step import Stepper
from paceline.run.parallel.context.exchange import Gathered
from paceline.run.parallel.context.zigzag import SequencePart
from paceline.run.parallel.pipeline import passes as pipeline_passes
from paceline.run.parallel.pipeline.passes import PipelinePasses
from paceline.run.parallel.pipeline.split import PipelineGradients
from paceline.run.parallel.pipeline.stage_module import StageModule
from paceline.run.parallel.tensor import Region, SummedGradients
from paceline.run.process.world import World
from paceline.task.models.layers import vocabulary
from paceline.task.models.layers.collectives import join, part

Patch = pytest.MonkeyPatch


# ---- tensor ----------------------------------------------------------------------------------------------------------


def row_outputs_not_summed(patch: Patch, world: World) -> None:
    patch.setattr(Region, "leave", lambda self, x: part(x, self.group))


def column_inputs_not_summed(patch: Patch, world: World) -> None:
    """The gradient of what all ranks read is each rank's own share."""
    patch.setattr(Region, "enter", lambda self, x: join(x, self.group))


def norm_weights_not_summed(patch: Patch, world: World) -> None:
    patch.setattr(SummedGradients, "finish", lambda self: self.inner.finish())


def reduction_left_out(left_out: Any) -> Callable[[Patch, World], None]:
    """Return a plant: of the two reductions over the vocabulary's ranks, one is each rank's own."""

    def plant(patch: Patch, world: World) -> None:
        def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> None:
            if op != left_out:
                dist.all_reduce(tensor, op=op, group=group)

        patch.setattr(vocabulary, "dist", SimpleNamespace(ReduceOp=ReduceOp, all_reduce=all_reduce))

    return plant


def whole_weights_counted_by_every_rank(patch: Patch, world: World) -> None:
    copies = Stepper._copies_of

    def of_spread_alone(self: Stepper, parameter: nn.Parameter) -> int:
        counted = copies(self, parameter)
        return counted if counted < self.plan.layout.tp else 1

    patch.setattr(Stepper, "_copies_of", of_spread_alone)


def loss_counted_by_every_rank(patch: Patch, world: World) -> None:
    patch.setattr(SequentialPasses, "_share", lambda self, value: value)


# ---- stages ----------------------------------------------------------------------------------------------------------


def tied_gradients_not_added(patch: Patch, world: World) -> None:
    patch.setattr(PipelineGradients, "_add_partners", lambda self, parameter: None)


def tied_weight_counted_twice(patch: Patch, world: World) -> None:
    """Neither stage knows that the other holds it too."""
    stepper = assemble_module.Stepper
    patch.setattr(assemble_module, "Stepper", lambda **rest: stepper(**{**rest, "stages_holding": {}}))


def divided_by_stages(patch: Patch, world: World) -> None:
    begin = StageModule.begin
    divided = lambda self, micros, down, rows, relays: begin(self, micros, down / world.size, rows, relays)  # noqa: E731
    patch.setattr(StageModule, "begin", divided)


def divided_by_micro_batches(patch: Patch, world: World) -> None:
    """torch's schedules divide gradients by the number of micro-batches unless they are told not to."""
    plain = pipeline_passes.schedules()
    scaling = {name: lambda *a, made=made, **k: made(*a, **{**k, "scale_grads": True}) for name, made in plain.items()}
    patch.setattr(pipeline_passes, "schedules", lambda: scaling)


def labels_of_another_micro_batch(patch: Patch, world: World) -> None:
    begin = StageModule.begin

    def turned(self: StageModule, micros: Any, down: float, rows: int, relays: bool) -> None:
        begin(self, [*micros[1:], *micros[:1]] if self._stage.is_last else micros, down, rows, relays)

    patch.setattr(StageModule, "begin", turned)


def norm_of_own_stage(patch: Patch, world: World) -> None:
    add_up = World.add_up

    def own_norm(self: World, vector: torch.Tensor) -> None:
        own = vector[2].clone()
        add_up(self, vector)
        vector[2] = own

    patch.setattr(World, "add_up", own_norm)


def masks_of_each_stage(patch: Patch, world: World) -> None:
    """Every stage seeds its dropout alike, where one device goes on drawing."""
    borders = PipelinePasses._borders_for

    def without_drawing(self: PipelinePasses, micros: Any) -> Any:
        return [dataclasses.replace(border, draws=False) for border in borders(self, micros)]

    patch.setattr(PipelinePasses, "_borders_for", without_drawing)


def first_micro_batch_forgotten(patch: Patch, world: World) -> None:
    """Gradients of a stage are set to zero once more, after its first backward pass."""
    before = StageModule._before_backward

    def forgetting(self: StageModule, rows: Any, grad: Tensor) -> None:
        before(self, rows, grad)
        if self._backwards == 2:
            self._stage.gradients.zero()

    patch.setattr(StageModule, "_before_backward", forgetting)


# ---- shared sequences ------------------------------------------------------------------------------------------------


def part_changed_by(change: Callable[[SequencePart, dict[str, Any], dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a plant that changes a rank's part of a batch: change(part, its batch, the whole batch)."""

    def plant(patch: Patch, world: World) -> None:
        call = SequencePart.__call__
        patch.setattr(SequencePart, "__call__", lambda self, batch: change(self, call(self, batch), batch))

    return plant


def positions_from_zero(own: SequencePart, mine: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    return {**mine, "positions": torch.arange(mine["tokens"].shape[1]).expand_as(mine["tokens"])}


def labels_after_cutting(own: SequencePart, mine: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """The last label of each chunk is lost, as where labels are made of a rank's own tokens."""
    labels = mine["labels"].clone()
    chunk = labels.shape[1] // 2
    labels[:, chunk - 1 :: chunk] = -100
    return {**mine, "labels": labels}


def multiplied_by_ranks(patch: Patch, world: World) -> None:
    accumulate = SequentialPasses.accumulate
    patch.setattr(
        SequentialPasses, "accumulate", lambda self, micros, down: accumulate(self, micros, down * world.size)
    )


def key_gradients_kept(patch: Patch, world: World) -> None:
    """A rank's keys get the gradients of its own queries alone."""
    patch.setattr(Gathered, "result", lambda self: tuple(self._sums[self._rank]))


def later_keys_unseen(patch: Patch, world: World) -> None:
    """The second chunk of a rank does not see the ranks after it, whose chunks come before it in the sequence."""
    blocks = Gathered.blocks
    patch.setattr(Gathered, "blocks", lambda self: (block for block in blocks(self) if not block.late))


AXIS_PROOFS = [
    Planted("tensor parallel", "outputs of row-split layers are not summed", "tensor",
            row_outputs_not_summed, "loss", "forward pass", "loss", "summed over tp"),
    Planted("tensor parallel", "gradients of what column-split layers read are not summed", "tensor",
            column_inputs_not_summed, "gradients", "gradient normalisation", "embed_tokens", "summed over tp"),
    Planted("tensor parallel", "norms on a part of the sequence keep that part's gradient", "tensor",
            norm_weights_not_summed, "gradients", "gradient normalisation", "input_layernorm", "summed over tp"),
    Planted("tensor parallel", "each rank takes the largest logit of its own vocabulary", "tensor",
            reduction_left_out(ReduceOp.MAX), "loss", "forward pass", "loss"),
    Planted("tensor parallel", "each rank sums exponentials of its own vocabulary", "tensor",
            reduction_left_out(ReduceOp.SUM), "loss", "forward pass", "loss"),
    Planted("gradient norm", "every tensor rank counts the whole weights", "tensor",
            whole_weights_counted_by_every_rank, "grad_norm", "gradient norm", "grad_norm"),
    Planted("tensor parallel", "every tensor rank counts loss and items", "tensor",
            loss_counted_by_every_rank, "weight", "loss normalisation", "weight", "tp degree 2"),
    Planted("tied weights", "a tied weight gets the gradient of its own stage alone", "stages, tied",
            tied_gradients_not_added, "gradients", "tied weights", "embed_tokens.weight", "two places"),
    Planted("gradient norm", "a tied weight on two stages counts twice", "stages, tied",
            tied_weight_counted_twice, "grad_norm", "gradient norm", "grad_norm"),
    Planted("gradient norm", "each stage clips by its own norm", "stages",
            norm_of_own_stage, "grad_norm", "gradient norm", "grad_norm", "different norms"),
    Planted("pipeline", "the loss is divided by the number of stages", "stages",
            divided_by_stages, "gradients", "gradient scale", "embed_tokens", "pp degree 2 inverted"),
    Planted("pipeline", "the schedule divides gradients by the number of micro-batches", "stages",
            divided_by_micro_batches, "gradients", "gradient scale", "embed_tokens", "accumulation degree 3"),
    Planted("pipeline", "the last stage takes the labels of another micro-batch", "stages",
            labels_of_another_micro_batch, "loss", "labels", "loss"),
    Planted("pipeline", "a stage forgets the gradients of its first micro-batch", "stages",
            first_micro_batch_forgotten, "gradients", "gradient normalisation", "embed_tokens", "left out"),
    Planted("dropout", "every pipeline stage starts its masks anew", "stages, dropout",
            masks_of_each_stage, "loss", "dropout", "loss"),
    Planted("position ids", "positions start again in each rank's part of the sequence", "shared sequences",
            part_changed_by(positions_from_zero), "loss", "forward pass", "loss"),
    Planted("padding and label masks", "the last label of each chunk of a sequence is lost", "shared sequences",
            part_changed_by(labels_after_cutting), "weight", "loss normalisation", "weight", "fewer items"),
    Planted("context-parallel loss scale", "the loss is multiplied by the cp degree", "shared sequences",
            multiplied_by_ranks, "gradients", "gradient scale", "embed_tokens", "cp degree 2"),
    Planted("context parallel", "keys get no gradients of other ranks' queries", "shared sequences",
            key_gradients_kept, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("context parallel", "a rank's second chunk does not see the chunks of later ranks", "shared sequences",
            later_keys_unseen, "loss", "forward pass", "loss", "other ranks"),
]  # fmt: skip
