"""Orders: the sequence of passes that each device of a pipeline runs, as torch's schedules have it.

A pass is a letter with a stage and a micro-batch: F forward, B backward (for inputs alone where W is apart), W backward
for weights. Stage s runs on device s mod p.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paceline.errors import ConfigError, suggestion
from paceline.plan.feasible.stages import SPLIT_BACKWARD, fill_pipeline
from paceline.spec.plan import SCHEDULES


@dataclass(frozen=True)
class Pass:
    """One micro-batch in one stage: forward (F), backward (B), or the part of backward for weights (W)."""

    kind: str
    stage: int
    micro: int


def pipeline_orders(schedule: str, devices: int, micro_batches: int, virtual_stages: int = 1) -> list[list[Pass]]:
    """Return the passes of every device, in order.

    GPipe (Huang et al. 2019, arXiv:1811.06965), 1F1B and interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473),
    zero-bubble ZB-H1 (Qi et al. 2023, arXiv:2401.10241). Raises ConfigError for what a schedule cannot run.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"unknown schedule '{schedule}'", "there is none of that name", suggestion(schedule, SCHEDULES)
        )
    if schedule in ("gpipe", "1f1b"):
        if virtual_stages != 1:
            raise ConfigError(f"{schedule} with {virtual_stages} stages a device", "it runs one", "interleaved")
        plain = _gpipe if schedule == "gpipe" else _one_f_one_b
        return [plain(rank, devices, micro_batches) for rank in range(devices)]
    rounds = max(1, micro_batches // devices)
    if micro_batches % rounds:
        needed = fill_pipeline(micro_batches, devices, schedule)
        because = f"it takes them in {rounds} rounds of equal size"
        raise ConfigError(f"{schedule} with {micro_batches} micro-batches on {devices} devices", because, f"{needed}")
    split = schedule in SPLIT_BACKWARD
    return [_rounds(rank, devices, micro_batches, virtual_stages, split) for rank in range(devices)]


def _gpipe(rank: int, devices: int, micro_batches: int) -> list[Pass]:
    return [Pass(kind, rank, micro) for kind in "FB" for micro in range(micro_batches)]


def _one_f_one_b(rank: int, devices: int, micro_batches: int) -> list[Pass]:
    ahead = min(micro_batches, devices - rank)  # forward passes before the first backward pass
    order = [Pass("F", rank, micro) for micro in range(ahead)]
    for micro in range(micro_batches):
        order.append(Pass("B", rank, micro))
        if ahead + micro < micro_batches:
            order.append(Pass("F", rank, ahead + micro))
    return order


def _rounds(rank: int, devices: int, micro_batches: int, virtual: int, split: bool) -> list[Pass]:
    """Return interleaved 1F1B, or zero-bubble where backward passes are split.

    Micro-batches are taken in rounds through each of the device's stages in turn. Weights' passes lag `rank` backward
    passes behind in zero-bubble; those left over fill the end.
    """
    per_round = micro_batches // max(1, micro_batches // devices)
    total = micro_batches * virtual
    ahead = min(total, (virtual - 1) * per_round + (1 if split else 2) * (devices - 1 - rank))
    counts: Counter[tuple[str, int]] = Counter()

    def take(kind: str, turn: int) -> Pass:
        local = turn // per_round % virtual
        stage = rank + devices * (local if kind == "F" else virtual - 1 - local)
        counts[kind, stage] += 1
        return Pass(kind, stage, counts[kind, stage] - 1)

    order, weights = [take("F", turn) for turn in range(ahead)], 0
    for turn in range(total):
        if ahead + turn < total:
            order.append(take("F", ahead + turn))
        order.append(take("B", turn))
        if split and turn >= rank:
            order.append(take("W", weights))
            weights += 1
    return order + [take("W", turn) for turn in range(weights, total if split else weights)]
