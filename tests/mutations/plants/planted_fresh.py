"""Mistakes where nobody had planted any: four bits in shards, rows that are gathered or stand in, drawn noise."""

from __future__ import annotations

from planted import Planted
from planted_lines import line
from planted_three import clipped_at_twice_the_norm, running_statistics_of_one_rank

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
]  # fmt: skip
