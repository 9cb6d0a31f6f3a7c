"""`prepare` killed by SIGKILL at any touch of a file, again and again: what is there in the end are the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.spec.task import DataSpec
from paceline.task.data.prepare.prepare import prepare

PART = 700
TOUCHES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


def write_corpus(folder: Path) -> DataSpec:
    """Write documents of which some are twice there, in several parts."""
    folder.mkdir()
    generator = random.Random(5)
    for number in range(3):
        lines = [json.dumps({"text": f"row {generator.randrange(30)} " * generator.randrange(1, 9)}) for _ in range(20)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return DataSpec(str(folder), validation_fraction=0.2, tokenizer="bytes")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def ended_at(touch: int) -> Iterator[None]:
    """End this process as SIGKILL does at its n-th touch of a file."""
    left = touch

    def look(event: str, given: object) -> None:
        nonlocal left
        if event in TOUCHES:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    yield


def killed(spec: DataSpec, out: Path, dedup: bool, touch: int) -> bool:
    """Prepare in a process that is killed at a touch; return whether it was, and did not finish before."""
    child = os.fork()  # of a test's process: what has to be quick is that there are many of them
    if not child:
        code = 1
        try:
            with ended_at(touch):
                prepare(spec, out, dedup=dedup, part_bytes=PART)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "it fails where it goes on"
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(("dedup", "stride"), [
    (True, 60), pytest.param(False, 9, marks=pytest.mark.deep), pytest.param(True, 9, marks=pytest.mark.deep),
])  # fmt: skip
def test_a_preparation_that_is_killed_anywhere_ends_in_the_same_bytes(tmp_path: Path, dedup: bool, stride: int) -> None:
    spec = write_corpus(tmp_path / "text")
    prepare(spec, tmp_path / "whole", dedup=dedup, part_bytes=PART)
    whole, touch, kills = content(tmp_path / "whole"), 0, 0
    assert len(whole) > 5
    generator = random.Random(dedup)
    while True:
        touch += generator.randrange(1, 2 * stride)
        out = tmp_path / f"killed-{touch}"
        if not killed(spec, out, dedup, touch):
            break
        kills += 1
        if out.exists():
            for _ in range(2):  # and where it goes on, too
                killed(spec, out, dedup, generator.randrange(1, 60))
        prepare(spec, out, dedup=dedup, part_bytes=PART)
        assert content(out) == whole, f"killed at touch {touch}"
    assert kills > 2
