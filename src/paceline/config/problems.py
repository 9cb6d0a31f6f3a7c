"""Problems: what is wrong with a spec, collected, so that all of it is told at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import ConfigError, ConfigErrors, MissingExtra, NeedsWholeWeights


class Problems:
    """The errors found so far, in the order in which they were found."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[ConfigError]:
        return iter(self._found)

    def add(self, error: ConfigError, origin: str = "") -> None:
        """Note an error; of one that holds several, each. `origin` is put before each where there is one."""
        for each in error.errors if isinstance(error, ConfigErrors) else (error,):
            self._found.append(placed(each, origin))

    @contextmanager
    def noting(self, origin: str = "") -> Iterator[None]:
        """Note a ConfigError that is raised within, and go on behind it."""
        try:
            yield
        except ConfigError as error:
            self.add(error, origin)

    def raise_all(self, origin: str = "") -> None:
        """Raise what was found: the one error, or all as one, those of a file by its lines. Nothing found: return."""
        found = sorted((placed(error, origin) for error in self._found), key=_line)
        if len(found) == 1:
            raise found[0]
        if found:
            raise ConfigErrors(found)


def placed(error: ConfigError, origin: str) -> ConfigError:
    """Return the error with an origin before its text, "x.toml:12: ...", unless one is there or none is wanted."""
    elsewhere = isinstance(error, MissingExtra | NeedsWholeWeights)
    if not origin or elsewhere or re.match(r"[^\s'\"]+:\d+: |--set: ", error.what):
        return error
    made = ConfigError(f"{origin}: {error.what}", error.because, error.try_)
    made.__cause__, made.names_ranks = error.__cause__, error.names_ranks
    return made


def _line(error: ConfigError) -> tuple[str, int]:
    """Return (file, line) of an error that names them, and what comes last of one that does not."""
    found = re.match(r"(\S+):(\d+): ", error.what)
    return (found.group(1), int(found.group(2))) if found else ("\uffff", 0)
