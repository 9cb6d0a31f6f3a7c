"""The reference's own way to choose among candidates gives what the run's gives, on any losses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.task.data.order import chosen
from paceline.verify.reference.plain_selection import chances_of, drawn

LOSSES = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=2, max_size=24)


@given(losses=LOSSES, part=st.floats(0.05, 0.9), even=st.floats(0.01, 1.0), start=st.integers(0, chosen.ONE - 1))
def test_chances_and_draws_are_the_runs(losses: list[float], part: float, even: float, start: int) -> None:
    count = max(1, int(part * len(losses)))
    units, plain = chosen.chances(np.array(losses), count, even), chances_of(losses, count, even)
    assert np.array(plain) == pytest.approx(units / chosen.ONE, rel=1e-9, abs=len(losses) / chosen.ONE)
    ends = np.cumsum(units) - start
    if np.min(np.abs(ends % chosen.ONE)) > 2 * len(losses) and np.max(ends % chosen.ONE) < chosen.ONE - 2 * len(losses):
        assert drawn(plain, start / chosen.ONE) == chosen.drawn(units, start).tolist()
