"""The leak watch tells of what grows at every look, and of nothing else."""

from __future__ import annotations

import math

from paceline.run.memory.leaks import LOOKS, LeakWatch, MemoryGrowth

MB = 1 << 20


def looks(watch: LeakWatch, rest: list[float], weights: float = 900.0) -> list[MemoryGrowth]:
    """Return what is told of looks after every hundredth step; sizes are in MiB."""
    found = [
        watch.look(100 * (at + 1), {"weights": weights * MB, "the rest": each * MB}) for at, each in enumerate(rest)
    ]
    return [each for each in found if each is not None]


def test_what_grows_at_every_look_is_told_once_and_again_when_it_has_doubled() -> None:
    found = looks(LeakWatch(2000 * MB), [0, *(100 + 20 * look for look in range(12))])
    assert [each.component for each in found] == ["the rest", "the rest"]
    assert found[0].bytes == 20 * LOOKS * MB and math.isclose(found[0].bytes_per_step, 0.2 * MB)
    assert found[0].since == 200 and math.isclose(found[0].steps_left, (2000 - 900 - 200) / 0.2)
    assert "names the tensors" in found[0].because and "fills the memory in about 4,500 steps" in found[0].because


def test_a_leak_that_goes_on_is_told_ever_more_rarely() -> None:
    """At an even pace it was told at every sixth look for as long as the run lived."""
    found = looks(LeakWatch(), [0, *(100.0 + 20 * look for look in range(200))])
    assert 5 <= len(found) <= 6, "at 100, 200, 400, 800, 1600 and 3200 MiB"


def test_memory_that_a_trace_takes_is_no_leak() -> None:
    """The profiler's own, in the first ten steps, was told as a leak that fills the machine in 902 steps."""
    watch = LeakWatch()
    found = []
    for at in range(30):
        if at % 5 == 3:
            watch.begin_anew()
        found.append(watch.look(at, {"the rest": (100.0 + 20 * at) * MB}))
    assert found == [None] * 30
    assert looks(watch, [0, *(900.0 + 20 * look for look in range(LOOKS + 1))]), "it looks on"


def test_what_falls_once_or_grows_little_is_no_leak() -> None:
    sawtooth = [100 + 40 * (look % 4) for look in range(20)]
    assert looks(LeakWatch(), [0, *map(float, sawtooth)]) == []
    assert looks(LeakWatch(), [0, *(100 + 0.1 * look for look in range(20))]) == [], "less than is worth a word"
    assert looks(LeakWatch(), [0, *([100.0] * 20)]) == []
    warm_up = [0.0, 50.0, 90.0, 100.0, 101.0, *([101.0] * 15)]
    assert looks(LeakWatch(), warm_up) == [], "pools that fill at the beginning"
    slower = [0.0, *(100 + 40 * (1 - 0.6**look) for look in range(20))]
    assert looks(LeakWatch(), slower) == [], "and fill for longer: the built-in example was told to leak after 7 steps"


def test_the_first_steps_tell_of_no_leak_and_their_pace_is_by_step() -> None:
    """Ranks are looked at after every one of the first ten steps, and seldom then."""
    steps = [*range(501, 511), 600, 700, 800, 900, 1000, 1100]
    watch = LeakWatch()
    found = [(step, watch.look(step, {"the rest": (900 + step) * MB})) for step in steps]
    (told,) = ((step, each) for step, each in found if each is not None)
    assert told[0] == 1100 and told[1].since == 600 and told[1].bytes_per_step == MB


def test_an_unknown_size_promises_no_end() -> None:
    (found,) = looks(LeakWatch(math.nan), [0, *(100 + 20 * look for look in range(LOOKS + 1))])
    assert not math.isfinite(found.steps_left) and "fills" not in found.because
