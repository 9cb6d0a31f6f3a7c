"""DigitsSource: the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn (UCI "Optical Recognition of
Handwritten Digits", test set). Needs the extra 'digits' and no download."""

from __future__ import annotations

import gzip
import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError, MissingExtra
from paceline.task.data.sources.held_out import document_hash, split_limit, split_value


class DigitsSource:
    """Images and their digits, in the order of the data set."""

    unit = "samples"
    items_per_sample = 1
    vocab: int | None = None

    def __init__(self, images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> None:
        """Take images [samples, 1, 8, 8] in 0..1 and labels [samples]. Raises DataError where there is none."""
        if not len(images):
            raise DataError("no digits are left", "the other split took all of them", "lower validation_fraction")
        self.images, self.labels = images, labels
        self.samples = len(images)
        digest = hashlib.blake2b(images.tobytes() + labels.tobytes(), digest_size=16)
        self.fingerprint = digest.hexdigest()

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return {"images": float32 [rows, 1, 8, 8], "labels": int64 [rows]}. Positions do not matter."""
        import torch

        assert ids.size == 0 or ids.min() >= 0, "a sample id is negative"
        return {"images": torch.from_numpy(self.images[ids]), "labels": torch.from_numpy(self.labels[ids])}


def open_digits(validation_fraction: float) -> tuple[DigitsSource, DigitsSource | None]:
    """Return the digits split by a hash of each image: (train, validation or None)."""
    pixels, digits = _pixels_and_digits()
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)  # pixels count 0..16
    labels = digits.astype(np.int64)
    values = [split_value(document_hash(image.tobytes())) for image in images]
    limit = split_limit(values, validation_fraction)
    held_out = np.array([value < limit for value in values])
    validation = DigitsSource(images[held_out], labels[held_out]) if held_out.any() else None
    return DigitsSource(images[~held_out], labels[~held_out]), validation


def _pixels_and_digits() -> tuple[npt.NDArray[np.float64], npt.NDArray[Any]]:
    """Return pixels [samples, 64] in 0..16 and digits [samples], as `load_digits` of scikit-learn does.

    They are read from the file that it brings, where that is found: importing it takes longer than a whole plan.
    """
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise MissingExtra("scikit-learn", "digits", "the data source 'digits'")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        with gzip.open(path, "rt") as rows:
            # `np.loadtxt` takes three times as long, a twentieth of a plan.
            table = np.fromstring(rows.read().strip().replace("\n", ","), sep=",").reshape(-1, 65)
        return table[:, :-1], table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    return pixels, digits
