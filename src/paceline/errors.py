"""The error family: every message says what happened, because of what, and what to try.

Each class carries the exit code of the command line. 0 is done; 1 is left to defects of Paceline itself,
the only case in which a traceback is shown.
"""

from __future__ import annotations

import difflib
import errno
import math
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

from paceline.foreign_errors import says_no_memory, tells_no_memory


class PacelineError(Exception):
    """An error a user can act on: `what` happened, `because` of what, and what to `try_`."""

    exit_code = 1
    names_ranks = False  # whether `what` says by itself on which ranks it happened

    def __init__(self, what: str, because: str = "", try_: str = "") -> None:
        self.what, self.because, self.try_ = what, because, try_
        super().__init__(what, because, try_)

    def __str__(self) -> str:
        lines = [self.what]
        if self.because:
            lines.append(f"  because  {self.because}")
        if self.try_:
            lines.append(f"  try      {self.try_}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Return the error as plain data, for `--json`."""
        named = {"names_ranks": True} if self.names_ranks else {}
        return {"error": type(self).__name__, "what": self.what, "because": self.because, "try": self.try_,
                "exit_code": self.exit_code, **named}  # fmt: skip

    def naming_ranks(self) -> Self:
        """Return the error, noted as one whose `what` says by itself on which ranks it happened."""
        self.names_ranks = True
        return self


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error says that there is no memory left, of a device or of the host."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    torch = sys.modules.get("torch")  # where it is not there, no error is of its kind
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return says_no_memory(error)


def exhausted_by(error: BaseException) -> BaseException | None:
    """Return the error that says that there is no memory left: this one, or what it tells of a user's data set or
    factory. None of any other."""
    known: BaseException | None = error
    while isinstance(known, ConfigError | DataError) and known.__cause__ is not None:
        known = known.__cause__
    return known if known is not None and is_exhausted(known) else None


def first_line(error: BaseException) -> str:
    """Return what an error says first; Python's own MemoryError says nothing but its name."""
    return str(error).partition("\n")[0] or type(error).__name__


def of_rank(what: str, rank: object, names_ranks: bool) -> str:
    """Return what happened and the rank that told of it, where the sentence does not name ranks by itself."""
    return what if names_ranks else f"{what} (rank {rank})"


class ConfigError(PacelineError, ValueError):
    """A specification, an option or a value is wrong."""

    exit_code = 2


class NeedsWholeWeights(ConfigError):
    """A model, an objective or an optimizer uses weights whole where a layout has its ranks hold parts of them."""


class ConfigErrors(ConfigError):
    """Everything that is wrong with a specification, at once: `errors` holds each with its place."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        told = "\n".join(str(error) for error in self.errors)
        super().__init__(f"{len(self.errors)} things are wrong\n" + textwrap.indent(told, "  "))

    def as_dict(self) -> dict[str, object]:
        """Return the errors as plain data, for `--json`: those of all, and each."""
        return {**super().as_dict(), "errors": [error.as_dict() for error in self.errors]}

    def __reduce__(self) -> tuple[object, ...]:
        return ConfigErrors, (self.errors,)


class DoesNotFit(PacelineError):
    """No layout of the task fits the cluster, or the one asked for does not."""

    exit_code = 3
    least_bytes = math.inf  # of a device's memory that the smallest plan needs, where that is why


class OutOfMemory(DoesNotFit):
    """A device's memory was exhausted during a run; `evidence` is what it was spent on, as plain data."""

    def __init__(
        self, what: str, because: str = "", try_: str = "", evidence: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(what, because, try_)
        self.evidence = dict(evidence or {})

    def as_dict(self) -> dict[str, object]:
        """Return the error as plain data, with its evidence."""
        return {**super().as_dict(), "evidence": self.evidence}


class ExhaustedTogether(OutOfMemory):
    """Memory was exhausted on a rank within a call that all ranks agree on: each of them raises it, with that rank."""

    rank = 0
    save_step: int | None = None  # of a save beside training, of which ranks hear one after another


def tells_exhausted(told: Mapping[str, object]) -> bool:
    """Return whether an error as plain data says that there was no memory left: a run's, or another process's own.

    What is no error of ours is told by its kind and text: {"error": "RuntimeError", "what": "RuntimeError: CUDA ..."}.
    """
    kind, what = str(told.get("error", "")), str(told.get("what", ""))
    if kind in EXHAUSTED_KINDS:
        return True
    if kind in RUNTIME_KINDS:
        return tells_no_memory(what)
    return kind == "OSError" and f"[Errno {errno.ENOMEM}]" in what


EXHAUSTED_KINDS = (OutOfMemory.__name__, ExhaustedTogether.__name__, MemoryError.__name__, "OutOfMemoryError",
                   "_ArrayMemoryError", "ArrowMemoryError")  # fmt: skip
RUNTIME_KINDS = (RuntimeError.__name__, "AcceleratorError", "DistBackendError")  # torch's are RuntimeErrors


class VerificationFailed(PacelineError):
    """A layout does not compute the numbers of a single device."""

    exit_code = 4


class DataError(PacelineError):
    """The data cannot be read or do not make a single sample."""

    exit_code = 5


class DamagedData(DataError):
    """Bytes or a record of the data are not what they should be. The files alone decide it, never a network or a disk
    that fails: with `task.data.on_bad = "skip"` what is damaged may be left out."""


class NumericalStop(PacelineError):
    """The loss or the gradient norm is no longer a finite number."""

    exit_code = 6


class NothingToLearn(NumericalStop):
    """No item of a global batch counts in its loss."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}'",
            "it is an optional dependency and is not installed",
            f"pip install 'paceline[{extra}]'",
        )
        self._made_of = package, extra, purpose

    def __reduce__(self) -> tuple[object, ...]:
        return MissingExtra, self._made_of  # which another process raises as it is here


class StorageError(PacelineError):
    """A checkpoint, journal or report cannot be written or read (74 is EX_IOERR of sysexits.h)."""

    exit_code = 74


class RunInUse(StorageError):
    """Another run holds the run's directory, or has taken it over."""


class WorkerDied(PacelineError):
    """A training process ended without saying why; `exit_code` is 128 + the signal that ended it."""

    def __init__(self, what: str, because: str = "", try_: str = "", exit_code: int = 1) -> None:
        super().__init__(what, because, try_)
        self.exit_code = exit_code


class RankHung(PacelineError):
    """A training process stood still and was ended by its supervisor (137 is 128 + SIGKILL)."""

    exit_code = 137


class RankReplaced(PacelineError):
    """A slow training process has made room for another one (143 is 128 + SIGTERM)."""

    exit_code = 143


class Requeue(SystemExit):
    """The run stopped early with a checkpoint and wants to be started again (75 is EX_TEMPFAIL of sysexits.h)."""

    exit_code = 75

    def __init__(self, because: str) -> None:
        self.because = because
        super().__init__(self.exit_code)


class HandedBack(KeyboardInterrupt):
    """A run at a prompt or in a notebook has stopped early with a checkpoint, and who typed there goes on."""

    def __init__(self, because: str) -> None:
        self.because = because
        super().__init__(f"stopped: {because}. A checkpoint is saved; make the run again, and it goes on from there")


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for the nearest known word, or the list of known words."""
    known = sorted(known)
    near = nearest(word, known)
    return f"did you mean '{near}'?" if near is not None else f"one of: {', '.join(known)}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like another one, whatever its case; None where none is like it."""
    ordered = sorted(known)
    lower = {each.lower(): each for each in reversed(ordered)}
    if near := difflib.get_close_matches(word, ordered, n=1, cutoff=0.5):
        return near[0]
    return next((lower[each] for each in difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.5)), None)
