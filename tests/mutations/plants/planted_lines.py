"""Mistakes of one line each: a piece of a function's source is replaced by another, in the ranks of a proof."""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from planted import Patch, Plant, Planted, nothing

from paceline.run.process.world import World


def line(target: str, *pieces: tuple[str, str]) -> Plant:
    """Return what replaces pieces of the source of `module:function`, or of `module:Class.method`, of ours."""

    def changed() -> tuple[Any, Any]:
        """Return the function and the code that it has with the pieces replaced."""
        function = _function(target)
        source = textwrap.dedent(inspect.getsource(function))
        source = source[source.index("def ") :]  # without decorators
        for old, new in pieces:
            assert source.count(old) == 1, f"{target} has '{old}' {source.count(old)} times: the plant is stale"
            source = source.replace(old, new)
        made: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(source, target, "exec", flags, dont_inherit=True), function.__globals__, made)
        return function, made[function.__name__].__code__

    def plant(patch: Patch, world: World) -> None:
        function, code = changed()
        patch.setattr(function, "__code__", code)  # for all who have imported it

    plant.is_source, plant.checks = True, [changed]  # type: ignore[attr-defined]
    return plant


def checks_of(plant: Plant) -> list[Callable[[], Any]]:
    """Return what raises where a line that a plant changes is no longer there; nothing for plants of other kinds."""
    return list(getattr(plant, "checks", []))


