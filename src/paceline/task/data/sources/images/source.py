"""ImageSource: images decoded and cut to a square, and their classes. Needs the extra 'images'."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, DamagedData, DataError, MissingExtra
from paceline.spec.data.augment import AugmentSpec
from paceline.spec.data.labels import IGNORED
from paceline.spec.task import DataSpec
from paceline.task.data.daemons import DaemonThreads
from paceline.task.data.sources.held_out import document_hash, split_limit, split_value
from paceline.task.data.sources.images.choices import choices_of, unchanged
from paceline.task.data.sources.images.decoding import FORMAT, decoded
from paceline.task.data.sources.images.in_memory import SquaresInMemory
from paceline.task.data.sources.images.listing import ImageEntry, ImageListing, list_images
from paceline.task.data.sources.shards.opened import options_of_text, storage_of
from paceline.task.data.storage.blocks import BlockCache, Bytes
from paceline.task.data.storage.bytes import ByteFile, Storage
from paceline.task.data.storage.remote import is_remote

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 8
OPEN_FILES = 64
STEPS_AHEAD = 4


@dataclass(frozen=True)
class ImageLook:
    """How images are read: `size` pixels of a side, of squares of `side`; what is drawn for them, and by which seed."""

    size: int
    side: int
    augment: AugmentSpec | None
    seed: int
    normalise: str
    skip_bad: bool
    keep: bool  # on local disk, once they are decoded


class ImageSource:
    """Images as {"images": float32 [rows, 3, size, size], "labels": int64 [rows]}.

    An image, upright, is scaled until its shorter side is `look.side` and cut to the square in its middle. The pixels
    depend on its bytes and on the version of Pillow alone; what is drawn for them on the seed and the image's position.
    With `look.skip_bad` an image that cannot be decoded counts nothing: it is black, and its label is -100.

    Threads decode (`read_unfinished`) what is not in memory yet; the rest is done of whole batches on whatever device
    they are (`finish`).
    """

    unit = "samples"
    items_per_sample = 1
    vocab: int | None = None
    reads_in_threads = True

    def __init__(
        self, listing: ImageListing, chosen: npt.NDArray[np.int64], look: ImageLook, storage: Storage,
        squares: SquaresInMemory,
    ) -> None:  # fmt: skip
        """`chosen` are the numbers of the images in the listing, `squares` those of it that this process keeps.

        Raises MissingExtra without Pillow.
        """
        try:
            import PIL
        except ImportError as error:
            raise MissingExtra("pillow", "images", "decoding images") from error
        self.listing, self.chosen, self.look, self.storage, self.squares = listing, chosen, look, storage, squares
        self.samples, self.notices = len(chosen), storage.notices
        self.damaged: dict[int, str] = {}  # samples that were left out as they were read, and why
        self.classes = listing.classes
        self.described = f"{len(listing.entries):,} images of {len(listing.classes):,} classes"
        self.steps_ahead = STEPS_AHEAD if any(map(is_remote, listing.files)) else 0
        digest = hashlib.blake2b(os.fsencode(f"{look.size} {listing.classes}"), digest_size=16)
        for each in chosen.tolist():
            entry = listing.entries[each]
            digest.update(os.fsencode(f"{entry.name.rpartition('/')[2]} {entry.size} {entry.label}\n"))
        self.fingerprint = digest.hexdigest()
        self._version = PIL.__version__
        kept = BlockCache(storage.cache_dir / "images", storage.cache_bytes, storage.notices)
        self._kept = kept if look.keep else None
        self._open: OrderedDict[int, ByteFile] = OrderedDict()
        self._tables: dict[object, Tensor] = {}  # by device
        self._lock = threading.Lock()
        self._pool: DaemonThreads | None = None

    @property
    def finishes_as(self) -> object:
        """What all that `finish` does follows from."""
        return self.look.size, self.look.normalise

    def counted_by(self, classes: Sequence[str]) -> ImageSource:
        """Return the same images, whose labels count these classes: the images' own are some of them."""
        places = [classes.index(each) for each in self.classes]
        entries = tuple(dataclasses.replace(each, label=places[each.label]) for each in self.listing.entries)
        listing = dataclasses.replace(self.listing, entries=entries, classes=tuple(classes))
        return ImageSource(listing, self.chosen, self.look, self.storage, self.squares)

    def read(self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None) -> Any:
        """Return the batch; without positions nothing is drawn. Raises DataError for an image that is damaged."""
        return self.finish(self.read_unfinished(ids, positions))

    def read_unfinished(
        self, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64] | None = None
    ) -> dict[str, Any]:
        """Return the squares of the images as they were decoded, uint8, and what is drawn for them: for `finish`."""
        import torch

        assert ids.size == 0 or ids.min() >= 0, "a sample id is negative"
        look, side = self.look, self.look.side
        pixels = np.zeros((len(ids), side, side, 3), dtype=np.uint8)
        labels = np.empty(len(ids), dtype=np.int64)
        numbers = self.chosen[ids].tolist()

        def decode(row: int) -> None:
            labels[row] = self._decode(int(ids[row]), numbers[row], pixels[row])

        others = []
        for row, number in enumerate(numbers):
            if self.squares.fill(number, pixels[row]):
                labels[row] = self.listing.entries[number].label
            else:
                others.append(row)
        if others:
            threads = self._threads()
            decoding = [threads.submit(decode, row) for row in others]
            try:
                for each in decoding:
                    each.result()
            finally:  # after an error nothing more of this batch is decoded
                for each in decoding:
                    each.cancel()
        batch = {"pixels": torch.from_numpy(pixels), "labels": torch.from_numpy(labels)}
        if positions is not None and look.augment is not None and look.augment.draws:
            batch["choices"] = torch.from_numpy(choices_of(look.augment, look.seed, positions, side))
        elif side != look.size:
            batch["choices"] = torch.from_numpy(unchanged(len(ids), side))
        return batch

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of `read_unfinished`, which may be on a device by now, as it is trained on: the same bits."""
        from paceline.task.data.sources.images.finish import finish_images, table_of

        pixels = batch["pixels"]
        if (table := self._tables.get(pixels.device)) is None:  # once: the host would wait for its copy in every step
            table = self._tables[pixels.device] = table_of(self.look.normalise).to(pixels.device)
        images = finish_images(pixels, batch.get("choices"), table, self.look.size)
        return {"images": images, "labels": batch["labels"]}

    def content_of(self, sample: int) -> bytes:
        """Return the bytes of an image's file. Raises DataError where it cannot be read."""
        entry = self.listing.entries[int(self.chosen[sample])]
        return self._file(entry.file).read(entry.start, entry.start + entry.size).tobytes()

    def expect(self, ids: npt.NDArray[np.int64]) -> None:
        """Say which samples will be read next, in their order: remote ones are fetched meanwhile."""
        for number in self.chosen[ids].tolist():
            if self.squares.holds(number, self.look.side):
                continue
            entry = self.listing.entries[number]
            self._file(entry.file).expect(np.array([[entry.start, entry.start + entry.size]]))

    def _decode(self, sample: int, number: int, into: npt.NDArray[np.uint8]) -> int:
        """Fill in an image, keep it, and return its label, -100 where it is left out."""
        entry = self.listing.entries[number]
        try:
            into[:] = self._square_of(self._file(entry.file).read(entry.start, entry.start + entry.size), entry)
        except DamagedData as error:
            if not self.look.skip_bad:
                raise
            self.damaged[sample] = f"{error.what}: {error.because}"
            return IGNORED
        self.squares.keep(number, into)
        return entry.label

    def _square_of(self, content: Bytes, entry: ImageEntry) -> npt.NDArray[np.uint8]:
        """Return the square of an image of these bytes, from the disk where it was kept. Raises DamagedData."""
        side, encoded = self.look.side, content.tobytes()
        if self._kept is None:
            return decoded(encoded, entry, side)
        key = hashlib.blake2b(encoded, digest_size=16, key=f"{side} {self._version} {FORMAT}".encode()).hexdigest()
        return self._kept.get(key, lambda: decoded(encoded, entry, side).tobytes()).reshape(side, side, 3)

    def _file(self, number: int) -> ByteFile:
        with self._lock:
            if (known := self._open.get(number)) is None:
                state = self.listing.states[number] if self.listing.states else None
                known = self._open[number] = self.storage.open(self.listing.files[number], state)
                if len(self._open) > OPEN_FILES:
                    self._open.popitem(last=False)
            return known

    def _threads(self) -> DaemonThreads:
        with self._lock:
            if self._pool is None:
                count = min(THREADS, len(os.sched_getaffinity(0)))
                self._pool = DaemonThreads(count, "paceline-decode")
            return self._pool

    def __reduce__(self) -> tuple[object, ...]:
        return ImageSource, (self.listing, self.chosen, self.look, self.storage, self.squares)


