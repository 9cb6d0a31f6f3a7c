"""What stands where a pipeline stage has no module: whatever comes in goes out."""

from __future__ import annotations

from typing import Any

from torch import nn


class Absent(nn.Module):
    """Takes the place of a module that another pipeline stage has. It holds nothing and hands its first input on."""

    def forward(self, x: object, *args: object, **kwargs: object) -> Any:
        """Return the first input as it is."""
        return x
