"""What is drawn for an image: whole numbers that follow from the seed and the image's position alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.spec.data.augment import AugmentSpec

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PLACE_BITS = 11  # of a pixel: places and sides of crops are in these parts
FACTOR_BITS = 12  # of one: factors of colours are in these parts
COLUMNS = ("left", "top", "width", "height", "flip", "brightness", "contrast", "saturation")
_ONE = 1 << FACTOR_BITS
# Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: the mixing of SplitMix64.
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def choices_of(spec: AugmentSpec, seed: int, positions: npt.NDArray[np.int64], side: int) -> Ints:
    """Return what is drawn for the images at these positions, [rows, 8]: the COLUMNS, for squares of `side` pixels.

    Places and sides of crops are in 1/2,048 of a pixel, factors in 1/4,096. They are computed from 53 random bits by
    products, quotients and square roots, which IEEE 754 rounds alike on every machine.
    """
    rows = len(positions)
    drawn = [_uniform(seed, positions, number) for number in range(9)]
    area = spec.crop_share + (1.0 - spec.crop_share) * drawn[0]
    stretch = np.sqrt(1.0 + (spec.crop_stretch - 1.0) * drawn[1])
    long, short = np.minimum(1.0, np.sqrt(area) * stretch), np.minimum(1.0, np.sqrt(area) / stretch)
    wide = drawn[2] < 0.5
    whole = float(side << PLACE_BITS)
    width, height = (np.rint(np.where(side_is, long, short) * whole) for side_is in (wide, ~wide))
    left, top = np.floor(drawn[3] * (whole - width + 1)), np.floor(drawn[4] * (whole - height + 1))
    found = np.empty((rows, len(COLUMNS)), dtype=np.int64)
    found[:, :4] = np.stack([left, top, width, height], axis=1)
    found[:, 4] = (drawn[5] < 0.5) & spec.flip
    for column, share in enumerate((spec.brightness, spec.contrast, spec.saturation)):
        found[:, 5 + column] = np.rint((1.0 + share * (2.0 * drawn[6 + column] - 1.0)) * _ONE)
    return found


def unchanged(rows: int, side: int) -> Ints:
    """Return the choices for images that nothing is drawn for: the whole square, as it is."""
    whole = side << PLACE_BITS
    return np.tile(np.array([0, 0, whole, whole, 0, _ONE, _ONE, _ONE], dtype=np.int64), (rows, 1))


def _uniform(seed: int, positions: npt.NDArray[np.int64], number: int) -> Floats:
    """Return a number in [0, 1) for each position: the `number`-th that is drawn there."""
    with np.errstate(over="ignore"):
        state = _mixed(np.uint64(seed % 2**64) * _GOLDEN + _GOLDEN + np.zeros(len(positions), dtype=np.uint64))
        state = _mixed(state ^ (positions.astype(np.uint64) * _GOLDEN + np.uint64(number + 1)))
        state = _mixed(state + np.uint64(number + 1) * _GOLDEN)
    found: Floats = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