def open_images(data: DataSpec, path: str, seed: int) -> tuple[ImageSource, ImageSource | None]:
    """Return the images, split by a hash of their names: (train, validation or None).

    `seed` is the task's: what is drawn for training follows from it. Raises DataError where there are none,
    ConfigError for options that choose documents, MissingExtra without Pillow.
    """
    if of_text := options_of_text(data, ("document_tokens", "score_min", "score_max", "max_bytes")):
        raise ConfigError(
            f"task.data.{of_text[0]} with images", "documents are chosen by it, and images are read whole",
            "include, which chooses images by their names; or leave it out",
        )  # fmt: skip
    storage = storage_of(data)
    listing = list_images(path, storage, tuple(data.include))
    names = [entry.name.rpartition("/")[2] for entry in listing.entries]
    if len(set(names)) == 1 < len(names):  # each in a folder of its own: all of them would be on one side
        names = [entry.name.rpartition(": ")[2] for entry in listing.entries]
    values = [split_value(document_hash(os.fsencode(name))) for name in names]
    limit = split_limit(values, data.validation_fraction)
    named = any(entry.held_out for entry in listing.entries)
    held_out = np.array([bool(entry.held_out) if named else value < limit
                         for entry, value in zip(listing.entries, values, strict=True)])  # fmt: skip

    squares = SquaresInMemory(data.images_in_memory)

    def source(chosen: Sequence[bool] | npt.NDArray[Any], augment: AugmentSpec | None) -> ImageSource:
        side = (augment.crop_from if augment is not None else 0) or data.image_size
        skips = data.on_bad == "skip"
        look = ImageLook(data.image_size, side, augment, seed, data.normalise, skips, data.cache_images)
        return ImageSource(listing, np.flatnonzero(chosen), look, storage, squares)

    if held_out.all():
        raise DataError("no images are left", "the validation part took all of them", "lower validation_fraction")
    return source(~held_out, data.augment), source(held_out, None) if held_out.any() else None
