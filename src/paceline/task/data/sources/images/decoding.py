"""From the bytes of an image to a square of pixels: upright, three channels of 8 bits, its middle."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import DamagedData
from paceline.task.data.sources.images.listing import ImageEntry

FORMAT = 2  # raise it where the same bytes give other pixels; 2: upright by EXIF, 16 bits scaled and not clipped
LONGEST = 16  # times the shorter side, beyond which an image is cut before it is scaled
WITHOUT_RANGE = ("I", "F")
OF_16_BITS = ("PNG", "PPM")  # whose numbers Pillow may hold in 32 bits


def decoded(content: bytes, entry: ImageEntry, size: int) -> npt.NDArray[np.uint8]:
    """Return the middle of an image of these bytes: uint8 [size, size, 3].

    It is turned as its EXIF data say, transparency is dropped, of several frames the first is taken, and of 16 bits the
    upper 8. Raises DamagedData where it cannot be decoded, or its pixels are numbers without a black and a white.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            return _square(ImageOps.exif_transpose(_in_colours(image)), size)
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        # as Pillow's decoders raise
        told = "they are no image that Pillow knows" if isinstance(error, UnidentifiedImageError) else error
        raise DamagedData(
            f"the image {entry.name} cannot be decoded",
            f"its bytes {entry.start:,} to {entry.start + entry.size:,}, of CRC-32 {zlib.crc32(content):08x}: {told}",
            'copy it again, or train without it: task.data.on_bad = "skip"',
        ) from error


def _in_colours(image: Any) -> Any:
    """Return an image with three channels of 8 bits. Raises ValueError where its numbers say no brightness."""
    from PIL import Image

    wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format in OF_16_BITS)
    if image.mode in WITHOUT_RANGE and not wide:
        raise ValueError(f"its pixels are of mode {image.mode}, numbers of 32 bits without a black and a white")
    if not wide:
        return image.convert("RGB")
    gray = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
    gray.info = image.info  # which says how it is turned
    return gray.convert("RGB")


def _square(image: Any, size: int) -> npt.NDArray[np.uint8]:
    """Return the middle of an image, [size, size, 3], scaled until its shorter side is `size`."""
    from PIL import Image

    shorter, longer = min(image.size), max(image.size)
    if longer > LONGEST * shorter:  # scaled as a whole it would take memory for what is cut off again
        kept = [min(side, LONGEST * shorter) for side in image.size]
        corner = [(side - part) // 2 for side, part in zip(image.size, kept, strict=True)]
        image = image.crop((*corner, corner[0] + kept[0], corner[1] + kept[1]))
    wide, high = (max(size, round(side * size / shorter)) for side in image.size)
    left, top = (wide - size) // 2, (high - size) // 2
    scaled = image.resize((wide, high), Image.Resampling.BILINEAR)
    return np.asarray(scaled.crop((left, top, left + size, top + size)), dtype=np.uint8)
