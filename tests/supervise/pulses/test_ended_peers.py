"""A world of which some ranks have ended with code 0: who of the others hangs, and who is merely late to end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from runs import wait_until
from supervise.pulses.watched_ranks import HEALTH, LATE, PATIENT, MakeRanks, Ranks, comes_to_step

from paceline.patience import Patience
from paceline.supervise.blame import outcome_of
from paceline.supervise.crew import Crew, attend
from paceline.supervise.pulses import sight
from paceline.supervise.pulses.system import ThreadSeen, state_of
from paceline.supervise.pulses.watch import PulseWatch, Suspect

IN_TORCH = "/torch/distributed/c10d.py"


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks be at work, as the system tells."""
    monkeypatch.setattr(sight, "threads_of", lambda process: [ThreadSeen(process, "R", 1)])


def test_one_that_hangs_in_a_step_is_named_though_a_peer_has_ended(patient: Ranks) -> None:
    patient.steps()
    for rank, phase in enumerate(("ended", "forward", "ended")):
        patient.beat(rank, phase, 5)
    suspect = patient.pass_by(PATIENT.hang_still + 2.0, ended=[0])
    assert suspect is not None and suspect.ranks == (1,) and not suspect.have_left
    assert suspect.what == "rank 1 of 3 hung in the forward and backward passes of step 5"
    assert {each["rank"] for each in suspect.evidence["ranks"]} == {1, 2}


@pytest.mark.parametrize("phase", ["save", "loop", "evaluate", "check"])
def test_what_may_take_long_may_do_so_when_peers_have_ended(make: MakeRanks, phase: str) -> None:
    """The last save, or what a user's callback does at the end: as long as before."""
    ranks = make()
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, phase if rank == 0 else "ended", 5)
    assert ranks.pass_by(HEALTH.hang_elsewhere * 0.9, ended=[1, 2]) is None
    suspect = ranks.pass_by(LATE, ended=[1, 2])
    assert suspect is not None and suspect.ranks == (0,) and not suspect.have_left


@pytest.mark.parametrize("ended", [(), (1,), (1, 2)])
@pytest.mark.usefixtures("at_work")
def test_what_follows_the_run_may_take_as_long_as_it_works(make: MakeRanks, ended: Collection[int]) -> None:
    """An export of the user's took ten minutes, and was ended as a hang of the run, which was over."""
    ranks = make()
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, "ended", 5)
    assert ranks.pass_by(4 * HEALTH.hang_elsewhere, ended) is None


@pytest.mark.usefixtures("at_work")
def test_one_that_has_left_its_loop_alone_is_behind_the_others(make: MakeRanks) -> None:
    ranks = make()
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, "ended" if rank == 1 else "reduce", 4 if rank == 1 else 5)
    if ranks.nodes:  # rank 1 is on a machine of its own here, where nobody sees that the others go on
        return
    assert ranks.pass_by(HEALTH.hang_elsewhere * 0.9) is None
    suspect = ranks.pass_by(LATE)
    assert suspect is not None and suspect.ranks == (1,)


@pytest.mark.parametrize("ended", [(), (1, 2)])
def test_one_that_does_nothing_after_the_run_hangs(make: MakeRanks, ended: Collection[int]) -> None:
    """In a lock, as a library may that waits at the end for a thread which has gone."""
    ranks = make()
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, "ended", 5)
    assert ranks.pass_by(HEALTH.hang_elsewhere * 0.9, ended) is None
    suspect = ranks.pass_by(LATE, ended)
    assert suspect is not None and 0 in suspect.ranks and "hung after its last step of step 5" in suspect.what


def test_one_that_is_stopped_after_the_run_is_named_in_seconds(make: MakeRanks) -> None:
    ranks = make()
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, "ended", 5)
    with subprocess.Popen(["sleep", "1000"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(stopped.pid) == "T")
        ranks.process = stopped.pid
        ranks.beat(2, "ended", 5)
        suspect = ranks.pass_by(LATE, ended=[0])
        stopped.kill()
    assert suspect is not None and suspect.ranks == (2,)


@pytest.mark.parametrize("where", ["collective", "meet"])
def test_those_that_have_ended_are_to_blame_where_the_others_wait_for_them(patient: Ranks, where: str) -> None:
    """NCCL does not tell that a peer has gone, and a store never does."""
    patient.steps()
    for rank in (0, 2):
        if where == "meet":
            comes_to_step(patient, rank)
        else:
            patient.beat(rank, "reduce", 5)
            patient.stands_in[rank] = IN_TORCH
    assert patient.pass_by(PATIENT.hang_still * 0.9, ended=[1]) is None
    suspect = patient.pass_by(PATIENT.hang_minimum + 5.0, ended=[1])
    assert suspect is not None and suspect.ranks == (1,) and suspect.have_left
    assert suspect.what == "rank 1 of 3 ended with code 0 before its peers were done"
    assert "ranks 0, 2 waited" in suspect.because and "something called exit" in suspect.because


class Finds(PulseWatch):
    """Finds at its second look that rank 0 has left, and is waited for."""

    looks = 0

    def look(self, now: float, ended: Collection[int] = (), has_failed: bool = False) -> Suspect | None:
        self.looks += bool(ended)
        found = Suspect((0,), "rank 0 of 2 ended with code 0 before its peers were done", "why", 1.0, {}, True)
        return found if self.looks == 2 else None


def test_a_rank_that_is_waited_for_has_failed_though_it_ended_with_code_0(tmp_path: Path) -> None:
    programs = ("pass", "import signal; signal.pause()")
    crew = Crew([subprocess.Popen([sys.executable, "-ISc", each], process_group=0) for each in programs])
    attend(crew, Patience(60.0), 0.1, pulses=Finds(tmp_path, 2, HEALTH))
    for process in crew.processes:
        process.wait()
    outcome = outcome_of(crew.ended(), crew.killed, tmp_path, None)
    assert crew.endings[0].is_early and crew.killed == {1} and outcome.exit_code == 1
    assert outcome.error is not None and (outcome.error["rank"], outcome.error["because"]) == (0, "why")
