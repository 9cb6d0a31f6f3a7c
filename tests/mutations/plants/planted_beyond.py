"""Mistakes where a twin was not the run: how rows are read and shared, and low precision of routed models."""

from __future__ import annotations

from planted import Planted, masks_not_replayed
from planted_axes import first_micro_batch_forgotten
from planted_lines import line
from planted_low import OTHER, low
from planted_updates import CAST, DOWN, ONCE, STALE, STEPPER

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
