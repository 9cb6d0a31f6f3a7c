"""What a table's row measured, as a step's seconds and a device's memory."""

from __future__ import annotations

import math
import re

from paceline.backtest.schema import StepRow
from paceline.plan.flops import convention_of, flops_per_sample
from paceline.spec.profile import ModelProfile

LARGEST_MFU = 1.5  # beyond, it is in per cent; a little above 1, it is of another peak
MEMORY_KINDS = ("allocated", "reserved", "device")


def step_seconds(
    row: StepRow, counted: ModelProfile, batch: int, peak_flops: float, marks: list[str]
) -> tuple[float | None, str]:
    """Return the seconds of a step, from time, tokens per second, TFLOP/s or MFU, or None with the reason.

    `counted` is the profile whose FLOPs conventions count; `peak_flops` is the device's, for rows that state MFU alone
    (NaN where unknown).
    """
    assert row.n_devices is not None and row.seq_len is not None
    if row.measured_step_s:
        return row.measured_step_s, ""
    if row.measured_tokens_per_s_per_device:
        return batch * row.seq_len / (row.measured_tokens_per_s_per_device * row.n_devices), ""
    achieved = None
    if row.measured_tflops_per_device:
        achieved = row.measured_tflops_per_device * 1e12
    elif 1 < (row.measured_mfu or 0) <= LARGEST_MFU:
        return None, "MFU above 1"
    elif row.measured_mfu and math.isfinite(peak_flops):
        in_percent = row.measured_mfu > LARGEST_MFU
        marks += ["MFU taken to be in per cent"] if in_percent else []
        achieved = row.measured_mfu / (100 if in_percent else 1) * peak_flops
    if achieved is None:
        return None, "no time is stated"
    convention = convention_of(row.tflops_convention)
    if convention is None:
        return None, "the FLOP convention is not stated"
    if convention == "hardware" and row.recompute == "none":  # what is not computed again is not counted again
        convention = "model"
    marks.append(f"time from FLOPs ({convention})")
    return batch * flops_per_sample(counted, convention) / (achieved * row.n_devices), ""


def time_excluded(row: StepRow) -> str:
    """Return why a row's time is not scored although it has one; empty where it is."""
    notes = row.notes.lower()
    if row.status == "ok" and "memory only" in notes:
        return "memory only, as the notes say"
    return ""


def not_training(row: StepRow) -> str:
    """Return why a row is no training; empty where it is."""
    notes = row.notes.lower()
    if "inference" in notes:
        return "inference"
    if re.search(r"(?<![a-z])(grpo|rlhf|ppo)(?![a-z])", notes):
        return "reinforcement learning"  # what generates the samples holds memory and takes time beside training
    return ""


def memory_kind(row: StepRow, marks: list[str]) -> str:
    """Return what the row's memory counts: tensors allocated, what the allocator reserved, or the device's use."""
    if row.memory_kind in MEMORY_KINDS:
        return row.memory_kind
    notes = row.notes.lower()
    if "nvidia-smi" in notes:
        return "device"
    if re.search(r"max[ _]allocated|peak allocated", notes):
        return "allocated"
    marks.append("memory taken as reserved")
    return "reserved"
