"""Real gloo ranks for tests: run_ranks(function, world_size, *args) runs the function once per rank.

The function must be importable (module level) and its arguments and results picklable; tensors travel by value.
Inside it `torch.distributed` is initialised with gloo, and torch uses one thread. A hung rank is killed at the
timeout, in seconds of an idle machine. An exception is raised again in the test with its rank and its traceback as
notes.

Processes come from a fork server that has imported torch and Paceline once (warm.py) and nothing else, so each starts
clean, as with "spawn", but in milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.patience import Patience

LOOK_SECONDS = 1.0  # between two looks at the load, while ranks are waited for
COLLECTIVE_LIMIT = timedelta(hours=3)  # never reached: who waits for the ranks knows how loaded the machine is
TIMEOUT_SECONDS = 60.0
PRELOADED = ["warm"]
# After one rank has failed the others get this long to report: an error agreed on by all arrives everywhere.
GRACE_SECONDS = 5.0


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Return `[function(*args) on rank 0, ... on rank 1, ...]`, each in its own process.

    Ranks in `may_die` may be killed by a signal; their result is then None. Raises the first exception that a rank
    raised, AssertionError for a rank that died and TimeoutError for one that did not finish in `timeout_seconds`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        work = pickle.dumps((function, args))
        ranks, pipes = [], []
        try:
            for rank in range(world_size):
                pipe, far_end = context.Pipe()
                setting = (rank, world_size, f"{folder}/rendezvous", dict(os.environ))
                process = context.Process(target=_run_one, args=(far_end, work, *setting), name=f"rank-{rank}")
                process.start()
                far_end.close()
                ranks.append(process)
                pipes.append(pipe)
            return _collect(ranks, pipes, timeout_seconds, may_die)
        finally:
            for process, pipe in zip(ranks, pipes, strict=True):
                pipe.close()
                process.kill()  # it has reported, or never will
                process.join()


def _collect(ranks: list[Any], pipes: list[Connection], timeout_seconds: float, may_die: Collection[int]) -> list[Any]:
    """Return the results in rank order, or raise the first failure."""
    results: list[Any] = [None] * len(ranks)
    waiting, failure = dict(enumerate(pipes)), None
    patience = Patience(timeout_seconds)
    while waiting:
        ready = wait(list(waiting.values()), timeout=LOOK_SECONDS)
        if not ready and patience.is_over:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                error, results[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                ranks[rank].join()  # its end of the pipe is closed: it is ending
                code = ranks[rank].exitcode
                died = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
                error = None if rank in may_die else AssertionError(f"rank {rank} of {len(ranks)} {died}")
            if error is not None and failure is None:
                failure = error
                patience = Patience(min(GRACE_SECONDS, patience.left_seconds()))
    if failure is not None:
        raise failure
    if waiting:
        raise TimeoutError(f"ranks {sorted(waiting)} of {len(ranks)} did not finish in {timeout_seconds:g} s")
    return results


def _run_one(pipe: Connection, work: bytes, rank: int, world_size: int, store: str, environment: dict) -> None:
    """Run one rank: join the group, call the function, send (error, result), wait for the parent, leave."""
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )
    error, result = None, None
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{store}", timeout=COLLECTIVE_LIMIT, rank=rank, world_size=world_size)
        function, args = pickle.loads(work)
        result = function(*args)
    except BaseException as raised:  # whatever it is, SystemExit included, the test must see it
        error = _with_note(raised, rank, world_size)
    try:
        report = pickle.dumps((error, result))
    except Exception as raised:
        report = pickle.dumps((TypeError(f"rank {rank} cannot send its result: {raised!r}"), None))
    pipe.send_bytes(report)
    if error is not None:
        os._exit(1)  # closes its sockets, which frees a peer that waits for it in a collective
    with contextlib.suppress(EOFError):
        pipe.recv_bytes()  # stay until every rank has reported: a peer may still be inside its last collective
    os._exit(0)


def _with_note(error: BaseException, rank: int, world_size: int) -> BaseException:
    """Return the error, or one like it that can be pickled, with its rank and traceback as a note."""
    note = f"on rank {rank} of {world_size}:\n" + "".join(traceback.format_exception(error))
    error.add_note(note)
    try:
        copy = pickle.loads(pickle.dumps(error))
        return copy if isinstance(copy, BaseException) else RuntimeError(note)
    except Exception:  # some exceptions carry what cannot travel, such as locks
        return RuntimeError(note)
