"""Mistakes of one line in what few tasks have: growth, metrics, ends of epochs, groups that freeze, selection."""

from __future__ import annotations

from planted import Planted
from planted_lines import line

OPTIMIZER, PARTS, OFFLOAD = "run.updates.optimizer", "run.updates.one_rule", "run.memory.offload_state:OffloadedUpdate"
GROWTH, PIPELINE = "run.updates.growth:BatchGrowth", "run.parallel.pipeline.passes"
MEASURED, ORDER = "run.evaluate.held_out_metrics", "task.data.order.many_steps"
OUTER, SUMS = "run.replicas.outer:OuterSteps", "run.replicas.bucket_sums:RoundedSums"
IDS = "self._seed, coming.reshape(-1))"
ENDS = "coming[:, :1] // self._source.samples"  # in which epoch a batch begins

RARE_PROOFS = [
    # ---- parameter groups, and state that rests elsewhere
    Planted("optimizer", "a group without decay gets the optimizer's own", "copies",
            line(f"{OPTIMIZER}:_group", ("treatment.weight_decay is None else", "not treatment.weight_decay else")),
            "weights", "optimizer groups", "norm"),
    Planted("optimizer", "arguments of a group are those of the first group", "betas of a group, zero 3",
            line(f"{OPTIMIZER}:_of_torch",
                 ('{**group["use"].arguments, **group}', '{**groups[0]["use"].arguments, **group}')),
            "weights", "optimizer", "down_proj", step=2),
    Planted("optimizer", "state on the host forgets how many updates there were", "state on the host",
            line(f"{OFFLOAD}.step",
                 ("{**self.optimizer.state[parameter], **state}",
                  "{**{k: v.clone() for k, v in self.optimizer.state[parameter].items()}, **state}")),
            "weights", "optimizer", "embed_tokens", step=2),
    Planted("optimizer", "a group that freezes keeps its last gradient", "groups frozen late, lion",
            line(f"{PARTS}:LocalPart.step", ("self._plain[weight].grad = None", "pass")),
            "weights", "optimizer", "down_proj", part="story", step=3),
    # ---- batches that grow
    Planted("growth", "a batch that grows by samples does so late", "growing by samples",
            line("spec.steps.growth:Piece.has_begun", ("(self.samples or 0)", "2 * (self.samples or 0)")),
            "samples", "growth", "", "task.growth", part="story", step=3),
    Planted("sample order", "rows of a batch that grew are those of the size before", "growing batches",
            line(f"{ORDER}:StepIds.at",
                 ("(samples, rows) != (self._samples, self._known.shape[1])", "rows != self._known.shape[1]")),
            "samples", "sample order", "", part="story", step=8),
    Planted("growth", "the noise scale is that of other batches", "growing by noise",
            line(f"{GROWTH}.measured", ("(1 / small - 1 / samples)", "(1 / small)")),
            "grad_norm", "growth", "covariance_trace", "noise of gradients", part="story", step=2),
    Planted("growth", "the small batch is twice as large as it is counted", "growing by noise",
            line("run.loop.under_plan:UnderPlan.first_of", ("batch.step, samples)", "batch.step, samples * 2)")),
            "grad_norm", "growth", "covariance_trace", "noise of gradients", part="story", step=2),
    Planted("growth", "what noise has decided is lost in a checkpoint", "growing by noise",
            line(f"{GROWTH}.load", ('[(int(after), int(samples)) for after, samples in state["grown"]]', "[]")),
            "error", "", "", "it was written or read wrongly", part="story"),
    # ---- selection
    Planted("selection", "what is drawn of candidates has no weight of its own", "selection",
            line("run.updates.selection:BatchSelection._weighted",
                 ("weights[micro.places - batch.position]", "weights[micro.places - batch.position] * 0 + 1.0")),
            "loss", "selection", "loss", "weighted, otherwise", part="story", step=1),
    Planted("selection", "weights forget that the step divides by the items it trains on", "selection",
            line("run.updates.selection:BatchSelection.choose", ("(items[places].sum() / items.sum())", "1.0")),
            "loss", "selection", "loss", "weighted, otherwise", part="story", step=1),
    Planted("selection", "every candidate has the same chance", "selection",
            line("run.updates.selection:BatchSelection.choose", ("self._spec.even)", "1.0)")),
            "samples", "selection", "chosen", part="story", step=1),
    Planted("selection", "of the largest losses the sums count, not the means", "largest losses",
            line("run.updates.selection:BatchSelection.choose",
                 ("losses / np.maximum(items, 1e-300) * (items > 0)", "losses")),
            "samples", "selection", "chosen", part="story", step=1),
    Planted("selection", "ranks choose by their own scores", "selection",
            line("run.updates.selection:BatchSelection._scored", ("self._stepper.sync.add_up(flat)", "pass")),
            "error", "", "", "no longer agree on which samples were chosen", part="story"),
    # ---- evaluations
    Planted("evaluation", "a held-out row that stands in counts in a pipeline", "stages, copies",
            line(f"{PIPELINE}:PipelinePasses.evaluate", ("if micro_batches[number].counts:", "if True:")),
            "evaluation", "evaluation", part="story"),
    Planted("evaluation", "every tensor rank counts held-out items", "tensor",
            line("run.loop.passes:SequentialPasses.evaluate",
                 ("return self._share(float(loss_total)), self._share(float(weight_total))",
                  "return float(loss_total), float(weight_total)")),
            "evaluation", "evaluation", "items", "off by the number of ranks, 2", part="story"),
    Planted("metrics", "every tensor rank counts what metrics add up", "metrics, tensor",
            line(f"{MEASURED}:measure", ("sums.over(world, _counts(stepper))", "sums.over(world, True)")),
            "evaluation", "evaluation", "bits_per_byte", "sums", part="story"),
    Planted("metrics", "metrics are those of the first rank", "metrics, copies",
            line(f"{MEASURED}:Sums.over",
                 ("np.array(world.sum(flat) if flat else []", "np.array(world.share(flat) if flat else []")),
            "evaluation", "evaluation", "", "sums", part="story"),
    Planted("noise", "evaluations have noise", "noise, copies",
            line("task.adapt.noise:EmbeddingNoise.__call__", ("module.training and self.is_on", "self.is_on")),
            "evaluation", "evaluation", part="story"),
    # ---- ends of epochs
    Planted("sample order", "a second epoch is like the first", "copies",
            line(f"{ORDER}:StepIds.at", (IDS, "self._seed, coming.reshape(-1) % self._source.samples)")),
            "samples", "sample order", "", part="story", step=2),
    Planted("sample order", "a batch ends with the epoch in which it begins", "copies",
            line(f"{ORDER}:StepIds.at",
                 (IDS, f"self._seed, np.minimum(coming, ({ENDS} + 1) * self._source.samples - 1).reshape(-1))")),
            "samples", "sample order", "", part="story", step=2),
    # ---- copies that are not summed exactly, stages
    Planted("outer step", "copies come together a step late", "outer steps",
            line(f"{OUTER}.after_update", ("self._sync.differs_after(step)", "self._sync.differs_after(step - 1)")),
            "weights", "optimizer", "", part="copies in step"),
    Planted("outer step", "the norm that is told is that of all copies added up", "outer steps",
            line(f"{OUTER}.over_all", ("totals.grad_norm**2 / self.copies", "totals.grad_norm**2")),
            "grad_norm", "gradient norm", "grad_norm", part="copies in step"),
    Planted("rounded sums", "what was left out is saved from one place", "rounded sums",
            line(f"{SUMS}.begin", ("view.storage_offset())", "0)")),
            "grad_norm", "checkpoint", "", "lacks", part="copies in step", step=4),
    Planted("pipeline", "of a rank's stages the loss of the last one is told", "experts, interleaved",
            line(f"{PIPELINE}:PipelinePasses.accumulate",
                 ("sum(stage.loss_total for stage in self._stages)", "self._stages[-1].loss_total")),
            "loss", "reported loss", "loss"),
    Planted("dropout", "masks come again after some steps", "dropout",
            line("run.loop.passes:sample_rows",
                 ("draws_as(micro.step) if draws_as", "draws_as(micro.step % 3) if draws_as")),
            "loss", "dropout", "loss", part="story", step=3),
]  # fmt: skip
