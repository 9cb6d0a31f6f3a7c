"""Days that people name: those of a bill."""

from __future__ import annotations

import datetime
from typing import Any

from paceline.config.values import literal
from paceline.errors import ConfigError


def day_of(given: Any, name: str) -> datetime.date | None:
    """Return the day that a date, or a text such as "2026-11-01", is; None of None. Raises ConfigError for no day.

    `name` is the argument or option that it was given as.
    """
    if given is None:
        return None
    if isinstance(given, datetime.datetime):
        return given.date()
    if isinstance(given, datetime.date):
        return given
    try:
        return datetime.date.fromisoformat(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} = {literal(given)} is no day", str(error), "a day, such as 2026-11-01") from error
