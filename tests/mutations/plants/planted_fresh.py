"""Mistakes where nobody had planted any: four bits in shards, rows that are gathered or stand in, drawn noise.

And small ones in ways that no other file has: biases, doubled blocks, stale rates, two decays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from planted import Objective, Patch, Planted, backward_scaled_by, counted, nothing, objective_changed_by
from planted_lines import VOCABULARY, line
from planted_story import after_restoring, on_local, saved_changed_by
from planted_three import clipped_at_twice_the_norm, running_statistics_of_one_rank
from torch.distributed.tensor import DTensor

from paceline.run.assemble import Assembled
from paceline.run.loop import training
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.passes import SequentialPasses
from paceline.run.loop.step import Stepper
from paceline.run.parallel import apply
from paceline.run.process.world import World
from paceline.run.updates import one_rule

STEP, SPLIT = "run.loop.step:Stepper._update", "run.parallel.pipeline.split"
CLIPPED = "min(1.0, clip_norm / (norm + CLIP_EPS))"
UPDATED = "    self.updater.step()\n"
TWICE = (
    f"{UPDATED}    for group in self.optimizer.param_groups:\n        for p in group['params']:\n"
    "            local_of(p).mul_(1 - group['lr'] * (group.get('weight_decay') or 0.0))\n"
)
DROPPED = (
    "        for unit in self.units:\n            for group in unit._get_fsdp_state()._fsdp_param_groups:\n"
    "                for held in group.fsdp_params:\n                    held.sharded_param.grad = None\n"
)
NORM = "task.models.layers.batch_norm:WholeBatchNorm._over_ranks"


def moments_saved_in_fp32(patch: Patch, world: World) -> None:
    saved_changed_by(
        patch,
        lambda held: {
            name: on_local(t, lambda x: x.float().to(x.dtype)) if ".exp_avg" in name else t for name, t in held.items()
        },
    )


FRESH_PROOFS = [
    Planted("adapters", "every rank keeps the first part of a base in four bits", "four bits, shards",
            line("task.adapt.linear:PackedLinear.pack", ("narrow(0, begin, size)", "narrow(0, 0, size)")),
            "initial", "initial weights", "nf4"),
    Planted("coupled rows", "gathered rows of unequal ranks are counted as if they were equal", "gathered rows of four",
            line("run.parallel.data.rows_of_all_ranks:GatheredRows.__call__",
                 ("sum(rows[: self.group.rank()])", "sum(rows) // len(rows) * self.group.rank()")),
            "loss", "labels", "loss"),
    Planted("coupled rows", "a row that stands in is gathered with the others", "gathered rows of four",
            line("run.parallel.data.rows_of_all_ranks:GatheredRows.without_own", ("counts=False", "counts=True")),
            "loss", "labels", "loss", part="stand-in rows"),
    Planted("buffers", "a row that stands in counts in statistics of all ranks", "statistics of all of four",
            line("run.parallel.data.statistics:RankSums.__call__", ("x if self.counts else x * 0.0", "x")),
            "loss", "batch-norm statistics", "loss", part="stand-in rows"),
    Planted("noise", "tensor ranks draw the noise of the first one's part of a sequence",
            "noise, shared sequences, tensor",
            line("run.numerics.randomness.shares:RankPart.along",
                 ("shared[self.tp_rank * local : (self.tp_rank + 1) * local]", "shared[:local]")),
            "loss", "forward pass", "loss"),
    # Beside tables of numbers that are huge or infinite, which nothing moves.
    Planted("batch-norm statistics", "beside a mask of huge numbers one rank alone keeps running statistics",
            "statistics beside tables", running_statistics_of_one_rank, "buffers", "batch-norm statistics",
            "running_mean"),
    Planted("clipping", "beside a frozen table of huge numbers gradients are clipped at twice the threshold",
            "statistics beside tables", clipped_at_twice_the_norm, "weights", "optimizer", "", "clipping"),
    # ---- tensor ranks
    Planted("tensor parallel", "gradients of norms are averaged over tensor ranks", "tensor",
            line("run.parallel.tensor:SummedGradients.finish",
                 ("grad.copy_(total.view(grad.shape))", "grad.copy_(total.view(grad.shape) / self.group.size())")),
            "gradients", "gradient scale", "layernorm"),
    Planted("tensor parallel", "every rank adds the first rows of a column layer's bias", "biases, tensor",
            line("run.parallel.region:own_bias", ("first_row(layer.bias.shape[0], region.group)", "0")),
            "error", "", "", "do not compute what the model does"),
    Planted("tensor parallel", "every tensor rank adds the bias of a row layer", "biases, tensor",
            line("run.parallel.tensor:_row",
                 ("region.leave(F.linear(x, local_weight(layer.weight)))",
                  "region.leave(F.linear(x, local_weight(layer.weight), layer.bias))"),
                 ("out if layer.bias is None else out + layer.bias", "out")),
            "error", "", "", "do not compute what the model does"),
    Planted("tensor parallel", "parts of a sequence are gathered from the last rank to the first", "tensor",
            line("task.models.layers.collectives:_gathered", ("parts.movedim(0,", "parts.flip(0).movedim(0,")),
            "loss", "forward pass", "loss"),
    Planted("dropout", "tensor ranks draw the masks of the first one's features", "LoRA with dropout, tensor",
            line("run.numerics.randomness.shares:RankPart.along",
                 ("return torch.arange(first, first + local)", "return torch.arange(local)")),
            "loss", "dropout", "loss"),
    # ---- pipelines
    Planted("pipeline", "a stage runs the last block of the stage before once more", "stages",
            line(f"{SPLIT}:_names_by_stage",
                 ("set(blocks[start : start + count])", "set(blocks[max(0, start - 1) : start + count])")),
            "loss", "labels", "loss"),
    Planted("tied weights", "what the ends of a pipeline tell each other of a tied weight is rounded to fp32",
            "stages, tied",
            line(f"{SPLIT}:PipelineGradients._add_partners", ("grad.add_(theirs)", "grad.add_(theirs.float())")),
            "gradients", "tied weights", "embed_tokens.weight"),
    Planted("auxiliary loss", "the balance of a row that stands in has a gradient", "experts, stages, copies",
            line("run.parallel.pipeline.stage_module:StageModule.forward",
                 ("apply(found.hidden, loss_sum * down)", "apply(found.hidden, loss_sum * self._down)")),
            "gradients", "gradient normalisation", "embed_tokens", part="stand-in rows"),
    # ---- sequences and experts that ranks share
    Planted("context parallel", "gradients of keys come home in the reverse order of ranks", "sequences shared by four",
            line("run.parallel.context.exchange:Gathered.add",
                 (".permute(2, 0, 1, 3, 4)", ".permute(2, 0, 1, 3, 4).flip(0)")),
            "gradients", "gradient normalisation", "embed_tokens"),
    Planted("token dispatch", "results come home in the order of the experts", "experts",
            line("run.parallel.expert.all_to_all:AllToAll.combine", ("results[order]", "results")),
            "loss", "labels", "loss"),
    Planted("router statistics", "selection biases follow the load of the layer before", "experts",
            line("run.loop.routing:RouterWatch.finish", ("loads[place]", "loads[place - 1]")),
            "buffers", "router statistics", "correction_bias"),
    # ---- shards and copies
    Planted("unused parameters", "a weight that another copy alone reached has no gradient", "branches, hybrid",
            line("run.parallel.data.reached_weights:ReachedWeights.drop_unreached",
                 ("in self._groups:", "in self._groups[1:]:")),
            "gradients", "gradients not summed", "branches"),
    Planted("gradient synchronisation", "gradients of all but the last micro-batch are dropped", "zero 2",
            line("run.parallel.data.sharding:ShardedGradients.before_micro_batch",
                 ("self._passes += 1", f"self._passes += 1\n    if last:\n{DROPPED}")),
            "gradients", "gradient normalisation", "embed_tokens"),
    Planted("coupled rows", "gradients of gathered rows are averaged over ranks", "gathered rows of four",
            line("run.parallel.data.rows_of_all_ranks:_SumRows.forward",
                 ("total[:count]", "total[:count] / group.size()")),
            "gradients", "gradient normalisation", ""),
    Planted("batch-norm statistics", "variances are each rank's own, and means those of all", "statistics of all",
            line(NORM, ("add_up(centred.square().sum(over))", "centred.square().sum(over) * count / own")),
            "loss", "batch-norm statistics", "loss"),
    Planted("batch-norm statistics", "running variances are not corrected for the number of rows", "statistics of all",
            line(NORM, ("/ (count - 1), factor", "/ count, factor")),
            "buffers", "batch-norm statistics", "running_var"),
    Planted("outer step", "copies move by the sum of their changes", "outer steps",
            line("run.replicas.outer:OuterSteps.after_update", ("mean /= self.copies", "pass")),
            "weights", "optimizer", "", part="copies in step"),
    Planted("sample order", "the first row of a micro-batch was the last of the one before", "copies",
            line("run.loop.loader:split_rows",
                 ("[count * part // parts :", "[max(0, count * part // parts - 1) :")),
            "samples", "sample order", "position"),
    # ---- updates
    Planted("clipping", "gradients are clipped twice", "copies",
            line(STEP, (CLIPPED, f"{CLIPPED} ** 2")), "weights", "optimizer", "", "clipping"),
    Planted("clipping", "the norm that clips lacks torch's small number", "zero 3",
            line(STEP, ("(norm + CLIP_EPS)", "norm")), "weights", "optimizer", "", "clipping"),
    Planted("optimizer", "weights decay twice where they are sharded", "zero 3",
            line(STEP, (UPDATED, TWICE)), "weights", "optimizer", ""),
    Planted("optimizer", "state on the host is updated at the rate of the start", "state on the host",
            line("run.memory.offload_state:OffloadedUpdate.step",
                 ("bucket.worker.param_groups[0].update({k: v for k, v in bucket.group.items() if k != \"params\"})",
                  "pass")),
            "weights", "optimizer", ""),
    Planted("optimizer", "a rule for whole weights keeps its first learning rate", "muon, zero 3",
            line("run.updates.one_rule:WholePart.step",
                 ("worker.param_groups[0].update(options(self._group))", "pass")),
            "weights", "optimizer", ""),
    Planted("optimizer", "a rule by elements keeps its first learning rate", "own rule, zero 3",
            line("run.updates.one_rule:LocalPart.step", ("theirs.update(options(ours))", "pass")),
            "weights", "optimizer", ""),
    Planted("learning rate", "warm-up begins at zero", "copies",
            line("task.optimizer.schedule:learning_rate", ("peak * step / warmup_steps",
                                                            "peak * (step - 1) / warmup_steps")),
            "lr", "learning rate", "lr", part="story", step=1),
    Planted("checkpoint", "moments are rounded to fp32 in a checkpoint", "zero 3", moments_saved_in_fp32,
            "moments", "checkpoint", "exp_avg", part="story", step=3),
]  # fmt: skip


# ---- what frameworks and users have done, planted for the first time -------------------------------------------------

SCALED = "torch._foreach_mul_([local_of(p.grad) for p in turn.parameters if p.grad is not None], factor)"
OWN_CLIP = (
    "[own.mul_(correction * min(1.0, clip_norm / (float(own.norm()) * correction + CLIP_EPS)))"
    "\n         for own in (local_of(p.grad) for p in turn.parameters if p.grad is not None)]"
)
ROUNDED = (
    f"{UPDATED}    for state in self.optimizer.state.values():\n"
    "        state['exp_avg'].copy_(state['exp_avg'].bfloat16())\n"
)
COUNTED = f"{UPDATED}    for state in self.optimizer.state.values():\n        state['step'].add_(self.world.size - 1)\n"
COUPLED_DECAY = (
    "    for group in self.optimizer.param_groups:\n        decay, group['weight_decay'] = group['weight_decay'], 0.0\n"
    "        for p in group['params']:\n            local_of(p.grad).add_(local_of(p), alpha=decay)\n"
    f"{UPDATED}"
)
IDS = "self._seed, coming.reshape(-1))"
EPOCH_END = "(int(positions[-1]) // self._source.samples + 1) * self._source.samples"


def last_micro_batch_by_its_own_items(patch: Patch, world: World) -> None:
    """The last micro-batch divides by its own items times their number, those before it rightly."""

    def factor(micro: MicroBatch, all_of_rank: list[MicroBatch]) -> float:
        is_last = micro is all_of_rank[-1] and len(all_of_rank) > 1
        return sum(map(counted, all_of_rank)) / len(all_of_rank) / counted(micro) if is_last else 1.0

    backward_scaled_by(patch, factor)


def clipped_by_the_step_before(patch: Patch, world: World) -> None:
    update, before = Stepper._update, [float("inf")]

    def stale(self: Stepper, turn: Any, norm: float, correction: float, lr: float) -> None:
        used, before[0] = before[0], norm
        update(self, turn, used if used != float("inf") else 0.0, correction, lr)

    patch.setattr(Stepper, "_update", stale)


def balance_for_every_micro_batch(patch: Patch, world: World) -> None:
    """The balance loss counts as often as there are micro-batches."""

    def change(objective: Objective, micros: list[MicroBatch]) -> Objective:
        def weighed(model: Any, batch: Any) -> Any:
            config = model.config
            model.config = dataclasses.replace(config, balance_weight=config.balance_weight * len(micros))
            try:
                return objective(model, batch)
            finally:
                model.config = config

        return weighed

    objective_changed_by(patch, change)


def blocks_hook_twice(patch: Patch, world: World) -> None:
    """Hooks on what blocks give, of those that are computed again, run in both passes."""
    original = apply.checkpoint_block

    def twice(block: Any, *rest: Any, **more: Any) -> None:
        original(block, *rest, **more)
        forward = block.forward

        def hooked(*given: Any, **named: Any) -> Any:
            out = forward(*given, **named)
            if out.requires_grad:
                out.register_hook(lambda grad: grad * 2)
            return out

        block.forward = hooked

    patch.setattr(apply, "checkpoint_block", twice)


def gradients_by_own_items(patch: Patch, world: World) -> None:
    accumulate, update = SequentialPasses.accumulate, Stepper._update
    own = [1.0]

    def counted_items(self: SequentialPasses, *args: Any) -> tuple[object, Any]:
        loss_sum, weight = accumulate(self, *args)
        own[:] = [float(weight)]  # type: ignore[arg-type]
        return loss_sum, weight

    def scaled_by_own(self: Stepper, turn: Any, norm: float, correction: float, lr: float) -> None:
        (total,) = world.sum(own)
        update(self, turn, norm, correction * total / (own[0] * world.size), lr)

    patch.setattr(SequentialPasses, "accumulate", counted_items)
    patch.setattr(Stepper, "_update", scaled_by_own)


def told_loss_of_the_first_rank(patch: Patch, world: World) -> None:
    add_up = World.add_up

    def own_loss(self: World, vector: Any) -> None:
        own = vector[0].clone()
        add_up(self, vector)
        if len(vector) > 3:
            vector[0] = own * self.size

    patch.setattr(World, "add_up", own_loss)


def rules_see_shards(patch: Patch, world: World) -> None:
    """A rule for whole weights gets the gradient of a rank's own rows, and zeros for the others."""
    whole = one_rule.whole_of

    def own_rows(tensor: Any) -> Any:
        found = whole(tensor)
        if not isinstance(tensor, DTensor) or tensor.dim() < 2:
            return found
        local, kept = tensor.to_local(), torch.zeros_like(found)
        first = world.rank * -(-found.shape[0] // world.size)
        kept[first : first + len(local)] = local
        return kept

    patch.setattr(one_rule, "whole_of", own_rows)


def statistics_not_restored(patch: Patch, world: World) -> None:
    def forget(found: Any, arguments: tuple[Any, ...]) -> None:
        built = next(given for given in arguments if isinstance(given, Assembled))
        for name, buffer in built.model.named_buffers():
            if name.endswith("running_mean") and found is not None:
                buffer.zero_()

    after_restoring(patch, forget)


def rate_for_every_micro_batch(patch: Patch, world: World) -> None:
    rate = training.learning_rate
    patch.setattr(training, "learning_rate", lambda s, peak, step, total, *r: rate(s, peak, step * 3, total, *r))


def moments_of_a_shard_alone(patch: Patch, world: World) -> None:
    """Rank 1 begins its moments anew in every step."""

    update = Stepper._update

    def forgetting(self: Stepper, *given: Any) -> None:
        if self.world.rank:
            for state in self.optimizer.state.values():
                state["exp_avg"].zero_()
        update(self, *given)

    patch.setattr(Stepper, "_update", forgetting)


def evaluated_by_micro_batches(patch: Patch, world: World) -> None:
    """The held-out loss is a mean over micro-batches, however many items each has."""
    original = SequentialPasses.evaluate

    def means(self: SequentialPasses, micro_batches: Any, seen: Any = None) -> tuple[float, float]:
        parts = [original(self, [micro], seen) for micro in micro_batches if micro.counts]
        return sum(loss / weight for loss, weight in parts), float(len(parts))

    patch.setattr(SequentialPasses, "evaluate", means)


STRANGE_PROOFS = [
    # ---- sums and means
    Planted("accumulation normalisation", "the last micro-batch alone divides by its own items", "copies",
            last_micro_batch_by_its_own_items, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("data-parallel normalisation", "each rank divides the summed gradients by its own items", "copies",
            gradients_by_own_items,
            "gradients", "gradient scale", "embed_tokens"),
    Planted("record", "the loss that is told is the first rank's", "copies",
            told_loss_of_the_first_rank, "loss", "reported loss", "loss"),
    Planted("auxiliary loss", "the balance loss counts for every micro-batch", "experts, copies",
            balance_for_every_micro_batch, "loss", "labels", "loss"),
    Planted("recompute", "hooks of gradients run twice where blocks are computed again", "copies, recompute",
            blocks_hook_twice, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("gradient scale", "weights without dimensions are left out of the scaling", "scalar, hybrid",
            line(STEP, ("if p.grad is not None], factor)", "if p.grad is not None and p.dim()], factor)")),
            "weights", "optimizer groups", "temperature"),
    # ---- norms and clipping
    Planted("clipping", "every tensor is clipped by its own norm", "copies",
            line(STEP, (SCALED, OWN_CLIP)), "weights", "optimizer", "", "clipping"),
    Planted("clipping", "every shard of a tensor is clipped by its own norm", "zero 3",
            line(STEP, (SCALED, OWN_CLIP)), "weights", "optimizer", "", "clipping"),
    Planted("clipping", "gradients are clipped by value", "zero 3",
            line(STEP, (SCALED, f"{SCALED}; [local_of(p.grad).clamp_(-1e-3, 1e-3) for p in turn.parameters"
                                " if p.grad is not None]")),
            "weights", "optimizer", "", "clipping"),
    Planted("clipping", "the norm that clips is that of the step before", "copies",
            clipped_by_the_step_before, "weights", "optimizer", "", "clipping"),
    Planted("clipping", "the norm that clips is that of sums, before they are divided by the items", "zero 3",
            line(STEP, ("(norm + CLIP_EPS)", "(norm / correction + CLIP_EPS)")),
            "weights", "optimizer", "", "clipping"),
    Planted("gradient norm", "the norm is the largest tensor's", "copies",
            line("run.loop.step:Stepper._local_squares",
                 ("total += norm.double().square()", "total = max(total, norm.double().square())"),
                 ("norm_of(gradients)", "torch.nn.utils.get_total_norm(gradients, math.inf)")),
            "grad_norm", "gradient norm", "grad_norm"),
    # ---- updates
    Planted("optimizer", "Adam counts an update for every rank", "copies",
            line(STEP, (UPDATED, COUNTED)), "weights", "optimizer", "", step=2),
    Planted("optimizer", "Adam counts an update for every rank of shards", "zero 3",
            line(STEP, (UPDATED, COUNTED)), "weights", "optimizer", "", step=2),
    Planted("optimizer", "weights decay through their gradients, as in Adam of old", "copies",
            line(STEP, (UPDATED, COUPLED_DECAY)), "weights", "optimizer", ""),
    Planted("half-reduced precision", "first moments of an fp32 run are kept in bf16", "zero 3",
            line(STEP, (UPDATED, ROUNDED)), "weights", "optimizer", "", step=2),
    Planted("optimizer", "one shard begins its moments anew in every step", "zero 3",
            moments_of_a_shard_alone, "weights", "optimizer", "", step=2),
    Planted("optimizer", "a rule for whole weights sees a rank's own rows alone", "muon, zero 3",
            rules_see_shards, "weights", "optimizer", ""),
    Planted("router statistics", "selection biases move once for every rank", "experts",
            line("run.loop.routing:RouterWatch.finish",
                 ("config.bias_rate)", "config.bias_rate * self.plan.layout.devices)")),
            "buffers", "router statistics", "correction_bias"),
    Planted("learning rate", "the schedule is stepped for every micro-batch", "copies",
            rate_for_every_micro_batch, "lr", "learning rate", "lr", part="story", step=1),
    # ---- experts, adapters, vocabularies
    Planted("token dispatch", "experts have a capacity, by the tokens of their own rank", "experts",
            line("run.parallel.expert.all_to_all:AllToAll.combine",
                 ("exchange_rows(results[order]",
                  "exchange_rows((results * (torch.arange(len(results)) < 24).unsqueeze(1))[order]")),
            "loss", "labels", "loss"),
    Planted("adapter", "adapters are scaled by alpha over the root of the rank", "LoRA, tensor",
            line("task.adapt.linear:adapted_product",
                 ("thin_out.T) * spec.scale", "thin_out.T) * spec.scale * spec.rank**0.5")),
            "loss", "forward pass", "loss"),
    Planted("vocabulary", "rows that fill up a vocabulary count in the softmax", "tensor",
            line(f"{VOCABULARY}:_losses",
                 ("dist.all_reduce(sums, group=group)",
                  "dist.all_reduce(sums, group=group); sums[:, :1] += (-largest).exp()")),
            "loss", "forward pass", "loss"),
    # ---- samples, evaluations, restarts
    Planted("sample order", "an epoch is filled up with its last sample", "copies",
            line("task.data.order.many_steps:StepIds.at",
                 (IDS, f"self._seed, np.minimum(coming, {EPOCH_END} - 2).reshape(-1))")),
            "samples", "sample order", "", part="story"),
    Planted("evaluation", "the held-out loss is a mean of the micro-batches' means", "copies",
            evaluated_by_micro_batches, "evaluation", "evaluation", part="story"),
    Planted("evaluation", "evaluations normalise by the statistics of their own batch", "statistics of all",
            line("run.loop.evaluate:evaluate", ("with evaluating(model), ", "with ")),
            "buffers", "batch-norm statistics", "running_mean", part="story"),
    Planted("resume state", "running means start again after a restart", "statistics of all",
            statistics_not_restored, "buffers", "checkpoint", "running_mean", part="story"),
    # ---- what a stranger's model or objective does
    *(Planted("loss not a sum over rows", what, what, nothing, "whole batch", "loss not a sum over rows", "loss",
              "pieces of", part="whole batch") for what in (
        "capacity by the tokens of a micro-batch", "attention takes rows for tokens", "positions go on from row to row",
        "rows are mixed with others of their micro-batch", "a z-loss is a mean",
        "classes weigh by a micro-batch's own counts", "the harder half of a micro-batch")),
    *(Planted("process group", what, what, nothing, "loss", "labels", "loss")
      for what in ("noise by a seed of the rank", "a rank scales by its own number")),
]  # fmt: skip
FRESH_PROOFS += STRANGE_PROOFS
