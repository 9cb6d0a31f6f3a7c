"""Ranks that do nothing, as the system tells: found in seconds where others can only wait, and not elsewhere."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import pytest
from supervise.pulses.watched_ranks import LATE, PATIENT, MakeRanks, Ranks, comes_to_step

from paceline.run.callbacks.callbacks import CallbackDecisions
from paceline.run.loop import between_steps
from paceline.run.loop.resume import Progress
from paceline.run.loop.training import Training
from paceline.run.survive.points import Points
from paceline.spec.survive.phases import AT_WORK
from paceline.supervise.pulses import sight

IN_TORCH = "/torch/distributed/c10d.py"


@pytest.mark.parametrize("phase", AT_WORK)
def test_one_that_does_nothing_in_a_step_is_named_in_seconds(patient: Ranks, phase: str) -> None:
    patient.steps()
    for rank in range(3):
        patient.beat(rank, "check" if rank != 1 else phase, 5)
    assert patient.pass_by(PATIENT.hang_still * 0.9) is None
    suspect = patient.pass_by(2.0)
    assert suspect is not None and suspect.ranks == (1,) and suspect.evidence["limit_seconds"] == PATIENT.hang_still
    assert "2.0 s is the limit of one that does nothing, as the system tells" in suspect.because


def test_one_that_does_nothing_wants_no_core_however_loaded_the_machine_is(make: MakeRanks) -> None:
    ranks = make(10.0, PATIENT)
    ranks.steps()
    for rank in range(3):
        ranks.beat(rank, "check" if rank != 1 else "forward", 5)
    suspect = ranks.pass_by(PATIENT.hang_still + 10.0 + 1.0)  # until it has answered, or could have
    assert suspect is not None and suspect.ranks == (1,)


def test_one_that_reads_data_or_makes_its_first_steps_may_wait_for_somebody(patient: Ranks) -> None:
    for rank in range(3):
        patient.beat(rank, "forward", 1)
    assert patient.pass_by(PATIENT.hang_minimum) is None
    patient.steps()
    patient.beat(1, "data", 5)
    assert patient.pass_by(PATIENT.hang_minimum * 0.9) is None
    assert patient.pass_by(LATE) is not None


def test_one_that_rests_in_each_step_is_given_the_time_that_it_needs(patient: Ranks) -> None:
    """Its objective asks a service, say, and waits in a lock for 1.5 s until a thread of it has the answer."""
    patient.steps()
    for step in range(5, 8):
        for rank in range(3):
            patient.beat(rank, "forward", step)
        assert patient.pass_by(1.5) is None
        for rank in range(3):
            patient.beat(rank, "reduce", step)
    for rank in range(3):
        patient.beat(rank, "forward", 8)
    assert patient.pass_by(1.5 * 2) is None, "twice as long as before"
    assert patient.pass_by(LATE) is not None


@pytest.mark.parametrize("works", [True, False])
def test_one_in_a_collective_is_not_blamed_while_who_is_as_far_is_at_work(
    patient: Ranks, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in shards are gathered in a pass: one waits there while another compiles something for half a minute."""
    patient.steps()
    compiles = os.getpid()
    monkeypatch.setattr(sight, "cpu_seconds", lambda process: patient.now if process == compiles and works else 0.0)
    sleeper = patient.process
    for rank in range(3):
        patient.process = compiles if rank == 1 and works else sleeper
        patient.beat(rank, "forward", 5)
        patient.stands_in[rank] = IN_TORCH if rank != 1 else "/home/me/model.py"
    found = patient.pass_by(2 * PATIENT.hang_minimum - 10)
    assert (found is None) if works else (found is not None and found.ranks == (1,))


def test_ranks_that_wait_for_each_other_between_steps_are_named_in_seconds(patient: Ranks) -> None:
    """Two wait for their peers before a step, and one has gone on into the step's reduction: nobody is behind."""
    patient.steps()
    for rank in (0, 1):
        comes_to_step(patient, rank)
    patient.beat(2, "reduce", 5)
    patient.stands_in[2] = IN_TORCH
    found = patient.pass_by(PATIENT.hang_minimum + 5)
    assert found is not None and found.ranks == (2,) and "reducing gradients over the ranks of step 5" in found.what


def test_ranks_of_one_place_in_different_collectives_are_told_so(patient: Ranks) -> None:
    patient.steps()
    for rank in range(3):
        patient.beat(rank, "forward", 5)
        patient.stands_in[rank] = IN_TORCH
    patient.collectives[1] = "barrier"
    suspect = patient.pass_by(PATIENT.hang_minimum + 5)
    assert suspect is not None and suspect.ranks == (0, 1, 2)
    assert "they wait in different collectives: ranks 0, 2 in all_gather; rank 1 in barrier" in suspect.because


def test_a_callback_of_the_users_may_wait_for_somebody(patient: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is called behind an update, and draws a page or asks a service in a thread of its own."""
    patient.steps()
    points = Points(SimpleNamespace(beat=functools.partial(patient.beat, 1)), None)  # type: ignore[arg-type]
    points.reached("update", 5)
    for rank in (0, 2):
        patient.beat(rank, "check", 5)

    def asks(hook: str, moment: object) -> CallbackDecisions:
        assert patient.pass_by(PATIENT.hang_minimum) is None
        return CallbackDecisions()

    calls = SimpleNamespace(has=lambda hook: True, at=asks)
    own = SimpleNamespace(
        _callbacks=calls, _points=points, brief=SimpleNamespace(steps=9), world=0, progress=Progress(4, 64),
        _under=SimpleNamespace(built=0), _stopped=False,
    )  # fmt: skip
    monkeypatch.setattr(between_steps, "moment_of", lambda *given, **more: None)
    Training._hook(own, "after_step", 5)  # type: ignore[arg-type]
    suspect = patient.pass_by(PATIENT.hang_still + 2)
    assert suspect is not None and suspect.ranks == (1,) and "updating the weights of step 5" in suspect.what


def test_when_all_wait_for_peers_that_are_there_nobody_comes(patient: Ranks) -> None:
    for rank in range(3):
        comes_to_step(patient, rank)
    assert patient.pass_by(PATIENT.hang_minimum * 0.9) is None
    found = patient.pass_by(5.0)
    assert found is not None and found.ranks == (0, 1, 2) and "between two steps" in found.what


def test_ranks_in_collectives_of_two_places_are_told_apart(patient: Ranks) -> None:
    """Two evaluate and wait there for the third, which waits in a step: it is the one that is elsewhere."""
    for rank in range(3):
        patient.beat(rank, "evaluate" if rank != 2 else "reduce", 5 + (rank == 2))
        patient.stands_in[rank] = IN_TORCH
    assert patient.pass_by(PATIENT.hang_minimum * 0.9) is None
    found = patient.pass_by(5.0)
    assert found is not None and found.ranks == (2,) and "peers wait in all_gather" in found.because
