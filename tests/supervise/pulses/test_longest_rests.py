"""For how long a rest in a step lets further ones be as long: a window of steps, by phase."""

from __future__ import annotations

import itertools

import pytest
from supervise.pulses.watched_ranks import PATIENT, Ranks

from paceline.supervise.pulses.longest_rests import FEWEST_STEPS, LongestRests, counts_until
from paceline.supervise.pulses.silences import RESTS_FACTOR


def test_what_was_once_is_forgotten_when_as_many_steps_have_followed_as_were_before() -> None:
    for step in (1, 3, FEWEST_STEPS, 5 * FEWEST_STEPS):
        rests = LongestRests()
        rests.add("forward", step, 20.0)
        until = step + max(FEWEST_STEPS, step)
        assert rests.longest("forward", until) == 20.0 and rests.longest("reduce", until) == 0.0
        assert rests.longest("forward", until + 1) == 0.0


@pytest.mark.parametrize("every", [1, 7, 100, FEWEST_STEPS, 3333, 20_000])
@pytest.mark.parametrize("first", ["at a multiple", "anywhere"])
def test_what_comes_back_every_so_many_steps_is_remembered_when_it_does(every: int, first: str) -> None:
    """At multiples of any number, as an evaluation is; elsewhere where the number is no larger than the window."""
    if first == "anywhere" and every > FEWEST_STEPS:
        return
    for offset in (0,) if first == "at a multiple" else (1, every // 2 + 1, every + 3):
        rests = LongestRests()
        steps = [offset + every * number for number in range(1 - bool(offset), 20)]
        for before, step in itertools.pairwise(steps):
            rests.add("forward", before, 5.0)
            assert rests.longest("forward", step) == 5.0, (before, step)
            rests.add("forward", step, 0.01)  # shorter ones between, and after it
            rests.add("update", step, 50.0)


def test_the_longest_of_those_that_count_is_the_one_that_does() -> None:
    """Held against all rests, each with the steps for which it counts."""
    seen, rests = list[tuple[int, float]](), LongestRests()
    for step in range(1, 30_000, 37):
        seconds = (step * 7919 % 104_729) / 1000.0 / (1 + step // 500)
        rests.add("forward", step, seconds)
        seen.append((step, seconds))
        expected = max(each for at, each in seen if step <= counts_until(at))
        assert rests.longest("forward", step) == expected
    assert len(rests._kept["forward"]) < 100


def test_one_long_wait_for_a_compilation_makes_a_hang_take_longer_for_a_while_only(patient: Ranks) -> None:
    """Three times the wait was the limit for the rest of the run."""
    for rank in range(3):
        patient.beat(rank, "forward", 1)
    assert patient.pass_by(6.0) is None, "no limit in the first steps"
    for step in range(2, 5):
        for rank in range(3):
            patient.beat(rank, "reduce", step)
        assert patient.pass_by(0.5) is None

    def found(phase: str, step: int, seconds: float) -> bool:
        for rank in range(3):
            patient.beat(rank, "check" if rank != 1 else phase, step)
        suspect = patient.pass_by(seconds)
        return suspect is not None and suspect.ranks == (1,)

    soon = PATIENT.hang_still + 2.0
    assert not found("forward", 5, 0.9 * RESTS_FACTOR * 5.0), "it may come back soon"
    for rank in range(3):  # which was a rest of 13.5 s
        patient.beat(rank, "reduce", 5)
    assert patient.pass_by(0.5) is None
    assert found("forward", 5 + FEWEST_STEPS + 1, soon)


def test_a_wait_in_one_phase_says_nothing_of_another(patient: Ranks) -> None:
    for rank in range(3):
        patient.beat(rank, "forward", 1)
    assert patient.pass_by(20.0) is None
    for step in range(2, 5):
        for rank in range(3):
            patient.beat(rank, "reduce", step)
        assert patient.pass_by(0.5) is None
    for rank in range(3):
        patient.beat(rank, "check" if rank != 1 else "update", 5)
    suspect = patient.pass_by(PATIENT.hang_still + 2.0)
    assert suspect is not None and suspect.ranks == (1,)
