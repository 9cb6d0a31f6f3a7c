"""Plans are made here as for the newest torch, whichever is installed: what an older one lacks has tests of its own."""

from __future__ import annotations

import pytest

from paceline.plan.feasible import torch_version


@pytest.fixture(autouse=True)
def newest_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no plan refused for the installed torch."""
    monkeypatch.setattr(torch_version, "installed_torch", lambda: None)
