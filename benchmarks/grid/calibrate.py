"""How wide intervals of a probed machine are to be: from grids that were measured, each left out once.

    python benchmarks/grid/calibrate.py GRID.json...

Every file is one that `forecast_grid.py --save` has written; `git log -- benchmarks/results/figures/forecast_grid.json`
names those of other days, and `git show COMMIT:PATH` writes them out. The logarithm of measured over forecast is taken
to have a variance of `(a c)^2 + (b (1 - c))^2`, c the part of a step that computes: a and b at the greatest likelihood,
scaled so that 80 % of the rows are held, since tails are longer than a normal distribution's. A grid has no terms, so
the part is that of copies of the model, which communicate little: their forecast over the row's.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Tasks without a row of copies: the model and the batch are those of another one.
LIKE = {"slow network": "larger decoder", "little memory": "larger decoder",
        "experts in little memory": "mixture of experts"}  # fmt: skip
LEAST_SHARE = 0.03  # that two processes communicate at least
OF_PIPELINES = 0.05  # what stages send is small, and what they wait is computing


@dataclass(frozen=True)
class Errors:
    """Half-widths of 80 % as logarithms, of what computes and of what communicates, and of 95 % over those."""

    computing: float
    communicating: float
    tail: float


def residuals(rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """Return [rows, 2]: log(measured / forecast), and the part of the forecast that communicates."""
    copies = {row["task"]: row["forecast_seconds"] for row in rows if row["devices"] == 2 and _copies(row)}
    found = []
    for row in rows:
        alone = copies.get(row["task"]) or copies.get(LIKE.get(row["task"], ""))
        if row["devices"] > 2 or (row["devices"] == 2 and not alone):
            continue
        share = 0.0
        if row["devices"] == 2:
            assert alone is not None
            share = max(LEAST_SHARE, 1 - alone / row["forecast_seconds"])
            share = OF_PIPELINES if "pp=2" in row["plan"] else share
        found.append((np.log(row["measured_seconds"] / row["forecast_seconds"]), share))
    return np.array(found)


def _copies(row: dict[str, Any]) -> bool:
    """Return whether a row's plan copies the whole model; grids of before 2026-11-24 say so in the plan alone."""
    return bool(row.get("is_copies", row["plan"].startswith("dp_replicate=2 ·")))


def deviations(parts: np.ndarray, computing: float, communicating: float) -> np.ndarray:
    """Return what each row of `residuals` is taken to miss."""
    return np.hypot(computing * (1 - parts[:, 1]), communicating * parts[:, 1])


def fit(parts: np.ndarray) -> Errors:
    """Return the errors that rows show."""

    def loss(pair: tuple[float, float]) -> float:
        variance = deviations(parts, *pair) ** 2
        return float(np.sum(np.log(variance) + parts[:, 0] ** 2 / variance))

    steps = itertools.product(np.arange(0.02, 0.3, 0.005), np.arange(0.02, 0.9, 0.01))
    computing, communicating = min(((float(a), float(b)) for a, b in steps), key=loss)
    sizes = np.abs(parts[:, 0]) / deviations(parts, computing, communicating)
    narrow, wide = (float(np.quantile(sizes, share)) for share in (0.80, 0.95))
    return Errors(narrow * computing, narrow * communicating, wide / narrow)


def held(parts: np.ndarray, errors: Errors) -> float:
    """Return the part of rows that the 80 % intervals of these errors hold."""
    return float(np.mean(np.abs(parts[:, 0]) <= deviations(parts, errors.computing, errors.communicating)))


def main(names: Sequence[str]) -> int:
    """Print what each grid's intervals hold with the errors of the others, and the errors of all."""
    grids = {name: residuals(json.loads(Path(name).read_text("utf-8"))["rows"]) for name in names}
    if len(grids) < 2:
        print("two grids at least: each is left out once", file=sys.stderr)
        return 2
    shares = []
    for name, parts in grids.items():
        found = fit(np.concatenate([other for key, other in grids.items() if key != name]))
        shares.append(held(parts, found))
        print(f"{name}: {len(parts)} rows, {shares[-1]:.0%} held by the others' errors, "
              f"{np.mean(np.abs(parts[:, 0])):.1%} missed in the mean")  # fmt: skip
    found = fit(np.concatenate(list(grids.values())))
    print(f"left-out grids hold {np.mean(shares):.0%} in the mean; of all: computing ±{np.expm1(found.computing):.0%}, "
          f"communicating ±{np.expm1(found.communicating):.0%}, 95 % {found.tail:.1f} times as wide")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
