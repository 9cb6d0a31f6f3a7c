"""Mistakes of layers, sequences, stages and experts that ranks share, in code that no other plant has changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from planted import Patch, Planted
from planted_fresh import gradients_by_own_items
from planted_lines import PIPELINE, STAGE, VOCABULARY, line
from planted_low import OTHER, low
from planted_models import VOCAB, Chain
from planted_story import after_restoring
from torch import Tensor, nn

from paceline.run.assemble import Assembled
from paceline.run.loop import resume
from paceline.run.process.world import World
from paceline.run.updates import several_rules
from paceline.task.rules import Rules

TENSOR, SLOTS = "run.parallel.tensor", "run.parallel.expert.slots"


class Fused(nn.Module):
    """Gates and values in one matrix of both, which tensor ranks share; what follows them has biases."""

    paceline_rules = Rules(
        tensor={"layers.*.both": "fused", "layers.*.down": "row", "head": "vocabulary"},
        parts={"layers.*.both": (24, 24)},
    )

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"both": nn.Linear(width, 48), "down": nn.Linear(24, width)}) for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            gate, value = layer["both"](x).chunk(2, -1)
            x = x + layer["down"](F.silu(gate) * value)
        return self.head(x)


class Gathered(Fused):
    """The layers, whose first matrix is gathered and whose second takes its part of what is whole."""

    paceline_rules = Rules(tensor={"layers.*.both": "gathered", "layers.*.down": "split_row", "head": "vocabulary"})


class SplitBiases(nn.Module):
    """Layers with biases whose activations are split along the sequence between them."""

    paceline_rules = Rules(
        tensor={
            "embed": "vocabulary", "layers.*.norm": "sequence", "layers.*.up": "column", "layers.*.down": "row",
            "head": "vocabulary",
        }
    )  # fmt: skip

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "up": nn.Linear(width, 24), "down": nn.Linear(24, width)})
            for _ in range(2)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer["down"](F.gelu(layer["up"](layer["norm"](x))))
        return self.head(x)


class Dropped(Gathered):
    """Layers that drop some of what they all have whole."""

    paceline_rules = Rules(tensor={"layers.*.both": "fused", "layers.*.down": "row", "head": "vocabulary"},
                           parts={"layers.*.both": (24, 24)})  # fmt: skip

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, seq, vocab]."""
        x = F.dropout(self.embed(tokens), 0.2, self.training)
        for layer in self.layers:
            gate, value = layer["both"](x).chunk(2, -1)
            x = x + F.dropout(layer["down"](F.silu(gate) * value), 0.2, self.training)
        return self.head(x)


