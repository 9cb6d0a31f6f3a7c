"""Mistakes where nobody had planted any: four bits in shards, rows that are gathered or stand in, drawn noise.

And small ones in ways that no other file has: biases, doubled blocks, stale rates, two decays.
"""

from __future__ import annotations

from planted import Patch, Planted
from planted_lines import line
from planted_story import on_local, saved_changed_by
from planted_three import clipped_at_twice_the_norm, running_statistics_of_one_rank

from paceline.run.process.world import World

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
            line("run.parallel.expert.experts:AllToAll.combine", ("results[order]", "results")),
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
            line("run.parallel.data.rows_of_all_ranks:_GatherRows.backward",
                 ("total[:count]", "total[:count] / ctx.group.size()")),
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
