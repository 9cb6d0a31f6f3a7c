"""Which rank a failed run is blamed on: the first that failed by itself, never a rank that the supervisor ended."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, Requeue, WorkerDied
from paceline.said import say_line
from paceline.spec.journal.timing.clock import passed_seconds
from paceline.supervise.memory_kills import why_killed

ERROR_GLOB = "error-*.json"
UNFINISHED = ".part"
EARLY_CODE = 1
WELL_UNTIL = "well_until"  # in an error, where ranks were well for longer than its place in the order of errors says
LEFT_NO_ERROR = "it left no error: something called exit in it"
TRY_LEFT = "look for exit calls in the task's own code and its libraries"


@dataclass(frozen=True)
class Outcome:
    """How a group of processes ended: the exit code for the caller, and what to say about it."""

    exit_code: int
    error: dict[str, object] | None = None
    is_printed: bool = False  # whether another process prints the error


@dataclass(frozen=True)
class Ending:
    """How one rank ended, and between which moments: it was alive at the look before.

    Moments here are `passed_seconds` of this machine, whose clock may be set between two of them.
    """

    rank: int
    code: int  # minus the signal that ended it
    after: float
    by: float
    is_early: bool = False  # it ended as if it were done, and peers waited for it: `code` is EARLY_CODE, and was 0


@dataclass(frozen=True)
class ToldError:
    """What a rank told of its error: when it came about (`passed_seconds`), and whether it was the cause.

    `words` is all that the rank told, as an error's record has it: "what", "because", "try" and more.
    """

    rank: int
    time: float
    cause: bool
    exit_code: int
    words: Mapping[str, object]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 1", or "ranks 0, 2"."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def outcome_of(
    endings: Sequence[Ending], killed: Collection[int], folder: Path, kills_before: int | None, ranks: int = 0
) -> Outcome:
    """Return how the ranks of a run ended, by the failure that came first. Some of the `ranks` may still run.

    `killed` are the ranks that the supervisor ended, `folder` holds what ranks told of their errors, and `kills_before`
    is what the kernel's count of memory kills was.
    """
    if not any(ending.code for ending in endings):
        return Outcome(0)
    told = errors_told(folder, [ending.rank for ending in endings])
    own = [ending for ending in endings if ending.code and ending.rank not in killed]
    ranks = ranks or len(endings)
    if len({ending.code for ending in own}) == 1 and len(own) == ranks and own[0].code > 0 and not told:
        return Outcome(own[0].code)  # a script that all ranks have left alike
    spoke = {error.rank for error in told}
    # Whoever has told all of its error was alive until then, however far apart the looks at it are.
    named = {error.rank for error in errors_told(folder) if error.cause}
    failures: list[tuple[float, ToldError | Ending]] = [
        *((error.time, error) for error in told if error.cause),
        *((_moment(each), each) for each in own if _is_news(each, spoke, named)),
    ]
    if not failures:
        requeue = any(ending.code == Requeue.exit_code for ending in own)
        if requeue:
            return Outcome(Requeue.exit_code)
        return Outcome(max(ending.code for ending in own), dict(told[0].words))
    first = min(failures, key=lambda failure: failure[0])[1]
    if not isinstance(first, Ending):
        return Outcome(first.exit_code, dict(first.words))
    return _died(first, ranks, kills_before) if first.code < 0 else _left(first, ranks)


def cause_is_known(endings: Sequence[Ending], folder: Path) -> bool:
    """Return whether somebody has failed by itself already: others that fail later are not to be blamed."""
    if any(ending.code < 0 for ending in endings):
        return True
    return any(error.cause for error in errors_told(folder, [ending.rank for ending in endings]))


def _is_news(ending: Ending, spoke: Collection[int], named: Collection[int]) -> bool:
    """Return whether an ending is a failure of its own: that of a rank which has not told of it."""
    if ending.code < 0:
        return ending.rank not in named
    return ending.rank not in spoke and ending.code != Requeue.exit_code


def _moment(ending: Ending) -> float:
    """Return when a rank ended that told no error, for the order of failures.

    SIGKILL and a call of exit come from outside of training, so errors of the same moment are their echoes. Another
    signal may be an echo itself: a process aborts when a peer has gone.
    """
    return ending.after if ending.code == -signal.SIGKILL or ending.code > 0 else ending.by


def _died(ending: Ending, ranks: int, kills_before: int | None) -> Outcome:
    number = -ending.code
    died = WorkerDied(
        f"rank {ending.rank} of {ranks} was ended by {signal.Signals(number).name}",
        why_killed(kills_before) if number == signal.SIGKILL else "the process got a signal",
        "start the same command again: it resumes from the last checkpoint",
        exit_code=128 + number,
    ).naming_ranks()
    return Outcome(128 + number, {**died.as_dict(), "rank": ending.rank})


def _left(ending: Ending, ranks: int) -> Outcome:
    """Return the outcome of a rank that ended the process without a word."""
    told = "code 0 before its peers were done" if ending.is_early else f"code {ending.code}"
    left = PacelineError(
        f"rank {ending.rank} of {ranks} ended with {told}",
        LEFT_NO_ERROR,
        TRY_LEFT,
    ).naming_ranks()
    left.exit_code = ending.code
    return Outcome(ending.code, {**left.as_dict(), "rank": ending.rank})


def leave_error(folder: Path, rank: int, details: Mapping[str, object], cause: bool, moment: float = 0.0) -> None:
    """Leave a rank's error in its supervisor's folder; `moment` is when it came about (`passed_seconds`), now if 0."""
    path = folder / f"error-{rank}.json"
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_text(json.dumps({**details, "rank": rank, "cause": cause, "time": moment or passed_seconds()}))
    unfinished.replace(path)


def leave_if_there_is_room(
    folder: Path, rank: int, details: Mapping[str, object], moment: float, cause: bool = True,
    say: Callable[[str], None] = say_line,
) -> None:  # fmt: skip
    """Do so for a rank that cannot any more; where the disk takes nothing, say it: that is no end of a supervisor."""
    try:
        leave_error(folder, rank, details, cause, moment)
    except OSError as error:
        with contextlib.suppress(OSError):  # half of it would be told as that of a rank which failed with code 1
            (folder / f"error-{rank}.json{UNFINISHED}").unlink()
        say(f"fault    {details.get('what')}: {details.get('because')} (not on record: {error})")


def errors_told(folder: Path, ended: Collection[int] = ()) -> list[ToldError]:
    """Return what ranks told of their errors, in the order in which they did, and what `ended` ones had begun to tell.

    What a rank that still runs has begun to tell is no error yet: it may be an echo of another one's.
    """
    begun = [path for rank in ended if (path := folder / f"error-{rank}.json{UNFINISHED}").exists()]
    errors = [_read(path) for path in (*folder.glob(ERROR_GLOB), *begun)]
    return sorted(errors, key=lambda error: (error.time, error.rank))


def _read(path: Path) -> ToldError:
    """Return a rank's error. One that was cut short counts as the cause, at the moment of its last byte."""
    written = passed_seconds() - max(0.0, time.time() - path.stat().st_mtime)
    rank = int(path.name.removesuffix(UNFINISHED).removesuffix(".json").rpartition("-")[2])
    text = path.read_text(errors="replace")
    try:
        found = json.loads(text)
        if isinstance(found, dict) and {"what", "because", "try", "exit_code"} <= set(found):
            return _told({"time": written, "rank": rank, "cause": True, **found})
    except (ValueError, TypeError):  # cut short, or no moment, rank or code where one is meant
        pass
    cut = PacelineError(
        f"rank {rank} failed, and what it told of that is cut short",
        f"it was ended while it wrote this: {text[:300]!r}" if text else "it was ended before it wrote a word of it",
        "look at what the rank printed; start the same command again: it resumes from the last checkpoint",
    ).naming_ranks()
    return _told({**cut.as_dict(), "time": written, "rank": rank, "cause": True})


def _told(words: Mapping[str, Any]) -> ToldError:
    """Return an error as its words say it. Raises ValueError and TypeError where a number is none."""
    return ToldError(int(words["rank"]), float(words["time"]), bool(words["cause"]), int(words["exit_code"]), words)
