"""The devices of tests that a GPU must pass: each runs on the CPU too, so that what it states is true of the code.

`make test-cuda` runs those on a GPU; without one they are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest

DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
on_every_device = pytest.mark.parametrize("device", DEVICES)
