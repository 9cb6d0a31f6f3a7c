"""The flight recorder of a rank: torch's own ring of the last collectives, dumped while the rank hangs.

Torch records every collective of NCCL and of gloo, with its number in its group, its sizes and whether it has ended.
The dump is a private function of torch: it is looked for under the names that it has had, and where there is none the
answer says so. The main thread of a rank that hangs cannot answer. So a thread of the rank waits at a named pipe, in
the folder of its supervisor, and costs nothing until somebody writes to it. It also writes the stacks: while it holds
the interpreter no other thread moves, where a handler of a signal may read frames that are just left, and end the rank.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # the first since torch 2.12; both return JSON
ASK, LEAVE = b"?", b"."
ENTRIES = 64  # of the newest collectives that are kept
KEPT = (
    "record_id", "process_group", "pg_id", "collective_seq_id", "p2p_seq_id", "profiling_name", "state", "retired",
    "input_sizes", "output_sizes", "input_dtypes", "is_p2p", "time_created_ns", "time_discovered_started_ns",
    "time_discovered_completed_ns", "timeout_ms",
)  # fmt: skip
Dump = Callable[[], bytes | str]


def pipe_path(folder: Path, rank: int) -> Path:
    """Return the pipe at which a rank waits to be asked for its last collectives."""
    return folder / f"flight-{rank}.ask"


def flight_path(folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its last collectives."""
    return folder / f"flight-{rank}.json"


def torch_dump() -> Dump | None:
    """Return torch's dump of its flight recorder, None where this torch has none, or this process has no torch yet."""
    torch = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    return next((found for name in DUMPS if callable(found := getattr(c10d, name, None))), None)


def last_collectives(dump: Dump | None, since_ns: int = 0) -> dict[str, object]:
    """Return the newest entries of a flight recorder and the state of its groups; `missing` says why there are none.

    What was begun before `since_ns` (since the epoch) is of an older world.
    """
    if dump is None:
        return {"missing": f"this torch has none of {', '.join(DUMPS)}"}
    try:
        told = json.loads(dump())
    except (RuntimeError, TypeError, ValueError) as error:  # a private function may change
        return {"missing": f"torch's dump failed: {type(error).__name__}: {error}"}
    entries = [each for each in told.get("entries") or () if isinstance(each, dict)]
    entries = [each for each in entries if each.get("time_created_ns", since_ns) >= since_ns]
    newest = [{name: each[name] for name in KEPT if name in each} for each in entries[-ENTRIES:]]
    groups = {name: told.get(name) for name in ("pg_config", "pg_status", "version", "comm_lib_version")}
    return {**groups, "recorded": len(entries), "entries": newest}


def reached(told: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Return for each group of a rank the number of the last collective that it has begun, and its name.

    A group of the same name in an older world of the process counts further, so the newest entry says it.
    """
    found: dict[str, tuple[int, str]] = {}
    for each in told.get("entries") or ():
        number, group = each.get("collective_seq_id"), each.get("process_group")
        if isinstance(number, int) and not each.get("is_p2p") and isinstance(group, list) and group:
            name = str(each.get("profiling_name", "")).rpartition(":")[2]
            found[str(group[0])] = (number, name)
    return found


def missing_from(told: Mapping[int, Mapping[str, object]]) -> list[str]:
    """Return sentences on the collectives that some ranks have begun and others of their group have not."""
    by_rank = {rank: reached(each) for rank, each in told.items()}
    sentences = []
    for group in sorted({group for found in by_rank.values() for group in found}):
        numbers = {rank: found[group][0] for rank, found in by_rank.items() if group in found}
        last = max(numbers.values())
        behind = [rank for rank, number in numbers.items() if number < last]
        if behind:
            ahead = next(rank for rank, number in numbers.items() if number == last)
            name, who = by_rank[ahead][group][1], ", ".join(map(str, behind))
            sentences.append(
                f"{name} number {last} of group {group or 'default'} was begun by rank {ahead},"
                f" and rank{'s' if len(behind) > 1 else ''} {who} had come to number {numbers[behind[0]]}"
            )
    return sentences


class FlightTeller:
    """Waits, in a thread, to be asked for this process's stacks and last collectives, and writes them."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        dump: Callable[[], Dump | None] = torch_dump,
        stacks: Callable[[], None] = lambda: None,
    ) -> None:
        """`stacks` writes the stacks. `dump` is called when somebody asks: torch may be imported later than now."""
        self._folder, self._rank, self._dump, self._since_ns = folder, rank, dump, time.time_ns()
        self._stacks = stacks
        try:
            os.mkfifo(pipe_path(folder, rank), 0o600)
        except FileExistsError:  # of an older rank of this number in the same world
            pass
        except OSError:  # a file system without pipes: the stacks are told all the same
            return
        threading.Thread(target=self._wait, name="paceline-flight", daemon=True).start()

    def stop(self) -> None:
        """Wait no more: this process is in another world."""
        _say(pipe_path(self._folder, self._rank), LEAVE)

    def _wait(self) -> None:
        path = pipe_path(self._folder, self._rank)
        while True:
            try:
                with path.open("rb", buffering=0) as pipe:  # until somebody opens the other end
                    asked = pipe.read(1)
            except OSError:  # the supervisor and its folder are gone
                return
            if asked == LEAVE:
                return
            with contextlib.suppress(OSError):  # an older answer: this one is whole when the file is there again
                flight_path(self._folder, self._rank).unlink(missing_ok=True)
            self._stacks()
            self._write()

    def _write(self) -> None:
        path = flight_path(self._folder, self._rank)
        unfinished = path.with_suffix(".part")
        with contextlib.suppress(OSError):  # a full disk may be why it hangs
            unfinished.write_text(json.dumps(last_collectives(self._dump(), self._since_ns)))
            unfinished.replace(path)


def ask_flight(folder: Path, rank: int) -> bool:
    """Have a rank write its stacks and last collectives; return whether it waits to be asked."""
    return _say(pipe_path(folder, rank), ASK)


def read_flight(folder: Path, rank: int) -> str:
    """Return what a rank has written of its last collectives, empty where it has not."""
    try:
        return flight_path(folder, rank).read_text()
    except FileNotFoundError:
        return ""


def _say(path: Path, word: bytes) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):  # nobody waits there
            raise
        return False
    try:
        os.write(descriptor, word)
        return True
    except BrokenPipeError:
        return False
    finally:
        os.close(descriptor)
