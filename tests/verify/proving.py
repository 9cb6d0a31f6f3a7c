"""Proves set-ups in real ranks and says what the proof makes of each."""

from __future__ import annotations

import dataclasses

from distributed import run_ranks
from set_ups import SetUp

from paceline.run.process.world import join_world
from paceline.spec.proof.records import CheckProof
from paceline.verify.compare.layout import compare
from paceline.verify.low.low import low

SECONDS = 300.0
STEPS = 3


def prove(chosen: list[SetUp]) -> list[list[CheckProof]]:
    """Return the records of set-ups of one number of ranks: in fp32 and fp64, or in their own low precision."""
    world = join_world("cpu", threads=1)
    found = []
    for one in chosen:
        source = one.task.data
        precisions = ("fp32", "fp64") if one.plan.precision == "fp32" else (one.plan.precision,)
        check = compare if len(precisions) > 1 else low
        plans = [dataclasses.replace(one.plan, precision=precision) for precision in precisions]
        found.append([check(one.task, plan, world, source, source.items_per_sample, STEPS) for plan in plans])
    return found


def verdict(records: list[CheckProof]) -> str:
    """Return what is said of a set-up."""
    if not all(record.equal for record in records):
        return "unequal"
    ill = any(record.ill_conditioned for record in records)
    return "ill-conditioned" if ill else "equal"


def verdicts(chosen: list[SetUp]) -> dict[str, tuple[str, list[CheckProof]]]:
    """Return the verdict and the records of every set-up, by name."""
    found = {}
    for ranks in sorted({one.plan.layout.devices for one in chosen}):
        mine = [one for one in chosen if one.plan.layout.devices == ranks]
        for one, records in zip(mine, run_ranks(prove, ranks, mine, timeout_seconds=SECONDS)[0], strict=True):
            found[one.name] = verdict(records), records
    return {one.name: found[one.name] for one in chosen}
