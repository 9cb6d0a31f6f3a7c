"""A probe measures everything twice, some seconds apart, and of each figure the faster one counts.

What else a machine does can only make a call slower, and the host of a virtual one may take a third of its speed away
for some seconds without a word: within one pass all repeats of a call are then slow alike, and a product that was timed
in such a moment is compared with a training step that was not. How far two passes differ is kept as a drift, so that
forecasts on a machine whose speed changes say so. On a busy machine, whose figures are marked, one pass has to do.

Collectives between processes vary by themselves: threads wake up on cores that compute, and a rank waits for the one
that is later by chance. Steps meet the mean of that, so there the mean of two passes counts, unless they are so far
apart that one was disturbed; where one could not tell a collective from computing, the other one counts. Long steps
and steps on a few tokens are judged apart: what disturbs 20 ms is lost in 400.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar, get_args

from paceline.cluster.probe.records import (
    CollectiveTimes,
    GroupTimes,
    Latency,
    LaunchTimes,
    ProbePass,
    StepTimes,
    Timed,
    TimedBlock,
    TimedBytes,
    TimedCollective,
    TimedRate,
)

SecondsOfSteps: TypeAlias = Literal[
    "plain_seconds", "sharded_seconds", "moved_seconds", "work_seconds", "few_plain_seconds", "few_sharded_seconds",
    "few_kept_seconds",
]  # fmt: skip

PASSES = 2
DISTURBED = 1.4  # times what the faster pass took: the slower one met another program

# Differences are taken within each; which pass was disturbed is told by what takes longest in each.
LONG: tuple[SecondsOfSteps, ...] = ("plain_seconds", "sharded_seconds", "moved_seconds", "work_seconds")
SHORT: tuple[SecondsOfSteps, ...] = ("few_plain_seconds", "few_sharded_seconds", "few_kept_seconds")
assert {*LONG, *SHORT} == set(get_args(SecondsOfSteps))

AnyTimed = TypeVar("AnyTimed", Timed, TimedRate, TimedBytes, TimedBlock)
AnyPass = TypeVar("AnyPass", GroupTimes, StepTimes)


def fastest(first: ProbePass, second: ProbePass) -> ProbePass:
    """Return one pass of two: of every figure the faster one, of collectives the mean; what has one is the first's."""
    return {
        "launch": _launch(first["launch"], second["launch"]),
        "collectives": _collectives(first["collectives"], second["collectives"]),
        "steps": _steps(first["steps"], second["steps"]),
        "matmul": _rates(first["matmul"], second["matmul"]),
        "attention": _rates(first["attention"], second["attention"]),
        "attention_narrow": _rates(first["attention_narrow"], second["attention_narrow"]),
        "usable": first["usable"],
        "blocks": [faster(*pair) for pair in zip(first["blocks"], second["blocks"], strict=True)],
        "optimizer": faster(first["optimizer"], second["optimizer"]),
        "memory": {
            "triad": faster(first["memory"]["triad"], second["memory"]["triad"]),
            "elementwise": faster(first["memory"]["elementwise"], second["memory"]["elementwise"]),
            "picked": faster(first["memory"]["picked"], second["memory"]["picked"]),
        },
        "cpu_seconds": first["cpu_seconds"] + second["cpu_seconds"],
        "wall_seconds": first["wall_seconds"] + second["wall_seconds"],
    }


def faster(first: AnyTimed, second: AnyTimed) -> AnyTimed:
    """Return the faster one of two timings, with the larger spread of calls, and how much slower the other one was.

    Example: 41 ms and then 27 ms, repeats within 10 % each, are 27 ms within 10 %, and a drift of 52 %.
    """
    best, other = (first, second) if first["seconds"] <= second["seconds"] else (second, first)
    found = best.copy()
    found["spread"] = max(first["spread"], second["spread"])
    found["drift"] = max(best.get("drift", 0.0), other["seconds"] / best["seconds"] - 1)
    found["repeats"] = first["repeats"] + second["repeats"]
    return found


def _launch(first: LaunchTimes, second: LaunchTimes) -> LaunchTimes:
    plain, autograd = faster(first["plain"], second["plain"]), faster(first["autograd"], second["autograd"])
    if "passes" not in first or "passes" not in second:
        return {"plain": plain, "autograd": autograd}
    few = faster(first["passes"]["few_tokens"], second["passes"]["few_tokens"])
    by_rows = [one["passes"]["all_and_half"] for one in (first, second)]
    # What is read from it is a difference, so all rows and half of them are of one pass.
    found = min(filter(None, by_rows), key=lambda pair: sum(each["seconds"] for each in pair), default=None)
    return {"plain": plain, "autograd": autograd, "passes": {"few_tokens": few, "all_and_half": found}}


def _rates(first: dict[str, list[TimedRate]], second: dict[str, list[TimedRate]]) -> dict[str, list[TimedRate]]:
    return {
        name: [faster(*pair) for pair in zip(points, second[name], strict=True)] if name in second else points
        for name, points in first.items()
    }


def _collectives(first: CollectiveTimes | None, second: CollectiveTimes | None) -> CollectiveTimes | None:
    if first is None or second is None:
        return first
    groups = {size: _group(group, second["groups"][size]) for size, group in first["groups"].items()}
    return {**_group(first, second), "groups": groups}


def _group(first: GroupTimes, second: GroupTimes) -> GroupTimes:
    counts = _counted([first, second], [_group_seconds(group) for group in (first, second)])
    sizes: list[TimedCollective] = [
        {"collective": one["collective"], "bytes": one["bytes"], **_mean([group["sizes"][place] for group in counts])}
        for place, one in enumerate(first["sizes"])
    ]
    return {"latency": _mean([group["latency"] for group in counts]), "sizes": sizes}


def _mean(timed: Sequence[Latency | TimedCollective]) -> Latency:
    """Return the mean of what a collective took: of those passes that could tell it from computing, if one could."""
    told = [each["seconds"] for each in timed if not each.get("refused")]
    if told:
        return {"seconds": statistics.fmean(told)}
    return {"seconds": statistics.fmean(each["seconds"] for each in timed), "refused": True}


def _group_seconds(group: GroupTimes) -> float:
    return group["latency"]["seconds"] + sum(one["seconds"] for one in group["sizes"])


def _steps(first: StepTimes | None, second: StepTimes | None) -> StepTimes | None:
    """Return the steps of two passes: what is read from them are differences, and those of means are means of them."""
    if first is None or second is None:
        return first
    found = first.copy()
    for names in (LONG, SHORT):
        counts = _counted([first, second], [steps[names[0]] + steps[names[1]] for steps in (first, second)])
        for name in names:
            found[name] = statistics.fmean(steps[name] for steps in counts)
    return found


def _counted(passes: list[AnyPass], seconds: list[float]) -> list[AnyPass]:
    """Return the passes that count: both, or the faster one where the other was disturbed."""
    least = min(seconds)
    return [each for each, took in zip(passes, seconds, strict=True) if took < DISTURBED * least or took == least]
