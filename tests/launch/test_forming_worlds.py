"""A rank that dies while its world forms costs those that are left nothing: they form the next, with their state."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from runs import (
    STARTED,
    ending,
    environment,
    is_running,
    ranks_of,
    records_of,
    steps_of,
    wait_for_step,
    wait_until,
    write_spec,
)
from started.popen import Warm

SCRIPT = """
import os, signal, sys
from pathlib import Path

dies = Path(sys.argv[2])
if os.environ.get("RANK") == sys.argv[3] and dies.exists():
    dies.unlink()
    os.kill(os.getpid(), signal.SIGKILL)

import paceline

run = paceline.Run(sys.argv[1], overrides=sys.argv[4:])
for batch in run:
    run.step(batch)
"""


@pytest.mark.parametrize(("plan", "ranks", "dying"), [("dp_shard = 2", 3, 2), ("dp_replicate = 2", 2, 1)])
def test_a_rank_that_dies_before_it_comes_costs_its_peers_neither_state_nor_process(
    tmp_path: Path, plan: str, ranks: int, dying: int
) -> None:
    """Two ranks of shards grow to three, and one of two copies is replaced: the new rank dies at its first start."""
    run_dir, devices, dies = tmp_path / "forming", tmp_path / "devices", tmp_path / "dies"
    spec = write_spec(tmp_path, run_dir, 2, plan, steps=100_000)
    devices.write_text("2")
    (tmp_path / "script.py").write_text(SCRIPT)
    changes = (f"run.recovery.devices_file={devices}", "run.recovery.worth=none", "run.recovery.max_devices=3",
               "run.checkpoint_every=none")  # fmt: skip
    words = [sys.executable, str(tmp_path / "script.py"), str(spec), str(dies), str(dying), *changes]
    process = Warm(words, stdout=-1, stderr=-1, text=True, env=environment(), cwd=tmp_path, process_group=0)
    STARTED.append(process)
    wait_for_step(run_dir, 3, process)
    dies.touch()
    if ranks == 2:
        os.kill(ranks_of(process.pid)[dying], signal.SIGKILL)
    devices.write_text(str(ranks))
    wait_until(lambda: len(records_of(run_dir, "recovery")) >= 1 or process.poll() is not None)
    wait_for_step(run_dir, steps_of(run_dir)[-1]["step"] + 3, process)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = ending(process, 120)
    assert process.returncode == 75, stderr
    assert not dies.exists() and f"rank {dying} of {ranks} was ended by SIGKILL" in stdout, stdout
    (recovery,) = records_of(run_dir, "recovery")
    assert (recovery["rung"], recovery["to_world"], recovery["steps_lost"]) == ("reform", ranks, 0), stdout
    found = [step["step"] for step in steps_of(run_dir)]
    assert found == list(range(1, len(found) + 1))
    replanned = [each["because"] for each in records_of(run_dir, "decision") if each["what"] == "replan"]
    told = [because for because in replanned if because.startswith("for 3 devices")]
    assert len(told) == ranks - 2, "of the world that fell"
    assert len(records_of(run_dir, "run_started")) == 1, "by the rank that records, which stays"


KILLS_ITS_SUPERVISOR = SCRIPT.replace("    os.kill(os.getpid(), signal.SIGKILL)",
                                      "    os.kill(os.getppid(), signal.SIGKILL)\n    sys.exit()")  # fmt: skip


@pytest.mark.deep
def test_ranks_whose_supervisor_is_killed_while_it_forms_a_world_end(tmp_path: Path) -> None:
    """The rank that is left has come to meet one that never will, and nobody is there to say so."""
    run_dir, dies = tmp_path / "alone", tmp_path / "dies"
    spec = write_spec(tmp_path, run_dir, 2, "dp_replicate = 2", steps=100_000)
    (tmp_path / "script.py").write_text(KILLS_ITS_SUPERVISOR)
    words = [sys.executable, str(tmp_path / "script.py"), str(spec), str(dies), "1", "run.recovery.standby=false"]
    process = Warm(words, stdout=-1, stderr=-1, text=True, env=environment(), cwd=tmp_path, process_group=0)
    STARTED.append(process)
    wait_for_step(run_dir, 3, process)
    ranks = ranks_of(process.pid)
    dies.touch()
    os.kill(ranks[1], signal.SIGKILL)
    wait_until(lambda: process.poll() is not None)
    assert not dies.exists()
    wait_until(lambda: not is_running(ranks[0]), timeout=30)
