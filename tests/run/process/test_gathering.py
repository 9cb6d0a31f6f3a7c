"""Ranks that come together before a world is made: who waits is told by a word, and by the end of its supervisor."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.run.process.gathering import come_together
from paceline.supervise import parent

LONG = timedelta(hours=1)


def test_who_waits_for_a_rank_is_told_that_one_has_gone(tmp_path: Path) -> None:
    (tmp_path / "abort").touch()
    with pytest.raises(dist.DistError, match="a rank of the world has gone"):
        come_together(dist.HashStore(), 2, tmp_path / "abort", LONG)


def test_nobody_waits_for_ranks_of_a_supervisor_that_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it formed a world, it has told nobody; the rank that came first waited for ten minutes."""
    monkeypatch.setattr(parent, "_PARENT", [os.getppid()])
    come_together(dist.HashStore(), 1, tmp_path / "abort", LONG)
    monkeypatch.setattr(parent, "_PARENT", [os.getpid()])  # as if another process had this one since
    with pytest.raises(dist.DistError, match="the supervisor has gone"):
        come_together(dist.HashStore(), 2, tmp_path / "abort", LONG)
