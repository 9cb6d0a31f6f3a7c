"""The descent of a fit: damped Gauss-Newton steps on the logarithms of constants, rows weighed by Huber's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.plan.cost.columns import Floats
from paceline.plan.cost.constants import BY_FAMILY, Constants

AT_MOST_ONE = ("operand_traffic", "memory_share", "node_link_share", "network_link_share", "overlap")
FILE_WEIGHT = 60.0  # rows that the longest file counts for
HUBER = 0.10  # of log(forecast / measured)
PRIOR_WEIGHT = 0.5  # of a constant's distance from where it starts, as a logarithm
STEP, LONGEST_STEP, ROUNDS = 0.03, 0.5, 12
RESTING = 50  # times that rows are weighed anew until a linear fit rests

Missed = Callable[[Constants], Floats]  # what constants miss of a table's rows: log(forecast / measured)


def descend(names: Sequence[str], start: Constants, parts: Sequence[Missed]) -> Constants:
    """Return the constants at the least loss, found from `start` on."""
    begin, ceiling = logarithms(start, names), _ceiling(names)

    def missed(at: Floats) -> list[Floats]:
        constants = with_values(start, names, at)
        return [missed_of(constants) for missed_of in parts]

    def loss(misses: list[Floats], at: Floats) -> float:
        sizes, weights = np.abs(np.concatenate(misses)), _weights(misses)
        huber = np.where(sizes < HUBER, sizes**2 / 2, HUBER * (sizes - HUBER / 2))
        return float(weights @ huber + PRIOR_WEIGHT / 2 * np.sum((at - begin) ** 2))

    at, misses, damping = begin.copy(), missed(begin), 1e-2
    least = loss(misses, at)
    for _ in range(ROUNDS):
        residuals = np.concatenate(misses)
        slopes = np.column_stack(
            [(np.concatenate(missed(at + STEP * row)) - residuals) / STEP for row in np.eye(len(at))]
        )
        weights = _weights(misses) * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
        curve = slopes.T @ (weights[:, None] * slopes) + PRIOR_WEIGHT * np.eye(len(at))
        slope = slopes.T @ (weights * residuals) + PRIOR_WEIGHT * (at - begin)
        before = least
        for _ in range(6):
            move = -np.linalg.solve(curve + damping * np.diag(np.diag(curve)), slope)
            there = np.minimum(at + np.clip(move, -LONGEST_STEP, LONGEST_STEP), ceiling)
            found = missed(there)
            if loss(found, there) < least:
                at, misses, least, damping = there, found, loss(found, there), max(damping / 5, 1e-4)
                break
            damping *= 6
        if before - least < 1e-3 * before:
            break
    return with_values(start, names, at)


def nearby(names: Sequence[str], start: Constants, near: Constants, slopes: Sequence[tuple[Floats, Floats]]) -> Floats:
    """Return the logarithms of constants at the least loss of misses that are linear about `near`."""
    begin, at = logarithms(start, names), logarithms(near, names)
    misses, slope = np.concatenate([misses for misses, _ in slopes]), np.concatenate([slope for _, slope in slopes])
    files, moved = _weights([misses for misses, _ in slopes]), np.zeros(len(at))
    for _ in range(RESTING):
        left = misses + slope @ moved
        weights = files * np.minimum(1.0, HUBER / np.maximum(np.abs(left), 1e-12))
        curve = slope.T @ (weights[:, None] * slope) + PRIOR_WEIGHT * np.eye(len(at))
        pull = slope.T @ (weights * misses) + PRIOR_WEIGHT * (at - begin)
        moved = np.clip(-np.linalg.solve(curve, pull), -LONGEST_STEP, LONGEST_STEP)
    return np.minimum(at + moved, _ceiling(names))


def _ceiling(names: Sequence[str]) -> Floats:
    return np.array([0.0 if name.split(".")[0] in (*AT_MOST_ONE, *BY_FAMILY) else math.inf for name in names])


def logarithms(constants: Constants, names: Sequence[str]) -> Floats:
    return np.log([_get(constants, name) for name in names])


def _weights(misses: list[Floats]) -> Floats:
    return np.concatenate([np.full(len(part), min(1.0, FILE_WEIGHT / len(part))) for part in misses])


def _get(constants: Constants, name: str) -> float:
    kind, _, family = name.partition(".")
    return float(getattr(constants, kind)[family] if family else getattr(constants, kind))


def with_values(constants: Constants, names: Sequence[str], logarithms: Floats) -> Constants:
    values = {name: rounded(math.exp(value)) for name, value in zip(names, logarithms, strict=True)}
    changes: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for kind in BY_FAMILY:
        own = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{kind}.")}
        changes[kind] = {**getattr(constants, kind), **own}
    return replace(constants, **changes)


def rounded(value: float) -> float:
    """Return a value as it is written down: of four digits."""
    return float(f"{value:.4g}")
