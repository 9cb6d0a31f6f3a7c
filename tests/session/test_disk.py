"""A disk without room for a checkpoint is told with the price, before anything is computed."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from paceline.plan.planned import plan_task
from paceline.session.ready.brief import confirm_and_price
from paceline.session.ready.disk import disk_lines
from paceline.spec.load import parse_spec

SPEC = """
[task]
model = "llama-1m"
data = { source = "stdlib", seq_len = 64 }
global_batch = "8 samples"
stop = "2 steps"
[cluster]
probe = false
devices = 1
[run]
dir = "%s"
"""
Usage = namedtuple("Usage", "total used free")


def test_no_room_for_a_checkpoint_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_task(parse_spec(SPEC % (tmp_path / "runs" / "mine"), "x.toml"))
    needed = 12 * planned.profile.trained_parameters  # fp32 weights and two moments
    asked: list[Path] = []

    def usage(total: int, free: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or Usage(total, 0, free))

    usage(10**12, needed)
    assert disk_lines(planned) == []
    usage(0, 0)
    assert disk_lines(planned) == [], "a file system that says nothing"
    usage(10**12, needed - 1)
    told: list[str] = []
    confirm_and_price(planned, told.append)
    assert "a checkpoint takes about" in " ".join(told) and "another run.dir" in " ".join(told)
    assert set(asked) == {tmp_path}, "the folder that is there"
