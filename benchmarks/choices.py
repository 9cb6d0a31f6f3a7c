"""How far can a choice of layout be trusted? Forecasts of measured grids of layouts, and what trying a few gains.

    python benchmarks/choices.py TABLE.csv... [--json FILE]

Of every group of rows with the same model, sequence length, batch and devices: how far pairs of forecasts err from each
other; how often the plan that is said to be faster with a chance of so much is; the regret of the plan that is forecast
to be fastest, and of the best of those that `plan --explain` proposes to try, said beforehand and as measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paceline.backtest.backtest import run_backtest
from paceline.backtest.score import SMALLEST_GROUP, Scored, grouped, timed
from paceline.backtest.statistics import median
from paceline.plan.cost.columns import Floats, Ints, columns_of
from paceline.plan.cost.components import cause_seconds
from paceline.plan.risk.contest import drawn_factors, judge, settings_of
from paceline.spec.forecast import Z80

MEDIAN = 0.6745  # of the size of a standard normal variable
BINS = ((0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.01))


@dataclass(frozen=True)
class Group:
    """Rows among which a layout is chosen, the one forecast to be fastest first."""

    measured: Floats
    forecast: Floats
    settings: Ints
    factors: Floats  # plan x draw
    shares: Floats  # of a plan's time by cause (plan x cause)
    spread: float  # standard deviation of the logarithm of a plan's time


@dataclass(frozen=True)
class Choices:
    """What a table says of choices. Regrets are means over groups; `reliability` is (said, true, pairs) by bin."""

    table: str
    groups: int
    pair_spread: float
    setting_spread: float  # what a setting errs by, causes taken off: what SETTING_SPREAD is by this table
    regret: float
    regret_median: float
    regret_said: float
    regret_tried: float
    regret_tried_said: float
    tried: float
    reliability: tuple[tuple[float, float, int], ...]


def group_of(rows: Sequence[Scored]) -> Group:
    """Return a group's forecasts with the factors that a contest draws for them."""
    rows = sorted(rows, key=lambda row: row.priced.step_seconds.value)
    kinds = {term.name: term.kind for row in rows for term in row.priced.terms}
    taken = [{term.name: term.seconds for term in row.priced.terms} for row in rows]
    causes = cause_seconds((name, kind, np.array([of.get(name, 0.0) for of in taken])) for name, kind in kinds.items())
    settings = np.concatenate([settings_of(columns_of([row.priced.plan])) for row in rows])
    interval = rows[0].priced.step_seconds
    spread = math.log(interval.high_80 / interval.low_80) / 2 / Z80
    measured = np.array([row.case.step_seconds or math.nan for row in rows])
    forecast = np.array([row.priced.step_seconds.value for row in rows])
    shares = causes / causes.sum(axis=1, keepdims=True)
    return Group(measured, forecast, settings, drawn_factors(causes, settings, spread), shares, spread)


def choices_of(table: str, groups: Sequence[Group]) -> Choices:
    """Return what the groups of a table say."""
    verdicts = [judge(group.forecast[:, None] * group.factors) for group in groups]
    regrets = [group.measured[0] / group.measured.min() - 1 for group in groups]
    tried = [
        group.measured[list(verdict.tried)].min() / group.measured.min() - 1
        for group, verdict in zip(groups, verdicts, strict=True)
    ]
    said, true, off, own = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for group in groups:
        pairs = [
            (first, second)
            for first, second in itertools.combinations(range(len(group.measured)), 2)
            if (group.settings[first] != group.settings[second]).any()
        ]
        if not pairs:
            continue
        one, other = np.array(pairs).T
        costs = group.forecast[:, None] * group.factors
        said.append((costs[one] < costs[other]).mean(axis=1))
        true.append((group.measured[one] < group.measured[other]).astype(float))
        errors = np.log(group.measured / group.forecast)
        off.append(np.abs(errors[one] - errors[other]))
        caused = group.spread**2 * ((group.shares[one] - group.shares[other]) ** 2).sum(axis=1)
        differing = (group.settings[one] != group.settings[other]).sum(axis=1)
        own.append(np.sqrt(np.maximum(off[-1] ** 2 / MEDIAN**2 - caused, 0.0) / (2 * differing)))
    chances, outcomes = np.concatenate(said), np.concatenate(true)
    chances, outcomes = np.where(chances < 0.5, 1 - chances, chances), np.where(chances < 0.5, 1 - outcomes, outcomes)
    reliability = []
    for low, high in BINS:
        chosen = (chances >= low) & (chances < high)
        if chosen.any():
            reliability.append((float(chances[chosen].mean()), float(outcomes[chosen].mean()), int(chosen.sum())))
    return Choices(
        table,
        len(groups),
        float(np.median(np.concatenate(off)) / MEDIAN),
        float(np.median(np.concatenate(own))),
        float(np.mean(regrets)),
        median(regrets),
        float(np.mean([verdict.regrets[0] for verdict in verdicts])),
        float(np.mean(tried)),
        float(np.mean([verdict.regret_tried for verdict in verdicts])),
        float(np.mean([len(verdict.tried) for verdict in verdicts])),
        tuple(reliability),
    )


def measure(paths: Sequence[Path]) -> list[Choices]:
    """Return what the tables say, those that have groups to choose from."""
    found = []
    for file in run_backtest(paths).files:
        rows = grouped(timed(file.steps), lambda item: item.case.group).values()
        several = [group for group in rows if len(group) >= SMALLEST_GROUP]
        groups = [group_of(group) for group in several if len({row.priced.plan for row in group}) > 1]
        if groups:
            found.append(choices_of(file.score.file, groups))
    return found


def text(choices: Choices) -> list[str]:
    """Return a table's result in lines."""
    return [
        f"{Path(choices.table).name}: {choices.groups} groups; two forecasts err from each other by"
        f" {choices.pair_spread:.1%}, a setting by {choices.setting_spread:.1%}",
        f"  regret of the choice {choices.regret:.1%} on average, said {choices.regret_said:.1%};"
        f" median {choices.regret_median:.1%}",
        f"  after trying {choices.tried:.1f}: {choices.regret_tried:.1%} (said {choices.regret_tried_said:.1%})",
        "  said to be faster with -> was: "
        + ", ".join(f"{said:.0%} -> {true:.0%} ({count:,})" for said, true, count in choices.reliability),
    ]


def main() -> None:
    """Print what the tables named on the command line say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    found = measure(options.tables)
    for choices in found:
        print("\n".join(text(choices)))
    if options.json:
        options.json.write_text(json.dumps([asdict(choices) for choices in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
