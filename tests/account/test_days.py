"""Days that people name."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from paceline.account.days import day_of
from paceline.errors import ConfigError

DAY = datetime.date(2026, 11, 1)


@pytest.mark.parametrize("given", ["2026-11-01", DAY, datetime.datetime(2026, 11, 1, 12)])
def test_a_day_is_a_date_or_its_text(given: Any) -> None:
    assert day_of(given, "since") == DAY and type(day_of(given, "since")) is datetime.date


@pytest.mark.parametrize("given", ["1st of May", "2026-13-01", 7, True, ["2026-11-01"]])
def test_what_is_no_day_is_told(given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        day_of(given, "since")
    assert "since = " in caught.value.what and "2026-11-01" in caught.value.try_


def test_no_day_is_none() -> None:
    assert day_of(None, "since") is None