def _function(target: str) -> Any:
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(f"paceline.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    found = getattr(found, "_init_fn", found)  # what an operator of ours runs
    return inspect.unwrap(getattr(found, "__func__", found))


def both(*plants: Plant) -> Plant:
    """Return several plants as one."""

    def plant(patch: Patch, world: World) -> None:
        for each in plants:
            each(patch, world)

    plant.is_source = all(getattr(each, "is_source", False) for each in plants)  # type: ignore[attr-defined]
    plant.checks = [check for each in plants for check in checks_of(each)]  # type: ignore[attr-defined]
    return plant


ZIGZAG, SHARED = "run.parallel.context.zigzag", "run.parallel.context.sequence_attention"
VOCABULARY, ADAPTED, STEP = "task.models.layers.vocabulary", "run.parallel.adapted", "run.loop.step"
STAGE, PIPELINE, LOADER = "run.parallel.pipeline.stage_module", "run.parallel.pipeline.passes", "run.loop.loader"
OUTER, OWN_LABEL = "run.replicas.outer", "held = (local >= 0) & (local < rows) & (labels != IGNORED)"

LINE_PROOFS = [
    # ---- shared sequences, and packed documents in them
    Planted("uneven sequences", "what is left of a sequence that does not divide is dropped", "shared sequences",
            line(f"{ZIGZAG}:chunk_tokens", ("-(-seq // (2 * ranks))", "max(1, seq // (2 * ranks))")),
            "weight", "loss normalisation", "weight", "labels are lost"),
    Planted("position ids", "the second chunk of a rank stands one place later", "shared sequences",
            line(f"{ZIGZAG}:places_of", ("- 2 * rank) * chunk))", "- 2 * rank) * chunk + 1))")),
            "loss", "forward pass", "loss"),
    Planted("context parallel", "of the blocks merged before, the weight of the last one alone is kept",
            "sequences shared by four",
            line("run.parallel.context.kernels:Merged.add", ("before.copy_(both)", "before.copy_(lse)")),
            "loss", "forward pass", "loss"),
    Planted("packed documents", "tokens see the documents before their own", "packed rows, shared sequences",
            line(f"{ZIGZAG}:SequencePart.__call__", ('part["mask"] = Packed', 'part["unread"] = Packed')),
            "loss", "forward pass", "loss"),
    Planted("packed documents", "positions are those in a rank's part of the rows", "packed rows, shared sequences",
            line(f"{ZIGZAG}:SequencePart.__call__",
                 ('whole["positions"] = document_positions(documents)', 'whole["documents"] = documents'),
                 ('if "positions" not in part:', 'part["positions"] = document_positions(part.pop("documents"))\n'
                  '    if "positions" not in part:')),
            "loss", "forward pass", "loss"),
    Planted("packed documents", "keys of the second chunk end one token early", "packed rows, shared sequences",
            line(f"{SHARED}:_masked", ("(index + 1) * chunk), (place + 1) * chunk",
                                       "(index + 1) * chunk), (place + 1) * chunk - (place > rank)")),
            "loss", "forward pass", "loss"),
    Planted("noise", "a rank's part of a sequence gets the noise of a whole one", "noise, shared sequences",
            line("task.adapt.noise:EmbeddingNoise.__call__", ("self.whole_length() or length", "length")),
            "loss", "forward pass", "loss"),
    # ---- ids beside the cuts of a vocabulary
    Planted("vocabulary", "a label that is the first row of a rank's part is nobody's", "tensor",
            line(f"{VOCABULARY}:_target", (OWN_LABEL, OWN_LABEL.replace(">=", ">"))), "loss", "forward pass", "loss"),
    Planted("vocabulary", "a label that is the last row of a rank's part is nobody's", "tensor",
            line(f"{VOCABULARY}:_target", (OWN_LABEL, OWN_LABEL.replace("< rows", "< rows - 1"))),
            "loss", "forward pass", "loss"),
    Planted("vocabulary", "a token that is the first row of a rank's part has no embedding", "tensor",
            line(f"{VOCABULARY}:partial_embedding", ("held = (local >= 0)", "held = (local > 0)")),
            "loss", "forward pass", "loss"),
    Planted("padding and label masks", "masked labels have a gradient on the ranks of a vocabulary", "tensor",
            line(f"{VOCABULARY}:_gradient", ("scale.to(sums.dtype)", "torch.ones_like(sums)")),
            "gradients", "gradient normalisation", "embed_tokens"),
    # ---- norms of gradients, groups of parameters
    Planted("gradient norm", "of experts spread over two axes one axis is counted", "experts, spread and tensor",
            line(f"{STEP}:Stepper.copies_of", ("math.prod(", "max(")),
            "grad_norm", "gradient norm", "grad_norm"),
    Planted("gradient norm", "copies of sharded experts are counted as parts", "experts, hybrid",
            line(f"{STEP}:Stepper.copies_of", (" if not place.is_replicate())", ")")),
            "grad_norm", "gradient norm", "grad_norm"),
    Planted("optimizer", "the final norm of the last stage decays", "stages",
            line("task.optimizer.groups:Treatments.of",
                 ("if dimensions >= 2 else 0.0", 'if dimensions >= 2 or names == ["norm.weight"] else 0.0')),
            "weights", "optimizer groups", "norm.weight"),
    Planted("optimizer", "the rate of a group is lost where its weights are sharded", "groups, zero 3",
            line("run.updates.rates:ScheduledRates.give", ('group.get("lr_scale", 1.0)', '1.0')),
            "weights", "optimizer", "down_proj"),
    Planted("optimizer", "a frozen group is trained one step too late", "frozen groups",
            line("task.optimizer.groups:frozen_groups", ("step <= until[at]", "step <= until[at] + 1")),
            "grad_norm", "gradient norm", "grad_norm", part="story", step=3),
    Planted("optimizer", "rates of blocks are those of the block above", "layer rates, stages",
            line("task.optimizer.layer_rates:layer_scales", ("above - (block + 1)", "above - block")),
            "weights", "optimizer", "layers."),
    Planted("optimizer", "a rule for whole weights forgets their momentum", "muon, zero 3",
            line("run.updates.one_rule:WholePart.step", ("self._keep(worker.state.pop(plain, {}))",
                                                      "worker.state.pop(plain, {})")),
            "weights", "optimizer", "embed_tokens", step=2),
    Planted("optimizer", "of the state on the host one moment stays as it was", "state on the host",
            line("run.memory.offload_state:OffloadedUpdate._send_home",
                 ("for name in self._offloaded(parameter):",
                  "for name in [n for n in self._offloaded(parameter) if n != 'exp_avg_sq']:")),
            "weights", "optimizer", "embed_tokens", step=2),
    Planted("recompute", "activations on the host are told apart by their size", "activations on the host",
            line("run.memory.offload:Visit.pack", ("storage.data_ptr(), tensor._version", "storage.nbytes(), 0")),
            "gradients", "gradient normalisation", "embed_tokens"),
]  # fmt: skip
MORE_PROOFS = [
    # ---- adapters, norms of queries, tied weights, stages
    Planted("adapter", "gradients of DoRA's magnitudes are not summed over tensor ranks", "DoRA, tensor",
            line(f"{ADAPTED}:spread_adapter", (', f"{name}.{MAGNITUDE}"}', "}")),
            "gradients", "gradient normalisation", "lora_magnitude_vector"),
    Planted("adapter", "DoRA's norms are those of a rank's part", "DoRA, tensor",
            line(f"{ADAPTED}:_adapted_in", ("magnitude_vector, total)", "magnitude_vector)")),
            "loss", "forward pass", "loss"),
    Planted("adapter", "gradients of the whole thin matrix are not summed over tensor ranks", "LoRA, tensor",
            line(f"{ADAPTED}:spread_adapter", ('return {f"{name}.{whole}", ', "return {")),
            "gradients", "gradient normalisation", "lora_A"),
    Planted("tensor parallel", "gradients of norms of queries are not summed", "query norms, tensor",
            line("run.parallel.tensor:split_layers", ('style in ("sequence", "summed")', 'style == "sequence"')),
            "gradients", "gradient normalisation", "q_norm"),
    Planted("tied weights", "the other stage's gradient of a tied weight is added twice", "stages, tied, shards",
            line("run.parallel.pipeline.split:PipelineGradients._add_partners",
                 ("grad.add_(theirs)", "grad.add_(theirs, alpha=2)")),
            "gradients", "tied weights", "embed_tokens"),
    Planted("pipeline", "a stage takes the last rows of what it was sent", "stages",
            line(f"{STAGE}:StageModule.forward", ("[: rows_in(micro)]", "[-rows_in(micro) :]")),
            "loss", "labels", "loss"),
    Planted("uneven batches", "a stand-in row has a gradient in a pipeline", "stages, copies",
            line(f"{STAGE}:StageModule.forward", ("down = self._down if micro.counts else 0.0", "down = self._down")),
            "gradients", "gradient normalisation", "embed_tokens"),
    Planted("expert gradients", "a rank's own experts keep the gradient of the last micro-batch", "experts",
            line("run.parallel.data.unshared_experts:UnsharedExperts.leaf", ("leaf is None or ", "True or ")),
            "gradients", "gradient normalisation", "experts"),
    Planted("expert gradients", "a rank's own experts keep the gradients of the step before", "experts",
            line("run.parallel.data.unshared_experts:UnsharedExperts.forget", ("leaf.grad = None", "pass")),
            "gradients", "state between steps", "experts", step=2),
    # ---- what no rank reached, random numbers, evaluations
    Planted("unused parameters", "a weight that no rank reached gets a gradient of zeros", "dropout, shards",
            line("run.parallel.data.sharding:ShardedGradients.settle",
                 ("self._reached.drop_unreached(self._model)", "pass")), "gradients", "dropout", "unused"),
    Planted("unused parameters", "a weight that no copy reached gets a gradient of zeros", "dropout",
            line("run.replicas.allreduce:ReducedGradients.settle",
                 ("if not ranks]", "if ranks < 0]")), "gradients", "dropout", "unused"),
    Planted("dropout", "masks come again in every micro-batch", "dropout",
            line("run.loop.passes:sample_rows", ("    step = draws_as", "    positions = np.arange(len(positions),"
                 " dtype=np.int64)\n    step = draws_as")), "loss", "dropout", "loss"),
    Planted("dropout", "masks come again in every step", "dropout",
            line("run.loop.passes:sample_rows", ("draws_as(micro.step) if draws_as", "1 if draws_as")),
            "loss", "dropout", "loss", step=2),
    Planted("evaluation", "the model is left as it is evaluated", "dropout",
            line("run.loop.evaluate:evaluate", ("with evaluating(model), ", "model.eval()\n    with ")),
            "loss", "dropout", "loss", part="story", step=2),
    Planted("evaluation", "dropout is on while samples are evaluated", "dropout",
            line("run.loop.evaluate:evaluate", ("with evaluating(model), ", "with ")),
            "evaluation", "evaluation", part="story"),
    Planted("evaluation", "a held-out row that stands in counts", "copies",
            line(f"{LOADER}:held_out_batches", ("len(part) > 0", "True")),
            "evaluation", "evaluation", part="story"),
    Planted("evaluation", "the last held-out samples are left out", "copies",
            line(f"{LOADER}:held_out_batches", ("0, len(chosen), ", "0, len(chosen) - together + 1, ")),
            "evaluation", "evaluation", part="story"),
    Planted("learning rate", "a batch that has grown keeps its learning rate", "growing batches",
            line("run.updates.growth:BatchGrowth.rate_factor",
                 ("rate_factor(self._spec.learning_rate, samples, self._course.first)", "1.0")),
            "lr", "learning rate", part="story", step=3),
    # ---- copies that are not summed exactly
    Planted("outer step", "momentum is not Nesterov's", "outer steps",
            line(f"{OUTER}:OuterSteps._move", ("change + momentum * self", "self")),
            "weights", "optimizer", "", part="copies in step", step=2),
    Planted("outer step", "the momentum of the outer step is lost in a checkpoint", "outer steps",
            line(f"{OUTER}:OuterSteps.named",
                 (', **of_parameters(self._model, self._momentum, "outer.", ".momentum")', "")),
            "weights", "checkpoint", "", "lacks", part="copies in step", step=4),
    Planted("outer step", "a copy's own weights are saved for the shared ones", "outer steps",
            line(f"{OUTER}:OuterSteps.named", ('of_parameters(self._model, self._shared, "model.")',
                 '{n: t for n, t in state.items() if n.startswith("model.")}')),
            "loss", "checkpoint", "", "lacks", part="copies in step", step=4),
    Planted("rounded sums", "what rounding left out is not added later", "rounded sums",
            line("run.replicas.bucket_sums:RoundedSums.start", ("    flat.add_(left)\n", "")),
            "weights", "optimizer", "", part="copies in step", step=2),
    Planted("rounded sums", "what rounding left out is lost in a checkpoint", "rounded sums",
            line("run.replicas.copy_sync:EveryStep.named", ("self.sums.kept() if self.sums else {}", "{}")),
            "weights", "checkpoint", "", "lacks", part="copies in step", step=4),
]  # fmt: skip
# Not mistakes of a line: what a stranger's objective does.
WORLD_PROOFS = [
    Planted("process group", "the objective divides its loss by the number of ranks", "loss by the world",
            nothing, "loss", "process group", "loss", "divides by no number of ranks"),
]  # fmt: skip
LOW_LINE_PROOFS = [
    Planted("loss scale", "fp16: a step that is skipped counts as an update", "copies, fp16",
            line(f"{STEP}:Stepper._may_update",
                 ("self.scaler.update(overflowed=True)", "self.scaler.update(overflowed=True); "
                  "[state['step'].add_(1) for state in self.optimizer.state.values()]")),
            "decision", "update", "skipped", part="low precision"),
    Planted("loss scale", "fp16: selection biases move in a step that is skipped", "experts, bias, fp16",
            both(line("run.loop.routing:RouterWatch.finish", ("if updated:", "if True:")),
                 # Buffers are put back after it, biases among them.
                 line(f"{STEP}:Stepper.step", ("        self.buffers.put_back()", "        pass"))),
            "decision", "update", "skipped", part="low precision"),
]  # fmt: skip
LINE_PROOFS += MORE_PROOFS + WORLD_PROOFS + LOW_LINE_PROOFS
