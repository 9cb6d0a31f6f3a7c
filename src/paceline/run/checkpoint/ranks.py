"""Agreement among ranks: what fails on one fails on all, with the same error and without a hang."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.errors import PacelineError, StorageError

T = TypeVar("T")
U = TypeVar("U")

_ADVICE = {
    errno.ENOSPC: "free space, lower run.keep_last, or choose another run.dir",
    errno.EDQUOT: "free space within the quota, lower run.keep_last, or choose another run.dir",
    errno.EROFS: "choose a run.dir on a file system that is mounted for writing",
    errno.EACCES: "allow writing to the folder, or choose another run.dir",
    errno.EPERM: "allow writing to the folder, or choose another run.dir",
    errno.ENOENT: "choose a run.dir on a file system that every machine shares",
    errno.EIO: "the disk or its connection is failing: choose another run.dir",
}


@dataclass(frozen=True)
class _Failure:
    """Why a rank failed, in words that travel; `own` is the error itself where it has all its words."""

    because: str
    advice: str
    own: PacelineError | None


@dataclass(frozen=True)
class _Outcome:
    """What a call came to on a rank: its value, or why there is none."""

    value: Any = None
    failure: _Failure | None = None


class Ranks:
    """The processes that save or load together: one alone where it asks to be, or torch.distributed is not up."""

    def __init__(self, process_group: dist.ProcessGroup | None = None, alone: bool = False) -> None:
        self.group = process_group
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(process_group)
        self.size = 1 if self.alone else dist.get_world_size(process_group)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def collect(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on the first rank, and nothing on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = None if self.rank else [None] * self.size
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def agree(self, what: str, function: Callable[[], T]) -> list[T]:
        """Return every rank's `function()`, in rank order.

        Where it fails on any rank, every rank raises the lowest failing rank's error; one that is not a
        PacelineError becomes a StorageError that says `what` could not be done. An interrupt stays one on its rank.
        """
        mine, error = _attempt(function)
        outcomes = self.gather(mine)
        for rank, outcome in enumerate(outcomes):
            if outcome.failure:
                raise _error(what, {rank: outcome.failure}, error)
        return [outcome.value for outcome in outcomes]

    def settle(self, what: str, function: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]) -> U:
        """Return this rank's item of `decide(every rank's function())`, which the first rank works out.

        No rank but the first gets the others' values. Failures are raised as `agree` raises them, on every rank.
        """
        mine, error = _attempt(function)
        outcomes = self.collect(mine)
        failures = {rank: outcome.failure for rank, outcome in enumerate(outcomes) if outcome.failure}
        answers: list[Any] = [None] * self.size
        if self.rank == 0 and not failures:
            decided, error = _attempt(lambda: list(decide([outcome.value for outcome in outcomes])))
            failures = {0: decided.failure} if decided.failure else {}
            answers = decided.value or answers
        answer, failures = self._scatter([(answer, failures) for answer in answers])
        if failures:
            raise _error(what, failures, error)
        return answer

    def _scatter(self, items: list[Any]) -> Any:
        """Return this rank's item of the first rank's list."""
        if self.size == 1:
            return items[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, None if self.rank else items, group=self.group, group_src=0)
        return box[0]


def _attempt(function: Callable[[], Any]) -> tuple[_Outcome, BaseException | None]:
    """Return what a call comes to, and what it raised; whatever that is, other ranks must not wait for this one."""
    try:
        return _Outcome(function()), None
    except BaseException as error:
        because = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
        own = error if isinstance(error, PacelineError) else None
        return _Outcome(failure=_Failure(because, advice or "mend the cause and start again", own)), error


def _error(what: str, failures: Mapping[int, _Failure], own: BaseException | None) -> BaseException:
    """Return what to raise for failures by rank, where `own` is this rank's error.

    That is an interrupt of this rank; else the lowest failing rank's error if it is a PacelineError; else a
    StorageError for it.
    """
    if own is not None and not isinstance(own, Exception):
        return own
    rank = min(failures)
    failure = failures[rank]
    if failure.own is not None:
        return failure.own
    others = sorted(set(failures) - {rank})
    also = f" (also on ranks {', '.join(map(str, others))})" if others else ""
    error = StorageError(what, f"rank {rank}: {failure.because}{also}", failure.advice)
    error.__cause__ = own
    return error
