"""Agreement among ranks: what fails on one fails on all, with the same error and without a hang.

What goes well costs a few numbers that are reduced, whatever the number of ranks, or a talk of log2 N rounds. Only
`settle`, and the words of a failure, travel as pickled objects to rank 0, or to all.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from paceline.checkpoint.writers.talk import Message, Talk
from paceline.errors import ExhaustedTogether, PacelineError, StorageError, exhausted_by, first_line

T = TypeVar("T")
U = TypeVar("U")

RINGS = 256  # ranks of the largest group whose sums go round gloo's ring: of 130 that takes about as long as a tree

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
    exhausted: bool = False  # there was no memory left


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

    @property
    def device(self) -> torch.device:
        """Where the tensors lie that the group sends."""
        on_cuda = not self.alone and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")

    def collect(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on the first rank, and nothing on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = None if self.rank else [None] * self.size
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    def everywhere(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def rows(self, row: bytes) -> list[bytes]:
        """Return every rank's row, all of one length, in rank order, on the first rank, and nothing on the others."""
        if self.size == 1:
            return [row]
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8).to(self.device)
        rows = None if self.rank else [torch.empty_like(mine) for _ in range(self.size)]
        dist.gather(mine, rows, group=self.group, group_dst=0)
        return [bytes(one.cpu().numpy()) for one in rows or ()]

    def hold_talk(self, talk: Talk[T]) -> T:
        """Return what a talk comes to on this rank: its messages are carried. Every rank of the group has its own."""
        heard: bytes | None = None
        while True:
            try:
                turn = next(talk) if heard is None else talk.send(heard)
            except StopIteration as ended:
                result: T = ended.value
                return result
            heard = self._carry(turn)

    def _carry(self, turn: Message) -> bytes:
        """Send a message to one rank and return that of another."""
        content = turn.content
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        return bytes(self.swap(sent, turn.to, turn.source).numpy())

    def swap(self, content: torch.Tensor, to: int | None, source: int | None) -> torch.Tensor:
        """Send bytes to one rank and return those of another: their number, and then what they are."""
        length = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._move(to, source, torch.tensor([len(content)], device=self.device), length)
        heard = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._move(to, source, content.to(self.device), heard)
        return heard.cpu()

    def _move(self, to: int | None, source: int | None, sent: torch.Tensor, heard: torch.Tensor) -> None:
        """Send one tensor and receive the other at once; an empty one does not travel."""
        pairs = ((dist.isend, sent, to), (dist.irecv, heard, source))
        moves = [dist.P2POp(move, tensor, group=self.group, group_peer=peer)
                 for move, tensor, peer in pairs if peer is not None and tensor.numel()]  # fmt: skip
        for work in dist.batch_isend_irecv(moves) if moves else ():
            work.wait()

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank."""
        found = torch.tensor(flags, dtype=torch.uint8, device=self.device)
        if self.size > 1 and flags:
            self._reduce(found, largest=True)
        return [bool(flag) for flag in found.tolist()]

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over all ranks of numbers from 0 to 2^64 - 1, modulo 2^64."""
        halves = torch.tensor([[number >> 32, number % 2**32] for number in numbers], dtype=torch.int64).view(-1, 2)
        if self.size > 1 and numbers:
            sums = halves.to(self.device)
            self._reduce(sums, largest=False)
            halves = sums.cpu()
        return [((high << 32) + low) % 2**64 for high, low in halves.tolist()]

    def _reduce(self, numbers: torch.Tensor, *, largest: bool) -> None:
        """Put the largest of all ranks' whole numbers in the place of this rank's, or their sums.

        In a large group of gloo's they go up a tree to the first rank and down again: 2 log2 N messages, one after
        another. In round k a rank that is an odd multiple of 2^k sends its own 2^k ranks down: of 5 ranks in the rounds
        0, 1 and 2 the ranks 1 and 3, then 2 (with 3's), then 4.
        """
        if self.size <= RINGS or dist.get_backend(self.group) != "gloo":
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
            return
        heard = torch.empty_like(numbers)
        for away in (2**power for power in range((self.size - 1).bit_length())):
            if self.rank % (2 * away):
                self._move(self.rank - away, None, numbers, heard)
                break
            if self.rank + away < self.size:
                self._move(None, self.rank + away, numbers, heard)
                numbers.copy_(torch.maximum(numbers, heard) if largest else numbers + heard)
        dist.broadcast(numbers, group=self.group, group_src=0)

    def attempt(self, what: str, function: Callable[[], T]) -> T:
        """Return `function()`. Where it fails on any rank, every rank raises the lowest failing rank's error.

        An error that is not a PacelineError becomes a StorageError that says `what` could not be done, memory that is
        exhausted an ExhaustedTogether. An interrupt stays one on its rank.
        """
        mine, error = _attempt(function)
        if self.any_of([mine.failure is not None])[0]:
            failures: list[Any] = [mine.failure]
            if self.size > 1:
                failures = [None] * self.size
                dist.all_gather_object(failures, mine.failure, group=self.group)
            raise _error(what, {rank: failure for rank, failure in enumerate(failures) if failure}, error)
        value: T = mine.value
        return value

    def exhausted(self, what: str, error: BaseException) -> BaseException:
        """Return what to raise where this rank's memory is exhausted outside of a call that ranks agree on."""
        failure = _attempt(partial(_raise, error))[0].failure
        assert failure is not None and failure.exhausted, error
        return _error(what, {self.rank: failure}, error)

    def from_first(self, what: str, function: Callable[[], T]) -> T:
        """Return what `function()` is on the first rank, on all. Failures are raised as `attempt` raises them."""
        mine, error = _attempt(function) if self.rank == 0 else (_Outcome(), None)
        box = [mine]
        if self.size > 1:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[0].failure:
            raise _error(what, {0: box[0].failure}, error)
        value: T = box[0].value
        return value

    def settle(self, what: str, function: Callable[[], T], decide: Callable[[list[T]], Sequence[U]]) -> U:
        """Return this rank's item of `decide(every rank's function())`, which the first rank works out.

        No rank but the first gets the others' values. Failures are raised as `attempt` raises them, on every rank.
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

    def _scatter(self, items: list[object]) -> Any:
        """Return this rank's item of the first rank's list."""
        if self.size == 1:
            return items[0]
        box: list[object] = [None]
        dist.scatter_object_list(box, None if self.rank else items, group=self.group, group_src=0)
        return box[0]


def _raise(error: BaseException) -> None:
    raise error


def _attempt(function: Callable[[], object]) -> tuple[_Outcome, BaseException | None]:
    """Return what a call comes to, and what it raised; whatever that is, other ranks must not wait for this one."""
    try:
        return _Outcome(function()), None
    except BaseException as error:
        if exhausted_by(error) is not None:
            failure = _Failure(first_line(error), "more memory, or fewer ranks on this node", None, True)
            return _Outcome(failure=failure), error
        because = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else None
        own = error if isinstance(error, PacelineError) else None
        return _Outcome(failure=_Failure(because, advice or "mend the cause and start again", own)), error


def _error(what: str, failures: Mapping[int, _Failure], own: BaseException | None) -> BaseException:
    """Return what to raise for failures by rank, where `own` is this rank's error.

    That is an interrupt of this rank; else the lowest failing rank's error if it is a PacelineError; else a
    StorageError for it. Ranks whose memory is exhausted come before others, which may only have felt it.
    """
    if own is not None and not isinstance(own, Exception):
        return own
    short = [rank for rank, failure in failures.items() if failure.exhausted]
    rank = min(short or failures)
    failure = failures[rank]
    if failure.own is not None:
        return failure.own
    others = sorted(set(failures) - {rank})
    also = f" (also on ranks {', '.join(map(str, others))})" if others else ""
    kind = ExhaustedTogether if failure.exhausted else StorageError
    error = kind(what, f"rank {rank}: {failure.because}{also}", failure.advice)
    if isinstance(error, ExhaustedTogether):
        error.rank = rank
    error.__cause__ = own
    return error
