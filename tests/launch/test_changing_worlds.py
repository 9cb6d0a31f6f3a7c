"""A storm in which the number of devices changes again and again: one experiment throughout, every sample once."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from rounding import assert_curves_close
from runs import ending, paceline, ranks_of, records_of, start, steps_of, wait_for_step, wait_until, write_spec

MOST, FEWEST = 4, 2
LONG = 100_000  # steps of a run that is stopped when its storm is over
# How many steps a storm lasts goes with the machine: at 3e-3 what rounding explains grew tenfold in 70 of them.
RATE = ("--set", "task.optimizer.lr=1e-4")


def storm(run_dir: Path, devices: Path, number: int, seed: int) -> Counter[str]:
    """Kill ranks, take devices away and give them back, so many times in all; return how often each was done."""
    drawn, done = random.Random(seed), Counter[str]()
    changes = (f"run.recovery.devices_file={devices}", "run.recovery.worth=none", f"task.stop={LONG} steps",
               f"run.recovery.min_devices={FEWEST}", "run.log_every=1000 steps")  # fmt: skip
    # Nobody reads what is printed until the end; it waits in memory, and fewer lines leave the storm its cores.
    spec = write_spec(run_dir.parent, run_dir, MOST, precision="fp64")
    process = start("train", spec, *RATE, *(word for change in changes for word in ("--set", change)))
    wait_for_step(run_dir, 3, process)
    there = MOST
    for count in range(1, number + 1):
        wanted = drawn.choice([each for each in range(FEWEST, MOST + 1) if each != there] + [there])
        what = "grown" if wanted > there else "shrunk" if wanted < there else "killed"
        devices.write_text(str(wanted))
        if what != "grown":
            victims = ranks_of(process.pid)
            os.kill(victims[drawn.choice(sorted(victims))], signal.SIGKILL)
        wait_until(lambda count=count: len(records_of(run_dir, "recovery")) >= count or process.poll() is not None)
        assert process.poll() is None, ending(process, 60)
        there, done[what] = wanted, done[what] + 1
        wait_for_step(run_dir, steps_of(run_dir)[-1]["step"] + drawn.randrange(1, 4), process)
        wait_until(lambda there=there: len(ranks_of(process.pid)) == there)
    process.send_signal(signal.SIGTERM)
    _, stderr = ending(process, 120)
    assert process.returncode == 75, stderr
    return done


@pytest.mark.deep
def test_a_run_comes_through_changing_worlds(tmp_path: Path) -> None:
    run_dir, devices, number = tmp_path / "stormy", tmp_path / "devices", 40
    devices.write_text(str(MOST))
    done = storm(run_dir, devices, number, seed=5)
    assert min(done.values()) >= 5 and set(done) == {"grown", "shrunk", "killed"}
    worlds = [(record["from_world"], record["to_world"]) for record in records_of(run_dir, "recovery")]
    assert len(worlds) == number and {size for pair in worlds for size in pair} == set(range(FEWEST, MOST + 1))
    found = steps_of(run_dir)
    last = found[-1]["step"]
    assert [step["step"] for step in found] == list(range(1, last + 1))
    spec = write_spec(tmp_path, tmp_path / "calm", 1, steps=last, precision="fp64")
    calm = paceline("train", spec, *RATE, timeout=600)
    assert calm.returncode == 0, calm.stderr
    expected = steps_of(tmp_path / "calm")
    assert [step["sample_ids"] for step in found] == [step["sample_ids"] for step in expected]
    assert_curves_close([step["loss"] for step in found], [step["loss"] for step in expected])
    print(f"{dict(done)}, {last} steps, {Counter(record['rung'] for record in records_of(run_dir, 'recovery'))}")
