"""What `paceline plan` loads: a plan is to come at once, so what its answer does not need stays on the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAN = """
import sys
from paceline.cli.main import main
assert main(sys.argv[1:]) == 0
print("loaded", *sys.modules)
"""
# Libraries that take as long as the rest of a plan, and rooms that only other answers or other data need.
UNNEEDED = (
    "torch", "sklearn", "urllib.request", "http.client", "tarfile",
    "paceline.cluster.grid.watttime", "paceline.session.measure", "paceline.supervise.supervisor",
    "paceline.launch.worker", "paceline.plan.explain.compare_clusters", "paceline.plan.placement.grouped",
    "paceline.plan.risk.sensitivity", "paceline.task.data.sources.tables.store",
    "paceline.task.data.sources.images.source", "paceline.spec.journal.kinds", "paceline.cluster.probe.probe",
)  # fmt: skip


@pytest.mark.parametrize("more", [[], ["--explain"]], ids=["headline", "explained"])
def test_a_plan_loads_no_torch_and_no_room_of_other_answers(tmp_path: Path, more: list[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A paceline is a line of riders who share the work.\n" * 400)
    given = [f"task.data.source={text}", "task.data.seq_len=64", "task.global_batch=8 samples", "task.model=llama-1m",
             "cluster.device=h100-sxm", "cluster.devices=8"]  # fmt: skip
    command = [sys.executable, "-c", PLAN, "plan", *more, *(word for one in given for word in ("--set", one))]
    done = subprocess.run(command, capture_output=True, text=True, check=True,
                          env={"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})  # fmt: skip
    loaded = set(done.stdout.rpartition("loaded ")[2].split())
    assert "paceline.plan.planned" in loaded and "plan     " in done.stdout
    unneeded = {name for name in UNNEEDED if not (more and name == "paceline.plan.risk.sensitivity")}
    assert not unneeded & loaded
