"""How threads wait: chosen before torch is loaded, in every process that computes, and never against the user.

What heaps join is told to the same processes (test_heap.py), and looked for in what these are told.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

from paceline.cluster.here.heap import HEAP_VARIABLE, joined_heap
from paceline.cluster.here.prepare import told_waiting
from paceline.cluster.here.waiting import CHOSEN_BY_USER, SPIN_TURNS, SPIN_VARIABLE, waiting
from paceline.supervise.standby import Standby
from paceline.supervise.supervisor import supervise

TELL = """
import os, sys
open(sys.argv[1], 'w').write(os.environ.get('GOMP_SPINCOUNT', 'none') + ' ' + os.environ.get('GLIBC_TUNABLES', 'none'))
"""
HEAP = joined_heap({}).get(HEAP_VARIABLE, "none")


def unchosen(**chosen: str) -> dict[str, str]:
    """Return the environment of a command where the user has chosen this alone."""
    left = {name: value for name, value in environment().items() if name not in (*CHOSEN_BY_USER, HEAP_VARIABLE)}
    return {**left, **chosen}


@pytest.mark.parametrize("name", CHOSEN_BY_USER)
def test_what_the_user_has_chosen_stays(name: str) -> None:
    assert waiting({name: ""}) == {} and waiting({"OMP_NUM_THREADS": "4"}) == {SPIN_VARIABLE: str(SPIN_TURNS)}


@pytest.mark.parametrize(
    "chosen, told",
    [({}, str(SPIN_TURNS)), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "none")],
)
def test_ranks_are_started_with_it(tmp_path: Path, chosen: dict[str, str], told: str) -> None:
    out = tmp_path / "told"
    assert supervise([sys.executable, "-c", TELL, str(out)], 1, unchosen(**chosen)).exit_code == 0
    assert out.read_text().split() == [told, HEAP]


def test_the_process_that_forks_ranks_has_it_before_it_loads_torch(tmp_path: Path) -> None:
    tell = f"import sys\nsys.argv[1] = {str(tmp_path / 'told')!r}\n{TELL}"
    (tmp_path / "standby_that_tells.py").write_text(tell)
    standby = Standby("standby_that_tells", "worker", unchosen(PYTHONPATH=str(tmp_path)))
    assert not standby.is_ready(), "it ends at once"
    standby.close()
    assert (tmp_path / "told").read_text().split() == [str(SPIN_TURNS), HEAP]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import paceline; paceline.Run", str(SPIN_TURNS)),
        ("import paceline; paceline.fit", str(SPIN_TURNS)),
        ("import paceline; paceline.Task", "None"),  # which loads no torch
        ("import torch, paceline; paceline.Run", "None"),  # too late, which the journal says
    ],
)
def test_a_script_that_trains_by_itself_has_it(script: str, told: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", f"{script}; import os; print(os.environ.get('{SPIN_VARIABLE}'))"],
        capture_output=True, text=True, check=True, env=unchosen(PATH=os.environ["PATH"]),
    ).stdout  # fmt: skip
    assert printed.split() == [told]


def test_libgomp_takes_it_as_a_number_of_turns() -> None:
    """OMP_DISPLAY_ENV has the library print what it has understood."""
    shown = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, check=True,
        env={**unchosen(**waiting({})), "OMP_DISPLAY_ENV": "verbose", "PATH": os.environ["PATH"]},
    ).stderr  # fmt: skip
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("the OpenMP of this torch is not GNU's")
    assert f"GOMP_SPINCOUNT = '{SPIN_TURNS}'" in shown


def test_the_journal_is_told_where_several_threads_compute() -> None:
    (told,) = told_waiting(2, waiting({}))
    assert (told.what, told.after) == (SPIN_VARIABLE, str(SPIN_TURNS)) and "another program" in told.because
    assert told_waiting(1, waiting({})) == [] == told_waiting(2, {SPIN_VARIABLE: "7"})
    (late,) = told_waiting(2, {})
    assert late.after is None and f"start python with {SPIN_VARIABLE}={SPIN_TURNS}" in late.because
