"""ResNet-50 as published (He et al. 2015, arXiv:1512.03385, table 1), for the page of published cases."""

from __future__ import annotations

from torch import Tensor, nn

PARAMETERS = 25_557_032  # of the released model
MULTIPLY_ADDS = 4.09e9  # of one image of 224 x 224, with the stride in the 3 x 3 convolution


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; the middle one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        changes = stride > 1 or inputs != outputs
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if changes
            else nn.Identity()
        )
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """Return the block's output for images (batch, channels, height, width)."""
        return self.relu(self.body(images) + self.shortcut(images))


class ResNet50(nn.Module):
    """Stem, sixteen blocks in four stages, mean over positions, and the classifier of 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], 64
        for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for index in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if index == 0 and width > 64 else 1))
                inputs = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (batch, 1000) of images (batch, 3, height, width)."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=(2, 3)))
