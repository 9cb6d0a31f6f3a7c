"""What of a user's model or data has no part in training, or less: said once, and kept in the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from paceline.run.numerics.precision import lost_in_cast
from paceline.run.numerics.randomness.mode import Survey
from paceline.run.process.world import World
from paceline.task.data.storage.notices import LEFT_OUT, DataNotice, notices_of
from paceline.task.entries_read import READ_BY_NEXT_TOKEN, balance_remark, unread_remark
from paceline.task.objective import Objective, next_token

NAMED = 3  # tensors that a remark names


def remarks_on(model: nn.Module, objective: Objective, dtype: torch.dtype) -> list[str]:
    """Return what is lost of a model whose weights are about to be cast to `dtype`."""
    remarks = []
    if rounded := lost_in_cast(model, dtype):
        more = f" and {len(rounded) - NAMED} more" if len(rounded) > NAMED else ""
        remarks.append(
            f"{', '.join(rounded[:NAMED])}{more}: rounded to {str(dtype).removeprefix('torch.')}, in which weights and "
            "buffers are kept; plan.precision = fp64 keeps their values"
        )
    remarks += balance_remark(model, objective)
    return remarks


def all_steps_made(steps: int, run_dir: Path) -> str:
    """Return what to say of a run whose loop has nothing left to do."""
    return (
        f"done     {run_dir} has all its {steps:,} steps: a loop over the run ends at once; "
        "a longer task.stop goes on, another run.dir begins anew"
    )


def ended_early(step: int, run_dir: Path) -> str:
    """Return what to say of a run that early stopping has ended, and that is started again."""
    return (
        f"done     {run_dir} ended early after step {step:,}: a loop over the run ends at once; "
        "a greater task.evaluate.patience, or where a callback ended it another task.stop, goes on"
    )


def remarks_on_batch(objective: Objective, batch: object) -> list[str]:
    """Return what is said of entries of a batch that the built-in decoder's objective does not read."""
    if objective is not next_token or not isinstance(batch, Mapping):
        return []
    return unread_remark(objective, tuple(str(name) for name in batch if name not in READ_BY_NEXT_TOKEN))


def data_faults(
    source: object, world: World, reads_first: bool, left_out: Mapping[str, int], what_left_out: str = LEFT_OUT
) -> list[tuple[str, str]]:
    """Return what reading the data has met on all ranks since the last call: (what and how often, because).

    Every rank calls it. `left_out` counts, by reason, samples that this rank has passed as if they were not there, and
    `what_left_out` says so of one; of ranks that read the same rows those that `reads_first` say which.
    """
    mine = notices_of(source)
    if reads_first:
        mine += [DataNotice(what_left_out, because, times) for because, times in left_out.items()]
    if not world.maximum([float(len(mine))])[0]:
        return []
    together: Counter[tuple[str, str]] = Counter()
    for notices in world.gather(mine):
        for what, because, times in notices:
            together[what, because] += times
    return [
        (f"{what}{f', {times:,} times' if times > 1 else ''}", because) for (what, because), times in together.items()
    ]


def damage_of_all(world: World, reads_first: bool, left_out: Mapping[str, int]) -> tuple[int, str]:
    """Return how many samples all ranks have left out together, and why the first of them. Every rank calls it."""
    told: list[Mapping[str, int]] = world.gather(dict(left_out) if reads_first else {})
    reasons = [because for each in told for because in each]
    return sum(sum(each.values()) for each in told), reasons[0] if reasons else ""


def look_remark(survey: Survey) -> list[str]:
    """Return what is said of a program that no look at its random numbers came to the end of."""
    if not survey.unseen:
        return []
    return [
        f"{survey.why_unknown}: whose its random numbers are is a guess, which is said where it draws any; a program "
        "that takes two samples and three, equal ones, has it known"
    ]
