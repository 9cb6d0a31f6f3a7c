"""A connection of a world that was given up keeps no thread of gloo's busy, and gloo can close it all the same."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import run_ranks

from paceline.patience import Patience
from paceline.run.process import sockets
from paceline.run.process.groups import abort_groups
from paceline.run.process.world import join_next, join_world
from paceline.supervise.told.place import Place

LIMIT_SECONDS = 15.0
IN_A_ROW = 20
DIES = 1


def watching(connection: sockets.Connection) -> dict[int, int]:
    """Return the epolls of this process that watch a connection, and the number that each tells with its events."""
    found = {}
    for path in sockets.OPEN.iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this look
            if str(path.readlink()) == sockets.EPOLL:
                for line in sockets.WATCHED.finditer(Path("/proc/self/fdinfo", path.name).read_text()):
                    if (int(line["descriptor"]), f"socket:[{int(line['inode'], 16)}]") == connection:
                        found[int(path.name)] = int(line["data"], 16)
    return found


def is_told(connection: sockets.Connection) -> bool:
    """Return whether an epoll has something to say of a connection to a thread that asks: it would not sleep."""
    told = False
    for epoll, data in watching(connection).items():
        with select.epoll.fromfd(os.dup(epoll)) as asked:
            told |= any(number & 0xFFFFFFFF == data & 0xFFFFFFFF for number, _ in asked.poll(0))
    return told


def for_good(is_so: Callable[[], bool]) -> bool:
    """Return whether something comes to be so, and is so at each of several looks then."""
    patience, count = Patience(LIMIT_SECONDS), 0
    while count < IN_A_ROW and not patience.is_over:
        count = count + 1 if is_so() else 0
        time.sleep(0.002)
    return count == IN_A_ROW


def goes_on_without(folder: Path) -> tuple[float, bool, bool, bool]:
    """Lose a peer whose message has nowhere to go, and go on in a world without it.

    Returns a sum over that world, and of the lost peer's connection whether nobody is told of it there, whether gloo's
    epoll knows it still, and whether gloo closes it.
    """
    world = join_world("cpu", threads=1)
    before = sockets._connections()
    with sockets.noted("gloo"):
        group = dist.new_group()
    peers = sockets._connections() - before
    room = torch.zeros(1)
    if world.rank == DIES:
        dist.barrier()
        for other in (0, 2):
            dist.send(room, other, group)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.irecv(room, DIES, group)  # nobody holds what it is to be told by: as when a collective has failed meanwhile
    dist.barrier()
    abort_groups()
    assert for_good(lambda: sum(map(is_told, peers)) == 1), "gloo is told of it for ever"
    (dead,) = filter(is_told, peers)
    place = Place(world.rank // 2, 2, world.rank // 2, 2, f"file://{folder}/next")
    following = join_next(world, place)
    summed = following.sum([1.0])[0]
    is_quiet, is_there = for_good(lambda: not is_told(dead)), bool(watching(dead))
    del group
    gc.collect()  # gloo ends the process where its epoll does not know the connection
    is_closed = for_good(lambda: dead not in sockets._connections())
    following.wait()
    return summed, is_quiet, is_there, is_closed


def test_a_message_that_has_nowhere_to_go_keeps_no_core_busy_in_the_next_world(tmp_path: Path) -> None:
    """gloo (torch 2.13) reads such a connection no more, and its thread was told of it at once for ever."""
    results = run_ranks(goes_on_without, 3, tmp_path, may_die={DIES})
    assert [results[0], results[2]] == [(2.0, True, True, True)] * 2
