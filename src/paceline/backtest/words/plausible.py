"""What cannot be true of a row: settings that contradict each other, and measurements that no such device makes.

Most of these are another unit: milliseconds, all devices' tokens, MFU in per cent. Such a row says why it is not
scored, where a forecast beside it would say nothing of the forecast.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.backtest.schema import StepRow
from paceline.plan.flops import flops_per_sample
from paceline.task.profile.transformer import TransformerShape

# Tokens that attend to few others: what a token costs at least, whatever windows and packed documents leave out.
SHORT_SEQUENCE = 1024
UNIT_RATIO = 300  # measured over forecast: no forecast of a table is off by a sixth of it, a thousand is milliseconds
LARGEST_BATCH_TOKENS = 2**30  # beyond, a batch that is whole sequences of tokens is taken to be told in tokens


def contradiction(row: StepRow) -> str:
    """Return which of a row's settings contradict each other; empty where none do."""
    if row.experts and row.topk and row.topk > row.experts:
        return "a token passes more experts than there are"
    if row.experts and row.ep and row.experts % row.ep:
        return "ep does not divide the experts"
    if row.heads and row.kv_heads and row.heads % row.kv_heads:
        return "kv_heads does not divide heads"
    if row.heads and row.tp and row.tp > row.heads:
        return "more tensor ranks than heads"
    return ""


def impossible(shape: TransformerShape, samples: int, devices: int, seconds: float, peak_flops: float) -> str:
    """Return why no such device can have made a step of `samples` in so many seconds; empty where it can.

    Example: 8B parameters at 88,000 tokens a second are 4.2 PFLOP/s, above the 0.99 of an H100: the tokens of eight.
    """
    if not math.isfinite(peak_flops) or not seconds:
        return ""
    short = replace(shape, flash=True, window=0, text_tokens=0, seq_len=min(shape.seq_len, SHORT_SEQUENCE))
    tokens = samples * shape.seq_len
    share = tokens / short.seq_len * flops_per_sample(short.profile(), "causal") / (seconds * devices) / peak_flops
    if share > 1:
        return f"measured at {share:.3g} times the device's peak: of all devices, or in another unit"
    return ""


def another_unit(measured: float | None, forecast: float) -> str:
    """Return why a measured step is in another unit than the seconds that are forecast; empty where it may be right."""
    if measured and measured > UNIT_RATIO * forecast:
        return f"measured {measured / forecast:.0f} times the forecast: in another unit, such as milliseconds"
    return ""


def batch_in_samples(batch: int, sequence: int, marks: list[str]) -> int:
    """Return a global batch in sequences, of one that is told in tokens: marked."""
    if batch * sequence > LARGEST_BATCH_TOKENS and batch % sequence == 0:
        marks.append("global batch taken to be in tokens")
        return batch // sequence
    return batch
