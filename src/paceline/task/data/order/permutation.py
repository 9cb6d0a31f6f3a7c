"""The order of samples as a pure function of (seed, position): no state, no permutation held in memory.

A position counts samples since the start of training, over all devices. Epoch e holds the positions
[e * samples, (e + 1) * samples); within it, each sample comes exactly once. Any world size, batch size or resume
that asks for the same positions gets the same samples.

The permutation is an alternating Feistel network on the rectangle rows x columns, rows * columns >= samples
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 5), made to fit the domain by cycle-walking.
The rectangle exceeds the domain by less than one row, so that walking is rare. Its round function is the output
function of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
The result is fixed for ever: golden vectors in the tests hold it, since a change would reorder every run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

ROUNDS = 8
SMALL_SAMPLES, SMALL_ROUNDS = 1024, 16  # on a few cells 8 rounds leave some permutations likelier than others
MAX_SAMPLES = 2**62  # sides of the rectangle stay below 2^32, so that products of a side and 32 bits fit 64
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, made odd: SplitMix64's increment


def mix64(words: Words) -> Words:
    """Return SplitMix64's bijective scramble of each 64-bit word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keyed(seed: int, words: Words) -> Words:
    """Return a 64-bit key for each word under `seed`; different seeds give unrelated keys. Seeds count modulo 2^64."""
    start = mix64(np.array([(seed + GOLDEN) % 2**64], dtype=np.uint64))
    return mix64(mix64(words + start) + np.uint64(GOLDEN))


def sample_ids(seed: int, positions: npt.NDArray[Any], samples: int) -> npt.NDArray[np.int64]:
    """Return the sample at each position, in 0..samples-1: the order of the whole training.

    `positions` is an integer array of any shape, values >= 0, in any order; it may straddle epochs. The work per
    position is fixed, whatever the number of samples.
    """
    if not 0 < samples <= MAX_SAMPLES:
        raise ValueError(f"samples must lie in 1..2^62, not {samples}")
    flat = np.ascontiguousarray(positions, dtype=np.int64).reshape(-1)
    if flat.size == 0:
        return np.zeros(np.shape(positions), dtype=np.int64)
    if int(flat.min()) < 0:
        raise ValueError(f"positions count from 0, not {int(flat.min())}")
    epochs, index = np.divmod(flat.astype(np.uint64), np.uint64(samples))
    keys = keyed(seed, epochs[:1] if epochs.min() == epochs.max() else epochs)
    found = _feistel(index, keys, samples)
    while (outside := np.flatnonzero(found >= np.uint64(samples))).size:
        found[outside] = _feistel(found[outside], keys if keys.size == 1 else keys[outside], samples)
    return found.astype(np.int64).reshape(np.shape(positions))


def _feistel(index: Words, keys: Words, samples: int) -> Words:
    """Return the keyed permutation of the rectangle's cells at each index; `keys` has one entry, or one per index."""
    columns = math.isqrt(samples - 1) + 1
    rows = -(-samples // columns)
    row, column = np.divmod(index, np.uint64(columns))
    turns = np.arange(1, 1 + (SMALL_ROUNDS if samples < SMALL_SAMPLES else ROUNDS), dtype=np.uint64)
    for turn, round_keys in enumerate(mix64(keys + turns[:, None] * np.uint64(GOLDEN))):
        if turn % 2 == 0:
            row = _shift(row, column, round_keys, np.uint64(rows))
        else:
            column = _shift(column, row, round_keys, np.uint64(columns))
    return row * np.uint64(columns) + column


def _shift(values: Words, others: Words, keys: Words, modulus: np.uint64) -> Words:
    """Return (values + pseudo-random function of others) modulo `modulus`, without a division."""
    drawn = ((mix64(others + keys) >> np.uint64(32)) * modulus) >> np.uint64(32)  # uniform in 0..modulus-1
    moved = values + drawn
    return np.where(moved >= modulus, moved - modulus, moved)
