"""Agreement among ranks: what fails on one fails on all, with the same error and without a hang."""

from __future__ import annotations

import errno
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.errors import PacelineError, StorageError

T = TypeVar("T")

_ADVICE = {
    errno.ENOSPC: "free space, lower run.keep_last, or choose another run.dir",
    errno.EDQUOT: "free space within the quota, lower run.keep_last, or choose another run.dir",
    errno.EROFS: "choose a run.dir on a file system that is mounted for writing",
    errno.EACCES: "allow writing to the folder, or choose another run.dir",
    errno.EPERM: "allow writing to the folder, or choose another run.dir",
    errno.ENOENT: "choose a run.dir on a file system that every machine shares",
    errno.EIO: "the disk or its connection is failing: choose another run.dir",
}


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
        PacelineError becomes a StorageError that says `what` could not be done.
        """
        value: Any = None
        failure: PacelineError | None = None
        try:
            value = function()
        except Exception as error:  # of whatever kind: the others must not wait for this rank
            failure = as_storage_error(what, {self.rank: error})
        outcomes = self.gather((failure, value))
        for failure, _ in outcomes:
            if failure is not None:
                raise failure
        return [result for _, result in outcomes]


def as_storage_error(what: str, failures: dict[int, BaseException]) -> PacelineError:
    """Return one error for failures by rank: the lowest rank's own if a PacelineError, else a StorageError for it."""
    rank = min(failures)
    error = failures[rank]
    if isinstance(error, PacelineError):
        return error
    others = sorted(set(failures) - {rank})
    also = f" (also on ranks {', '.join(map(str, others))})" if others else ""
    advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
    because = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return StorageError(what, f"rank {rank}: {because}{also}", advice or "mend the cause and start again")


@contextmanager
def single_process_is_meant() -> Iterator[None]:
    """Silence DCP's warning that no process group exists, which is how one process is asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ")
        yield
