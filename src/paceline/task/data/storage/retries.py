"""Trying again: remote storage fails now and then in ways that pass."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.errors import DataError, PacelineError
from paceline.foreign_errors import is_forbidden
from paceline.task.data.storage.notices import DataNotices

Result = TypeVar("Result")

# What no second try can mend. Everything else may pass: each storage has errors of its own, with no common type.
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ImportError,
         ValueError, TypeError, AttributeError)  # fmt: skip
JITTER = random.Random()
MAY_PASS = (408, 409, 425, 429)  # HTTP answers of the 400s that ask to come again


@dataclass(frozen=True)
class Retries:
    """How often a read is tried, and how long it waits in between: twice as long each time, up to a longest wait."""

    attempts: int = 6
    first_seconds: float = 0.25
    longest_seconds: float = 20.0
    wait: Callable[[float], None] = time.sleep

    def run(self, what: str, call: Callable[[], Result], notices: DataNotices | None = None) -> Result:
        """Return what `call()` returns. Raises DataError for what does not pass, and after the last attempt.

        Each failure that is tried again is told to `notices`. Waits differ by chance, so that many readers that
        failed together do not come again together.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return call()
            except PacelineError:
                raise
            except Exception as raised:
                error = meant(raised)
                because = f"{type(error).__name__}: {error}".rstrip(": ")
                if not may_pass(error):
                    raise DataError(f"{what} cannot be read", because, advice(error)) from error
                if attempt == self.attempts:
                    raise DataError(
                        f"{what} cannot be read", f"{because}, after {attempt} attempts",
                        "see whether the storage answers, and start again: the run goes on where it stopped",
                    ) from error  # fmt: skip
                if notices is not None:
                    notices.tell(f"{what} was read again", because)
            seconds = min(self.longest_seconds, self.first_seconds * 2 ** (attempt - 1))
            self.wait(seconds * JITTER.uniform(0.5, 1.0))
        raise AssertionError("at least one attempt")


def meant(error: Exception) -> Exception:
    """Return what went wrong: fsspec says of any error of a web server, busy or gone, that the file is not there."""
    cause = error.__cause__
    is_of_the_web = isinstance(cause, TimeoutError | ConnectionError) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and is_of_the_web else error


def may_pass(error: Exception) -> bool:
    """Return whether the same read may succeed when it is tried again."""
    error = meant(error)
    status = _status(error)
    if status is not None and 400 <= status < 500:
        return status in MAY_PASS
    return not isinstance(error, FINAL) and not _lacks_credentials(error)


def _status(error: Exception) -> int | None:
    """Return what a server has answered: aiohttp calls it a status, gcsfs a code, or says 403 in words alone."""
    found = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(found, int):
        return found
    return 403 if is_forbidden(error) else None


def _lacks_credentials(error: Exception) -> bool:
    """Return whether a machine has no key for a storage: NoCredentialsError of S3, DefaultCredentialsError of GCS."""
    return type(error).__name__.endswith("CredentialsError")


def advice(error: Exception) -> str:
    """Return what to try about an error that does not pass."""
    status = _status(error)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "check the address"
    if isinstance(error, ImportError):
        return "install the package that fsspec needs for this kind of storage"
    if isinstance(error, PermissionError) or status in (401, 403) or _lacks_credentials(error):
        return "check the credentials of this storage on this machine"
    return "check the address and the storage"
