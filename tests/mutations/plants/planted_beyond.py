"""Mistakes where a twin was not the run, or a first update has no sign: of rows that are read, skips, evaluations."""

from __future__ import annotations

from planted import Planted, masks_not_replayed
from planted_axes import first_micro_batch_forgotten
from planted_lines import both, line
from planted_low import OTHER, low

# ---- of bf16 and fp16: the second update, a skip or an evaluation shows them

CAST, STEPPER = "run.numerics.precision:cast_unit", "run.loop.step:Stepper._make"
SHARDS = "run.parallel.data.sharding:ShardedGradients"
STALE, UNCAST = "stale casts", "casts of evaluations"
DOWN = ("down = (self.scaler.scale if", "down = (vars(self).setdefault('_scale', self.scaler.scale) if")
ONCE = (
    ("forward = unit.forward\n", "forward, kept = unit.forward, {}\n"),
    ("casts: dict[int, torch.Tensor] = {}", "casts = kept if torch.is_grad_enabled() else {}"),
)
CASTS = "        args, kwargs = _inputs_of_unit((args, kwargs), dtype)\n        originals"
UNLESS = "        if not torch.is_grad_enabled():\n            return forward(*args, **kwargs)\n"
IN_FP32 = (CASTS, UNLESS + CASTS)
MASTERS = "next(self._model.parameters()).dtype == torch.float64"

UPDATES_PROOFS = [
    low(STALE, "bf16: copies keep the casts of their first weights", "copies, bf16", line(CAST, *ONCE),
        "loss", "loss", OTHER, 2),
    low(STALE, "bf16: stages keep the casts of their first weights", "stages, bf16", line(CAST, *ONCE),
        "loss", "loss", OTHER, 2),
    low(STALE, "bf16: tensor ranks keep the casts of their first weights", "tensor, bf16", line(CAST, *ONCE),
        "loss", "loss", OTHER, 2),
    low(STALE, "bf16: gathered weights are not gathered again after an update", "zero 2, bf16",
        both(line(f"{SHARDS}.zero", ("unit.reshard()", f"unit.reshard() if {MASTERS} else None")),
             line(f"{SHARDS}.before_micro_batch",
                  ("reshard_after_backward=last", f"reshard_after_backward=last and {MASTERS}"))),
        "dtype", "the weight of"),
    low("loss scale", "fp16: after a skip losses keep the scale from before", "copies, fp16", line(STEPPER, DOWN),
        "gradients", "", OTHER, 4),
    low("loss scale", "fp16: shards keep the scale from before a skip", "zero 3, fp16", line(STEPPER, DOWN),
        "gradients", "", OTHER, 4),
    low(UNCAST, "bf16: copies evaluate in fp32", "copies, bf16", line(CAST, IN_FP32), "evaluation", "", OTHER, 2),
]  # fmt: skip

# ---- how rows are read and shared, routed models

# What was read ahead holds the rows of the call before, under the name of its own step.
LATE = (
    "    batch, self._before = getattr(self, '_before', read.item), read.item\n"
    "    read = read._replace(item=type(batch)(read.item.step, read.item.position, read.item.samples,"
    " batch.micro_batches))\n    item = sent if"
)
RULES = "run.updates.several_rules:JoinedOptimizer"

BEYOND_PROOFS = [
    Planted("sample order", "rows of later steps are those of the step they were gathered with", "copies",
            line("task.data.rows_together:RowsTogether._gather", ("range(0, steps * rows, rows)", "repeat(0)")),
            "weight", "loss normalisation", "weight", part="story", step=3),
    Planted("sample order", "rows that were read ahead are those of the step before", "copies",
            line("task.data.read_ahead:ReadAhead.take", ("    item = sent if", LATE)),
            "samples", "sample order", "position", part="story", step=2),
    Planted("optimizer", "the last of several rules makes no update", "muon, zero 3",
            line(f"{RULES}.step", ("in self._parts:", "in self._parts[:-1]:")),
            "weights", "optimizer groups", "layers.0.input_layernorm.weight"),
    Planted("dropout", "selective recompute draws new masks in the backward pass", "dropout, selective",
            masks_not_replayed, "error", "", "", "belong to no sample: the backward pass"),
    Planted("pipeline", "a stage of a zero-bubble schedule forgets its first micro-batch", "stages, zero-bubble",
            first_micro_batch_forgotten, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("uneven batches", "ranks of unequal shares begin where those of equal ones would", "unequal shares",
            line("spec.layout:rows_of", ("return range(batch_samples * before // whole,",
                                         "return range(batch_samples * data_rank // data_degree,")),
            "samples", "sample order", "position"),
    low(STALE, "bf16: tensor ranks with experts keep the casts of their first weights", "experts, tensor, bf16",
        line(CAST, *ONCE), "decision", "went to others than the best", "router choice", 2),
    low("loss scale", "fp16: spread experts keep the scale from before a skip", "experts, fp16", line(STEPPER, DOWN),
        "gradients", "", OTHER, 4),
]  # fmt: skip