class Counter(nn.Module):
    """A layer that counts the rows that it sees, which nothing depends on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("rows", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.training:
            self.rows.add_(float(len(x)))
        return self.inner(x).tanh()


class CountingChain(Chain):
    """A chain of layers that count."""

    def __init__(self, width: int = 12) -> None:
        super().__init__(width)
        self.layers = nn.ModuleList(Counter(width) for _ in range(4))


def is_same_layout(found: Any) -> bool:
    """Return whether a start goes on under the layout that its checkpoint was written under."""
    return found is not None and not any("resharded" in note for note in found.notes)


def moments_lost_on_the_same_layout(patch: Patch, world: World) -> None:
    def forget(found: Any, arguments: tuple[Any, ...]) -> None:
        built = next(given for given in arguments if isinstance(given, Assembled))
        for state in built.optimizer.state.values() if is_same_layout(found) else ():
            state["exp_avg"].zero_()

    after_restoring(patch, forget)


def tied_weight_of_the_last_stage_not_loaded(patch: Patch, world: World) -> None:
    """A checkpoint has a tied weight once, and the stage that holds it in its second place keeps its fresh one."""
    load = resume.load_latest

    def without(roots: Any, state: Any, **rest: Any) -> Any:
        name = "model.embed_tokens.weight"
        if name in state and not any(each.startswith("model.layers.0.") for each in state):
            state = {**state, name: state[name].detach().clone()}
        return load(roots, state, **rest)

    patch.setattr(resume, "load_latest", without)


def parts_are_whole_weights(patch: Patch, world: World) -> None:
    patch.setattr(several_rules, "is_spread", lambda weight: False)


SPLIT_PROOFS = [
    # ---- tensor ranks
    Planted("tensor parallel", "the second part of a fused matrix begins where the first does", "fused, tensor",
            line(f"{TENSOR}:_fused_rows", ("slice(first + start, first + min(count, start + own))",
                                           "slice(start, min(count, start + own))")),
            "error", "", "", "do not compute what the model does"),
    Planted("tensor parallel", "gradients of a fused matrix are those of a rank's rows", "fused, tensor",
            line(f"{TENSOR}:split_layers",
                 ('summed |= {f"{name}.{own}" for own, _', 'summed |= {f"{own}." for own, _')),
            "gradients", "gradient normalisation", "both", "not summed over tp"),
    Planted("tensor parallel", "a rank's part of what is whole has its part of the gradient", "gathered, tensor",
            line(f"{TENSOR}:_split_row", ("share(x, region.group).narrow", "x.narrow")),
            "gradients", "gradient normalisation", "embed"),
    Planted("tensor parallel", "what is gathered gets the gradient of every rank", "gathered, tensor",
            line(f"{TENSOR}:_gathered",
                 ("return join(out.transpose(-1, -2), region.group)",
                  "return share(join(out.transpose(-1, -2), region.group), region.group)")),
            "gradients", "gradient normalisation", "embed"),
    Planted("tensor parallel", "biases after a sum keep the gradient of a part of the sequence", "split biases, tensor",
            line(f"{TENSOR}:_pass_spread", ("(style not in ROWS or region.splits_sequence)", "style not in ROWS")),
            "gradients", "gradient normalisation", "down.bias"),
    Planted("tensor parallel", "biases of spread features have gradients of a rank's own", "biases, tensor",
            line(f"{TENSOR}:_pass_spread", ("(style not in ROWS or region", "(style in ROWS and region")),
            "gradients", "gradient normalisation", "bias"),
    Planted("dropout", "tensor ranks draw masks of their own of what all have whole", "dropped, tensor",
            line("run.numerics.randomness.shares:_instance",
                 ("        return Share(dim, local, None, apart)\n",
                  "        own = torch.arange(math.prod(local)) + part.tp_rank\n"
                  "        return Share(dim, local, folded(own))\n")),
            "loss", "forward pass", "loss"),
    Planted("clip before reduce", "parts of gradients are clipped before tensor ranks sum them", "tensor",
            line(f"{TENSOR}:SummedGradients.finish",
                 ("dist.all_reduce(flat,", "flat *= (1e-3 / flat.norm()).clamp(max=1)\n        dist.all_reduce(flat,")),
            "gradients", "gradient normalisation", "layernorm"),
    Planted("optimizer", "a rule for whole weights sees a tensor rank's part alone", "muon, tensor",
            parts_are_whole_weights, "weights", "optimizer", ""),
    Planted("selection", "tensor ranks score labels of the first part of a vocabulary", "selection, tensor",
            line(f"{VOCABULARY}:spread_losses", ("first_row(head.shape[0], group), []", "0, []")),
            "loss", "selection", "all candidates", part="story", step=1),
    Planted("selection", "chosen rows have gradients without their weights on the ranks of a vocabulary",
            "selection, tensor",
            line(f"{VOCABULARY}:_SpreadLinearCrossEntropy.forward",
                 ("_gradient(logits, sums, scale, targets)",
                  "_gradient(logits, sums, counted.to(sums.dtype), targets)")),
            "grad_norm", "gradient norm", "grad_norm", part="story", step=1),
    # ---- shared sequences
    Planted("context parallel", "gradients of queries are those of the last block of keys", "sequences shared by four",
            line("run.parallel.context.sequence_attention:sequence_attention_backward",
                 (".add_(part)", ".copy_(part)")),
            "gradients", "gradient normalisation", "embed_tokens"),
    Planted("context parallel", "blocks of keys are merged in fp32 whatever the run computes in", "shared sequences",
            line("run.parallel.context.kernels:Merged.__init__",
                 ("torch.promote_types(out.dtype, torch.float32)), lse", "torch.float32), lse")),
            "loss", "forward pass", "loss"),
    Planted("padding and label masks", "what fills up a sequence has labels", "shared sequences",
            line("run.parallel.context.zigzag:SequencePart._cut", ("PADDING.get(name, 0)", "0")),
            "weight", "padding and label masks", "weight"),
    Planted("evaluation", "ranks of a sequence evaluate the whole of it", "shared sequences",
            line("run.loop.passes:SequentialPasses._forward",
                 ("self.take_part(in_model_precision(micro.data, self.plan))",
                  "(self.take_part if torch.is_grad_enabled() else lambda data: data)"
                  "(in_model_precision(micro.data, self.plan))")),
            "evaluation", "evaluation", part="story"),
    Planted("data-parallel normalisation", "each rank of a sequence divides by its own labels", "shared sequences",
            gradients_by_own_items, "gradients", "gradient scale", "embed_tokens"),
    low("half-reduced precision", "bf16: gradients of keys under a mask add up in bf16",
        "packed rows, shared sequences, bf16",
        line("run.parallel.context.sequence_attention:whole_sequence_backward",
             ("grad.to(torch.promote_types(grad.dtype, torch.float32))", "grad")),
        "dtype", "reduce_scatter"),
    # ---- pipelines
    Planted("sample order", "the last stage reads the rows of other copies", "stages, copies",
            line("spec.layout:Layout.data_rank",
                 ('place["dp_replicate"] * self.dp_shard + place["dp_shard"]',
                  '(place["dp_replicate"] * self.dp_shard + place["dp_shard"] + place["pp"]) % self.data_degree')),
            "samples", "sample order", "position"),
    Planted("pipeline", "the last of an odd number of micro-batches is left out", "stages",
            line(f"{PIPELINE}:PipelinePasses.accumulate",
                 ("    borders = self._borders_for(",
                  "    micro_batches = micro_batches[: len(micro_batches) // 2 * 2]\n"
                  "    borders = self._borders_for(")),
            "weight", "loss normalisation", "weight"),
    Planted("pipeline", "micro-batches of fewer rows weigh less", "stages",
            line(f"{STAGE}:StageModule.forward",
                 ("out = loss_sum * down\n", "out = loss_sum * down * (rows_in(micro) / self._rows)\n")),
            "gradients", "gradient normalisation", "embed_tokens"),
    Planted("buffers", "the first look at stages moves their buffers", "stages that count",
            line(f"{PIPELINE}:PipelinePasses._look", ("buffer.copy_(kept)", "pass")),
            "buffers", "batch-norm statistics", "rows"),
    Planted("gradient synchronisation", "stages of shards reduce after their first micro-batch",
            "stages, shards, zero 1",
            line(f"{STAGE}:StageModule._before_backward",
                 ("self._backwards == len(self._micro_batches)", "self._backwards == 1")),
            "gradients", "gradient normalisation", "embed_tokens"),
    low("tied weights", "bf16: what the ends of a pipeline tell each other of a tied weight is rounded",
        "stages, tied, bf16",
        line("run.parallel.pipeline.split:PipelineGradients._add_partners",
             ("grad.add_(theirs)", "grad.add_(theirs if grad.dtype == torch.float64 else theirs.bfloat16().float())")),
        "gradients", "", OTHER, 2),
    Planted("checkpoint", "the last stage keeps its own of a tied weight", "stages, tied",
            tied_weight_of_the_last_stage_not_loaded, "weights", "checkpoint", "embed_tokens", "after a resume as pp=2",
            part="story", step=3),
    # ---- experts
    Planted("expert gradients", "rows that the last rank's experts got come back without gradients", "experts",
            line("run.parallel.expert.all_to_all:_ExchangeRows.backward",
                 ("return exchange_rows(grad, in_sizes, out_sizes, ctx.group), ",
                  "return exchange_rows(grad, in_sizes, out_sizes, ctx.group).index_fill(\n"
                  "        0, torch.arange(sum(in_sizes[:-1]), sum(in_sizes)), 0.0), ")),
            "gradients", "gradient normalisation", "embed_tokens"),
    Planted("token dispatch", "by slots results come home in the reverse order", "experts, slots",
            line(f"{SLOTS}:SlottedExchange.combine", ("[ticket.places]", "[ticket.places.flip(0)]")),
            "loss", "labels", "loss", part="uneven rows", step=2),
    Planted("token dispatch", "rows that found no slot are lost", "experts, slots",
            line(f"{SLOTS}:ExpertSlots.short", ("if used else 0.0", "* 0 if used else 0.0")),
            "loss", "labels", "loss", part="even rows", step=2),
    Planted("token dispatch", "a step whose rows found no slot is made again by slots", "experts, slots",
            line(f"{SLOTS}:ExpertSlots.during_passes", ("again or not self._known, again", "not self._known, again")),
            "loss", "labels", "loss", part="even rows", step=2),
    # ---- restarts on the layout that the checkpoint was written on
    *(Planted("resume state", f"moments are lost where {what} go on as before", case,
              moments_lost_on_the_same_layout, "moments", "checkpoint", "exp_avg", "after a resume as ",
              part="story", step=3)
      for what, case in (("tensor ranks", "tensor"), ("stages", "stages"), ("ranks of a sequence", "shared sequences"),
                         ("ranks with experts", "experts"))),
]  # fmt: skip
