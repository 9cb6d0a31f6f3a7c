"""What many strangers say of a generation's share of its peak: tables of a few rows from each of several sources.

A table of one source has rows enough to tell all constants apart, and is one cluster, one version of its libraries and
one hand that tuned it. A collection has strangers' rows, too few to tell constants apart, but how fast products are in
them is seen where they are most of a step. Each source there says one share, at which its median row is right.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from paceline.backtest.price import Priced, alike_cases, price_cases, seconds_of_cases
from paceline.backtest.rows import Case
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.constants import FAMILIES, Constants, family_of

COLLECTED = 3  # sources that make a table a collection
BOUND = 0.8  # part of a step that goes with the rate of products, of rows that tell of it
# Rows of strangers that count for one of a table: rounds of theirs were off by 22 to 29 % in the mean where tables
# without their source were by 8 to 10 (docs/forecast-accuracy.md), since they leave open more of what ran.
PER_ROW = 3
ERRORS = 2.0  # standard errors of the median by which sources must differ from a fitted share to have a say
# Of a median of n normal values: 1.2533 standard deviations over the root of n; of these 1.4826 are a median deviation.
MEDIAN_ERROR = 1.2533 * 1.4826
FACTORS = np.exp(np.linspace(math.log(0.5), math.log(1.6), 7))  # of a share, between which it is looked for

SharesTold = dict[str, dict[str, tuple[float, int]]]  # generation -> source -> its share, and of how many rows


def shares_told(cases: Sequence[Case], constants: Constants) -> SharesTold:
    """Return the share of each generation that every source of dense rows tells by its median row.

    Sources whose rows ask for less or more than all of FACTORS say the last of these.

    Example: rows that come out 10 % long at 0.60, of steps that are products alone, tell 0.66.
    """
    found: SharesTold = {}
    for family in FAMILIES:
        bound = _bound([case for case in cases if family_of(case.cluster.device.name) == family], constants)
        if not bound:
            continue
        groups = alike_cases(bound)
        measured = np.array([case.step_seconds for case in bound], dtype=np.float64)
        shares = constants.share[family] * FACTORS
        misses = [
            np.log(seconds_of_cases(bound, replace(constants, share={**constants.share, family: share}), groups))
            - np.log(measured)
            for share in shares.tolist()
        ]
        places: dict[str, list[int]] = {}
        for place, case in enumerate(bound):
            places.setdefault(case.row.source, []).append(place)
        found[family] = {
            source: (_share_at_zero(np.log(shares), np.array([np.median(each[at]) for each in misses])), len(at))
            for source, at in places.items()
        }
    return found


def blended(
    shares: Mapping[str, float], rows: Mapping[str, int], told: SharesTold, without: Collection[str] = ()
) -> dict[str, float]:
    """Return shares of generations between the fitted ones and those of the median source of collections, by rows.

    `rows` are those that a generation's share was fitted on; of one that had none, the median source alone says it. Of
    collections PER_ROW rows count as one. A median that lies within ERRORS of a fitted share says nothing. Sources in
    `without` have no say.

    Example: 0.77 by 139 rows and 0.68 by the median of 30 sources of 62 rows together are 0.758.
    """
    found = dict(shares)
    for family, sources in told.items():
        heard = [(math.log(share), count) for source, (share, count) in sources.items() if source not in without]
        if not heard:
            continue
        levels, count = [level for level, _ in heard], sum(number for _, number in heard) / PER_ROW
        fitted = rows.get(family, 0)
        level = median(levels)
        error = MEDIAN_ERROR * median(abs(each - level) for each in levels) / math.sqrt(len(levels))
        if fitted and abs(level - math.log(shares[family])) <= ERRORS * error:
            continue
        found[family] = math.exp((fitted * math.log(shares[family]) + count * level) / (fitted + count))
    return found


def _bound(cases: Sequence[Case], constants: Constants) -> list[Case]:
    """Return the dense cases whose step goes with the rate of products: these, attention, and what is repeated."""
    dense = [case for case in cases if not case.row.experts]
    found = []
    for case, priced in zip(dense, price_cases(dense, constants), strict=True):
        if isinstance(priced, Priced):
            going = sum(term.seconds for term in priced.terms if term.kind in ("products", "attention", "recompute"))
            if going > BOUND * priced.step_seconds.value:
                found.append(replace(case, plans=(priced.plan,)))
    return found


def _share_at_zero(shares: Floats, misses: Floats) -> float:
    """Return the share at which the miss is zero: a line between those beside it, of misses that fall with the share.

    `shares` are logarithms.
    """
    return math.exp(float(np.interp(0.0, -misses, shares)))
