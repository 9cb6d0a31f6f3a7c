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

import numpy as np
import numpy.typing as npt

Unsigned = npt.NDArray[np.uint64]

ROUNDS = 8
SMALL_SAMPLES, SMALL_ROUNDS = 1024, 16  # on a few cells 8 rounds leave some permutations likelier than others
MAX_SAMPLES = 2**62  # sides of the rectangle stay below 2^32, so that products of a side and 32 bits fit 64
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio, made odd: SplitMix64's increment
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)  # SplitMix64's
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def mix64(words: Unsigned) -> Unsigned:
    """Return SplitMix64's bijective scramble of each 64-bit word."""
    found = words ^ (words >> _SHIFTS[0])
    found *= _FACTORS[0]  # in place from here on: new memory takes as long as what is computed in it
    found ^= found >> _SHIFTS[1]
    found *= _FACTORS[1]
    found ^= found >> _SHIFTS[2]
    return found


def keyed(seed: int, words: Unsigned) -> Unsigned:
    """Return a 64-bit key for each word under `seed`; different seeds give unrelated keys. Seeds count modulo 2^64."""
    start = mix64(np.array([(seed + GOLDEN) % 2**64], dtype=np.uint64))
    return mix64(mix64(words + start) + np.uint64(GOLDEN))


def sample_ids(seed: int, positions: npt.NDArray[np.int64], samples: int) -> npt.NDArray[np.int64]:
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
    return permuted(keys, index, samples).astype(np.int64).reshape(np.shape(positions))


def permuted(keys: Unsigned, index: Unsigned, size: int) -> Unsigned:
    """Return where the keyed permutation of 0..size-1 sends each index; `keys` has one entry, or one per index."""
    found = _feistel(index, keys, size)
    while (outside := np.flatnonzero(found >= np.uint64(size))).size:
        found[outside] = _feistel(found[outside], keys if keys.size == 1 else keys[outside], size)
    return found


def place_of(keys: Unsigned, value: int, size: int) -> npt.NDArray[np.int64]:
    """Return the index that `permuted` sends to `value` under each key: its inverse."""
    found = _feistel_back(np.full(keys.size, value, dtype=np.int64), keys, size)
    while (outside := np.flatnonzero(found >= size)).size:
        found[outside] = _feistel_back(found[outside], keys[outside], size)
    return found


def _feistel(index: Unsigned, keys: Unsigned, samples: int) -> Unsigned:
    """Return the keyed permutation of the rectangle's cells at each index; `keys` has one entry, or one per index."""
    rows, columns = _rectangle(samples)
    row, column = np.divmod(index, np.uint64(columns))
    for turn, round_keys in enumerate(_round_keys(keys, samples)):
        if turn % 2 == 0:
            row = _shift(row, column, round_keys, np.uint64(rows))
        else:
            column = _shift(column, row, round_keys, np.uint64(columns))
    return row * np.uint64(columns) + column


def _feistel_back(values: npt.NDArray[np.int64], keys: Unsigned, samples: int) -> npt.NDArray[np.int64]:
    """Return the cell that `_feistel` sends to each of some cells, each under a key of its own."""
    rows, columns = _rectangle(samples)
    row, column = np.divmod(values, columns)
    round_keys = _round_keys(keys, samples)
    for turn in reversed(range(len(round_keys))):
        if turn % 2 == 0:
            row = (row - _drawn(column.astype(np.uint64), round_keys[turn], np.uint64(rows)).astype(np.int64)) % rows
        else:
            drawn = _drawn(row.astype(np.uint64), round_keys[turn], np.uint64(columns))
            column = (column - drawn.astype(np.int64)) % columns
    return row * columns + column


def _rectangle(samples: int) -> tuple[int, int]:
    """Return rows and columns of the rectangle that holds so many cells."""
    columns = math.isqrt(samples - 1) + 1
    return -(-samples // columns), columns


def _round_keys(keys: Unsigned, samples: int) -> Unsigned:
    """Return the keys of the rounds: [rounds, keys]."""
    turns = np.arange(1, 1 + (SMALL_ROUNDS if samples < SMALL_SAMPLES else ROUNDS), dtype=np.uint64)
    return mix64(keys + turns[:, None] * np.uint64(GOLDEN))


def _shift(values: Unsigned, others: Unsigned, keys: Unsigned, modulus: np.uint64) -> Unsigned:
    """Return (values + pseudo-random function of others) modulo `modulus`, without a division."""
    moved = _drawn(others, keys, modulus)
    moved += values
    return np.minimum(moved, moved - modulus, out=moved)  # what lies below the modulus wraps round to a huge number


def _drawn(others: Unsigned, keys: Unsigned, modulus: np.uint64) -> Unsigned:
    """Return the pseudo-random function of `others`, uniform in 0..modulus-1."""
    drawn = mix64(others + keys)
    drawn >>= _HALF
    drawn *= modulus
    drawn >>= _HALF
    return drawn
