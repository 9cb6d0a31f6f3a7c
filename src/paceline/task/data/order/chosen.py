"""Which of a step's candidates are trained on: a pure function of the seed, the position and their losses.

Of K candidates n are drawn without replacement. Candidate i has the chance pi_i = min(1, n p_i), where p_i is made of
an even part and of a part in proportion to its loss, scaled until the chances add up to n. The draw is systematic
(Madow 1949): the chances lie end to end on a line, and those under the points u, u + 1, ..., u + n - 1 are drawn, so
that for an even u in [0, 1) every candidate is drawn with its own chance exactly. A sum over candidates is then
estimated without bias by the sum over those drawn, each divided by its chance (Horvitz and Thompson 1952). Chances are
whole numbers of 2^-40 and u too, so this holds of the numbers that are computed, not only of those that are meant.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from paceline.task.data.order.permutation import mix64

ONE = 1 << 40  # a chance of 1
SALT = 0x5E1EC7  # tells the draw from every other use of the seed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def chances(losses: Floats, count: int, even: float) -> Ints:
    """Return the chance of each candidate, of which `count` are drawn, in units of 1 / ONE: int64 [candidates].

    A loss that is not finite has the chance 1: what is wrong with it then shows. Signs do not count.
    """
    size = np.abs(np.asarray(losses, dtype=np.float64))
    certain = ~np.isfinite(size)
    if certain.sum() > count:  # more than can be drawn: they are drawn evenly
        return _whole(np.where(certain, count / certain.sum(), 0.0), count)
    others = max(1, int((~certain).sum()))
    total = size[~certain].sum()
    share = np.where(certain, 0.0, size) / total if total > 0 else np.full(len(size), 1.0 / others)
    weight = even / others + (1 - even) * share
    while True:  # whoever would be drawn more than once is drawn for certain, and the others share the rest
        left = count - int(certain.sum())
        rest = np.where(certain, 0.0, weight)
        found = np.where(certain, 1.0, left * rest / rest.sum() if rest.sum() > 0 else 0.0)
        above = (found > 1.0) & ~certain
        if not above.any():
            return _whole(found, count)
        certain |= above


def _whole(found: Floats, count: int) -> Ints:
    """Return chances as whole numbers that add up to `count` times ONE, none above ONE or 0 where it was more."""
    whole: Ints = np.clip(np.rint(found * ONE), np.where(found > 0, 1, 0), ONE).astype(np.int64)
    off = count * ONE - int(whole.sum())
    for place in np.argsort(-np.minimum(whole, ONE - whole), kind="stable"):
        moved = int(np.clip(off, 1 - whole[place], ONE - whole[place])) if whole[place] else 0
        whole[place] += moved
        off -= moved
        if not off:
            break
    assert not off, "chances between 0 and 1 reach any sum up to their number"
    return whole


def start_of(seed: int, position: int) -> int:
    """Return where the draw of the step at a position begins: 0 to ONE - 1, evenly."""
    keys = np.array([seed % 2**64, position], dtype=np.uint64)  # seeds count modulo 2^64, as in every order
    first = mix64(keys[:1] + np.uint64(SALT))
    return int(mix64(first + keys[1:])[0] >> np.uint64(64 - 40))


def drawn(units: Ints, start: int) -> Ints:
    """Return the candidates under the points of a draw, in rising order: as many as the chances add up to."""
    ends = np.cumsum(units)
    points = start + ONE * np.arange(int(ends[-1]) // ONE, dtype=np.int64)
    found: Ints = np.searchsorted(ends, points, side="right").astype(np.int64)
    return found


def largest(scores: Floats, count: int) -> Ints:
    """Return the candidates of the largest scores, in rising order; of equal ones the first. No number is largest."""
    found: Ints = np.sort(np.argsort(-np.where(np.isnan(scores), np.inf, scores), kind="stable")[:count])
    return found


def spread_ratio(losses: Floats, units: Ints, count: int) -> float:
    """Return the variance of the estimate over that of an even draw of as many, as far as losses tell.

    Losses stand for the norms of gradients, and draws are taken for independent ones: the sum of x^2 (1 / pi - 1). NaN
    where an even draw has no variance.
    """
    squares, chance = np.square(losses, dtype=np.float64), units / ONE
    mine = float((squares * (1 / np.maximum(chance, 1 / ONE) - 1))[np.isfinite(squares)].sum())
    plain = float(squares[np.isfinite(squares)].sum() * (len(losses) / count - 1))
    return mine / plain if plain > 0 else float("nan")


def as_mask(places: Ints, candidates: int) -> str:
    """Return which of the candidates were chosen as hexadecimal digits: the first candidate is the first bit."""
    bits = np.zeros(candidates, dtype=np.uint8)
    bits[places] = 1
    return np.packbits(bits).tobytes().hex()


def of_mask(mask: str, candidates: int) -> Ints:
    """Return the candidates of a mask, in rising order."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(mask), dtype=np.uint8))[:candidates]
    found: Ints = np.flatnonzero(bits).astype(np.int64)
    return found


def digest_of(ids: Ints) -> str:
    """Return a hash of the samples that were chosen, in their order."""
    return hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=8).hexdigest()
