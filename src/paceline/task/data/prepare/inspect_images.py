"""A look at images: their classes, how large they are, which cannot be decoded, which are there twice."""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import DamagedData
from paceline.spec.task import DataSpec
from paceline.task.data.order.permutation import sample_ids
from paceline.task.data.sources.images.decoding import decoded
from paceline.task.data.sources.images.source import ImageSource, open_images

LOOKED_AT = 2_000  # images of a split at most that are decoded
SEED = 0
DAMAGED_SHOWN = 3


@dataclass
class ImageFacts:
    """What one split holds. Sides are pixels of the images that were looked at, duplicates shares of these."""

    images: int
    classes: dict[str, int]
    looked_at: int = 0
    damaged: int = 0
    duplicates: float = 0.0  # equal to one before, byte by byte, in this split or in the one before
    shorter_sides: dict[str, int] = field(default_factory=dict)
    mean: tuple[float, ...] = ()  # of each channel, in 0..1, as data.normalise would be told
    deviation: tuple[float, ...] = ()


@dataclass(frozen=True)
class InspectedImages:
    """What was found in images. `told` are notes for people, `samples` some images with their classes."""

    source: str
    what: str
    image_size: int
    fingerprint: str
    splits: dict[str, ImageFacts]
    samples: list[str]
    told: list[str]


def inspect_images(data: DataSpec, path: str, samples: int) -> InspectedImages:
    """Return what a folder or tar files of images hold. Raises the errors of listing them, MissingExtra without Pillow.

    Of each split 2,000 images at most are decoded, drawn as an order of samples is.
    """
    train, validation = open_images(data, path, SEED)
    sources = {"train": train} | ({"validation": validation} if validation else {})
    told, seen = list(map(str, train.listing.skipped)), set[bytes]()
    splits = {name: _facts(source, told, seen) for name, source in sources.items()}
    told += _told_of_classes(splits)
    entries = [train.listing.entries[at] for at in train.chosen[_some(train, samples)].tolist()]
    shown = [f"{each.name} -> {train.classes[each.label]} (class {each.label})" for each in entries]
    return InspectedImages(data.source, train.described, data.image_size, train.fingerprint, splits, shown, told)


def _some(source: ImageSource, count: int) -> np.ndarray:
    return sample_ids(SEED, np.arange(min(count, source.samples)), source.samples)


def _facts(source: ImageSource, told: list[str], seen: set[bytes]) -> ImageFacts:
    """Return what a split holds; what is damaged is added to `told`, and hashes of what was looked at to `seen`."""
    counts = Counter(source.listing.entries[at].label for at in source.chosen.tolist())
    facts = ImageFacts(source.samples, {name: counts[at] for at, name in enumerate(source.classes)})
    sides, sums, squares, again = list[int](), np.zeros(3), np.zeros(3), 0
    for content, pixels, error in _decoded(source):
        facts.looked_at += 1
        digest = hashlib.blake2b(content, digest_size=16).digest()
        again += digest in seen
        seen.add(digest)
        if error is not None:
            facts.damaged += 1
            if facts.damaged <= DAMAGED_SHOWN:
                told.append(f"{error.what}: {error.because}")
            continue
        sides.append(_shorter_side(content))
        part = pixels.reshape(-1, 3) / 255.0
        sums, squares = sums + part.mean(0), squares + (part**2).mean(0)
    facts.duplicates = again / facts.looked_at
    if sides:
        quantiles = {"least": 0.0, "5%": 0.05, "50%": 0.5, "95%": 0.95, "most": 1.0}
        facts.shorter_sides = {name: int(np.quantile(sides, share)) for name, share in quantiles.items()}
        mean = sums / len(sides)
        facts.mean = tuple(mean.tolist())
        facts.deviation = tuple(np.sqrt(np.maximum(squares / len(sides) - mean**2, 0.0)).tolist())
    return facts


def _decoded(source: ImageSource) -> Iterator[tuple[bytes, np.ndarray, DamagedData | None]]:
    """Yield the bytes of images of a split, their pixels as they are trained on, and what is wrong with them."""
    nothing = np.zeros((1, 1, 3), dtype=np.uint8)
    for sample in _some(source, LOOKED_AT).tolist():
        content = source.content_of(sample)
        try:
            entry = source.listing.entries[int(source.chosen[sample])]
            yield content, decoded(content, entry, source.look.side), None
        except DamagedData as error:
            yield content, nothing, error


def _shorter_side(content: bytes) -> int:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        return min(image.size)


def _told_of_classes(splits: dict[str, ImageFacts]) -> list[str]:
    """Return what is worth a note: images of one class alone in a split, parts of which nothing is known."""
    told = []
    for name, facts in splits.items():
        if lacking := [each for each, count in facts.classes.items() if not count]:
            more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            told.append(f"{name} has no image of {', '.join(lacking[:3])}{more}")
        if facts.looked_at < facts.images:
            told.append(f"of the {facts.images:,} images of {name} {facts.looked_at:,} were decoded")
    return told
