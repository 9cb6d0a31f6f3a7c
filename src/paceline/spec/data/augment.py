"""AugmentSpec: the `[task.data.augment]` table of a spec. What is drawn anew whenever an image is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option


@dataclass(frozen=True)
class AugmentSpec(Declared, table="task.data.augment"):
    """Random crops, flips and colours of images; the numbers are drawn by the seed and an image's position."""

    crop_from: int = option(
        0, "pixels of a side of the square that crops are taken from; 0 is image_size", minimum=0, maximum=16384
    )
    crop_share: float = option(
        1.0, "smallest share of the square's area that a crop has; crops are scaled to image_size", above=0.0,
        maximum=1.0,
    )  # fmt: skip
    crop_stretch: float = option(
        1.0, "one side of a crop is at most so many times as long as the other", minimum=1.0, maximum=4.0
    )
    flip: bool = option(False, "mirror every other image, left to right, by chance")
    brightness: float = option(0.0, "brightness changes by up to this share", minimum=0.0, maximum=1.0)
    contrast: float = option(0.0, "contrast changes by up to this share", minimum=0.0, maximum=1.0)
    saturation: float = option(0.0, "saturation changes by up to this share", minimum=0.0, maximum=1.0)

    @property
    def draws(self) -> bool:
        """Whether anything is drawn."""
        return self != AugmentSpec(crop_from=self.crop_from)
