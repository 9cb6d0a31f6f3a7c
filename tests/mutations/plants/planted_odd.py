"""Mistakes of one line where two options of a task meet, each of which is right alone, and in what a step tells."""

from __future__ import annotations

from planted import Planted
from planted_lines import line

PARTS, STEP, LOADER = "run.updates.one_rule", "run.loop.step:Stepper", "run.loop.loader"
ROUTING, OPTIMIZER, MOE = "run.loop.routing:RouterWatch", "run.updates.optimizer", "task.models.moe"
MEASURED, GROWTH, STATE = "run.evaluate.held_out_metrics", "run.updates.growth:BatchGrowth", "checkpoint.state"
BRANCHES = "branches.14.bias"

ODD_PROOFS = [
    # ---- optimizers, groups, weights of two names
    Planted("optimizer", "a rule for whole weights keeps its first rate", "muon, zero 3",
            line(f"{PARTS}:WholePart.step", ("worker.param_groups[0].update(options(self._group))", "pass")),
            "weights", "optimizer", "embed_tokens"),
    Planted("optimizer", "counts that a rule keeps as numbers of Python's are read as none", "own rule, zero 3",
            line(f"{PARTS}:RuleNumbers.read", ("kind(shown[name].item())", "kind(0)")),
            "weights", "optimizer", "embed_tokens", step=2),
    Planted("optimizer", "groups that differ in decay alone are one", "copies",
            line(f"{OPTIMIZER}:build_optimizer",
                 ("treatment.weight_decay, treatment.lr_scale, mesh", "treatment.lr_scale, mesh")),
            "weights", "optimizer groups", "norm"),
    Planted("optimizer", "a group's rate forgets that of its layer", "layer rates and groups, stages",
            line("task.optimizer.groups:Treatments.of",
                 ("group.lr_scale * scale", "group.lr_scale if group.match else scale")),
            "weights", "optimizer", "down_proj"),
    Planted("tied weights", "a tied weight is in the group of one of its names alone", "tied group, stages",
            line(f"{OPTIMIZER}:build_optimizer", ("(names or {}).get(name, (name,))", "(name,)")),
            "weights", "optimizer", "embed"),
    Planted("tied weights", "a tied weight freezes by one of its names alone", "tied group frozen, stages",
            line(f"{STEP}.__post_init__", ("self.names.get(name, (name,))", "(name,)")),
            "grad_norm", "gradient norm", "grad_norm", part="story", step=1),
    Planted("tied weights", "a tied weight has the rate of its upper place", "layer rates, stages, tied",
            line("task.optimizer.layer_rates:layer_scales",
                 ("= max(depths.get(parameter, 0), depth)", "= min(depths.get(parameter, 99), depth)")),
            "weights", "optimizer", "embed"),
    # ---- what is reached in some steps
    Planted("unused parameters", "a weight that a copy reached once counts as reached", "branches, copies",
            line("run.replicas.allreduce:ReducedGradients.zero", ("bucket.reached.clear()", "pass")),
            "gradients", "state between steps", BRANCHES, step=2),
    Planted("unused parameters", "a weight that a shard reached once counts as reached", "branches, zero 3",
            line("run.parallel.data.reached_weights:ReachedWeights.forget", ("self._reached.clear()", "pass")),
            "gradients", "state between steps", BRANCHES, step=2),
    # ---- rows, sequences, documents
    Planted("uneven batches", "the last rows of micro-batches of two sizes are left out", "copies",
            line(f"{LOADER}:split_rows",
                 ("rows[count * part // parts : count * (part + 1) // parts]",
                  "rows[part * max(1, count // parts) : (part + 1) * max(1, count // parts)]")),
            "samples", "batch not as asked"),
    Planted("packed documents", "positions go on through documents", "packed rows, copies",
            line("task.models.layers.documents:document_positions",
                 ("places - places.where(begins, 0).cummax(dim=1).values", "places + 0 * begins")),
            "gradients", "gradient normalisation", "input_layernorm"),
    Planted("packed documents", "all documents of a row see each other", "packed rows, copies",
            line("task.models.layers.documents:document_mask", ("(same & (places", "((same | ~same) & (places")),
            "loss", "labels", "loss"),
    # ---- experts, and what is told of them
    Planted("router statistics", "the entropy that is told is over all choices", "experts, copies",
            line(f"{ROUTING}.finish", ("table[:, ENTROPY] / tokens /", "table[:, ENTROPY] / counts.sum(axis=1) /")),
            "loss", "router statistics", "entropy of", "what is told of routers"),
    Planted("router statistics", "the balance that is told counts every tensor rank", "experts, tensor",
            line(f"{ROUTING}.finish", ("float(table[:, BALANCE].mean())",
                                       "float(table[:, BALANCE].mean() * self.plan.layout.tp)")),
            "loss", "router statistics", "balance of routers", "by a factor 2"),
    Planted("router statistics", "routers count the last micro-batch alone", "experts",
            line(f"{ROUTING}.collect",
                 ("ran.routed if self._total is None else self._total + ran.routed", "ran.routed")),
            "router", "router statistics", "mlp.gate"),
    Planted("router statistics", "what noise is measured on counts as routed", "growing by noise, experts",
            line(f"{STEP}.grad_norm_of", ("    if self.routing:\n        self.routing.take()\n", "")),
            "router", "router statistics", "mlp.gate", part="story", step=1),
    Planted("auxiliary loss", "balance counts a rank's own items of a shared sequence", "experts, shared sequences",
            line(f"{MOE}:MoEDecoder._added_loss", ("items = self.over_sequence(items)", "pass")),
            "loss", "forward pass", "loss"),
    Planted("shared experts", "outputs of shared experts are not summed", "shared experts, tensor",
            line(f"{MOE}:MoE.forward",
                 ("    if self.shared_experts is not None:\n        out = out + self.shared_experts(x)\n"
                  "    if self.region is not None:\n        out = self.region.leave(out)\n",
                  "    if self.region is not None:\n        out = self.region.leave(out)\n"
                  "    if self.shared_experts is not None:\n        out = out + self.shared_experts(x)\n")),
            "error", "", "", "layout tp=2 ends with an error in its proof"),
    # ---- selection, growth, metrics, checkpoints
    Planted("selection", "chosen rows draw the random numbers of their neighbours", "selection, dropout",
            line("run.loop.passes:sample_rows",
                 ("    if positions is None:\n        positions =", "    if True:\n        positions =")),
            "loss", "selection", "loss", part="story", step=1),
    Planted("selection", "the balance of chosen rows has no weight", "selection, experts",
            line(f"{MOE}:MoEDecoder._added_loss", ("rows = rows * labels.weights.to(rows)", "pass")),
            "loss", "selection", "loss", part="story", step=1),
    Planted("growth", "measurements of noise are lost in a checkpoint", "growing by noise, rarely",
            line(f"{GROWTH}.load",
                 ("self._measured.extend((spread, square) for spread, square in state[\"measured\"])", "pass")),
            "error", "", "", "it was written or read wrongly", part="story"),
    Planted("metrics", "logits of the last micro-batch are not measured", "metrics, copies",
            line(f"{MEASURED}:pass_logits", ("passes.evaluate(batches,", "passes.evaluate(batches[:-1] or batches,")),
            "evaluation", "evaluation", "accuracy", part="story"),
    Planted("checkpoint", "selection biases are not saved", "experts",
            line(f"{STATE}:_model_names",
                 ("if id(tensor) not in seen:", "if id(tensor) not in seen and 'correction_bias' not in name:")),
            "buffers", "checkpoint", "correction_bias", part="story", step=3),
    Planted("gradient norm", "fp16: the norm that clips is still scaled", "copies, fp16",
            line(f"{STEP}._make", ("norm = math.sqrt(told.squares) * correction",
                                   "norm = math.sqrt(told.squares) * correction * scale")),
            "grad_norm", "other numbers", "grad_norm", part="low precision"),
]  # fmt: skip
