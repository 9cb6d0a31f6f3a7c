"""Compiled blocks on a CPU for which torch's compiler makes no code: refused, with the way out."""

from __future__ import annotations

import platform

import pytest
import torch
from tests_shared import SEQ_LEN, decoder_task, plan_of

from paceline.errors import ConfigError
from paceline.run.assemble import assemble
from paceline.run.process.world import join_world
from paceline.spec.layout import Layout


@pytest.mark.parametrize(("machine", "vectors", "refused"), [
    ("x86_64", "DEFAULT", True), ("AMD64", "DEFAULT", True), ("x86_64", "AVX2", False), ("aarch64", "DEFAULT", False),
])  # fmt: skip
def test_a_cpu_without_vectors_compiles_nothing(
    machine: str, vectors: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: vectors)
    task, plan, world = decoder_task(), plan_of(Layout(), compile=True), join_world("cpu")
    if refused:
        with pytest.raises(ConfigError, match="without vector instructions"):
            assemble(task, plan, world, task.data, SEQ_LEN)
    else:
        assert assemble(task, plan, world, task.data, SEQ_LEN).stepper.plan.compile
