"""Real gloo ranks for tests: run_ranks(function, world_size, *args) runs the function once per rank.

The function must be importable (module level) and its arguments and results picklable; tensors travel by value, to the
CPU.
Inside it `torch.distributed` is initialised with gloo, or with NCCL where `ON_NCCL` is set, and torch uses one thread.
A hung rank is killed at the timeout, in seconds of an idle machine. An exception is raised again in the test with its
rank and its traceback as notes.

Processes come from a fork server that has imported torch and Paceline once (warm.py) and nothing else, so each starts
clean, as with "spawn", but in milliseconds. `run_kept` takes ranks that have run before.
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
# What ranks import again with the file of their test; the last says that all is there.
PRELOADED = [
    "pytest",
    "hypothesis",
    "tests_shared",
    "transformers.models.llama.modeling_llama",
    "started.ranks",
    "warm",
]
# After one rank has failed the others get this long to report: an error agreed on by all arrives everywhere.
GRACE_SECONDS = 5.0
FIRST_SEED = 67280421310721  # of torch's generator before anybody seeds it
ON_NCCL = "PACELINE_TESTS_ON_NCCL"  # set: ranks are joined by NCCL and share the first GPU
_KEPT: dict[int, _World] = {}  # by how many ranks there are


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
    with contextlib.closing(_World(world_size)) as world:
        return world.results(function, args, timeout_seconds, may_die)


def run_kept(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """Return what `run_ranks` does, from ranks that stay for the next call of the file with as many of them.

    For functions that leave nothing behind, as the next has the same process. What is saved is loaded in fresh ranks,
    or nothing would show that all of it was saved. Half of what a rank of a small model computes is what it does for
    the first time: a group, the rules of DTensor. An error ends the ranks.
    """
    if world_size not in _KEPT:
        _KEPT[world_size] = _World(world_size)
    try:
        return _KEPT[world_size].results(function, args, timeout_seconds)
    except BaseException:
        _KEPT.pop(world_size).close()
        raise


def end_kept() -> None:
    """End the ranks that `run_kept` has left."""
    while _KEPT:
        _KEPT.popitem()[1].close()


class _World:
    """Ranks that wait for work."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._ranks: list[Any] = []
        self._pipes: list[Any] = []
        try:
            for rank in range(world_size):
                pipe, far_end = context.Pipe()
                given = (far_end, rank, world_size, f"{self._folder.name}/rendezvous")
                process = context.Process(target=_run_rank, args=given, name=f"rank-{rank}")
                process.start()
                far_end.close()
                self._ranks.append(process)
                self._pipes.append(pipe)
        except BaseException:
            self.close()
            raise

    def results(
        self, function: Callable[..., Any], args: tuple, timeout_seconds: float, may_die: Collection[int] = ()
    ) -> list[Any]:
        """Return what the function returned on each rank."""
        work = pickle.dumps((dict(os.environ), pickle.dumps((function, args))))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which its result says
                pipe.send_bytes(work)
        return _collect(self._ranks, self._pipes, timeout_seconds, may_die)

    def close(self) -> None:
        """End all ranks."""
        for pipe, process in zip(self._pipes, self._ranks, strict=False):
            pipe.close()
            process.kill()  # it has reported, or never will
            process.join()
        self._folder.cleanup()


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


def _run_rank(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    """Run one rank: for each work call the function, send (error, result) and wait for the parent, which may leave."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1",
           "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    told = set[str]()  # names of the environment that this rank was given
    while True:
        try:  # also stay until every rank has reported: a peer may still be inside its last collective
            environment, work = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        for name in told - environment.keys():
            os.environ.pop(name, None)
        told = set(environment)
        os.environ.update(environment | own)
        error, result = None, None
        try:
            import torch
            import torch.distributed as dist

            torch.set_num_threads(1)
            torch.manual_seed(FIRST_SEED)
            if not dist.is_initialized():
                nccl = ON_NCCL in environment
                os.environ.update(alone_on_its_host(rank) if nccl else {})
                dist.init_process_group(
                    "nccl" if nccl else "gloo", f"file://{store}", timeout=COLLECTIVE_LIMIT, rank=rank,
                    world_size=world_size, device_id=torch.device("cuda", 0) if nccl else None,
                )  # fmt: skip
            function, args = pickle.loads(work)
            result = function(*args)
        except BaseException as raised:  # whatever it is, SystemExit included, the test must see it
            error = _with_note(raised, rank, world_size)
        try:
            report = pickle.dumps((error, on_the_host(result)))
        except Exception as raised:
            report = pickle.dumps((TypeError(f"rank {rank} cannot send its result: {raised!r}"), None))
        pipe.send_bytes(report)
        if error is not None:
            os._exit(1)  # closes its sockets, which frees a peer that waits for it in a collective


def on_the_host(result: Any) -> Any:
    """Return what a function has found with its tensors on the CPU, where the test compares them."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)


def alone_on_its_host(rank: int) -> dict[str, str]:
    """Return an environment by which NCCL takes a rank for the only one of a host, so that ranks may share a GPU.

    It refuses two ranks of one host with one GPU. Of two hosts it asks nothing, and sends through sockets.
    """
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def _with_note(error: BaseException, rank: int, world_size: int) -> BaseException:
    """Return the error, or one like it that can be pickled, with its rank and traceback as a note."""
    note = f"on rank {rank} of {world_size}:\n" + "".join(traceback.format_exception(error))
    error.add_note(note)
    try:
        copy = pickle.loads(pickle.dumps(error))
        return copy if isinstance(copy, BaseException) else RuntimeError(note)
    except Exception:  # some exceptions carry what cannot travel, such as locks
        return RuntimeError(note)
