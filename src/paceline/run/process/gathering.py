"""Ranks come together in the store before the group of a world is made, for which gloo would wait.

A rank may die before it has come. In a store torch waits for its address until a time-out, and nothing ends that wait
sooner; here the supervisor's word that a peer has gone does, and its own end. So survivors stand by for the
next world at once. A rank that hangs before it has come is waited for as long as torch would.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from paceline.supervise.control import ABORT_NAME, CONTROL_VARIABLE
from paceline.supervise.parent import has_lost_parent
from paceline.supervise.supervisor import ERROR_FOLDER
from paceline.units import format_seconds

COME, ALL = "paceline/come", "paceline/all"  # how many ranks have come; that all have
SHORTEST_SECONDS, LONGEST_SECONDS = 0.001, 0.05  # between two looks, of which the first ones are quick
MOST_LOOKS = 20_000  # a second, of all ranks: in a larger world each looks more rarely
KNOCK_SECONDS = 1.0  # for the machine of a store to answer
CONNECT_SECONDS = 2.0  # for the process that serves it, at the first attempt


def word_of_supervisor() -> Path | None:
    """Return the file by which the supervisor says that a peer has gone; None where nobody may stand by."""
    folder = os.environ.get(ERROR_FOLDER)
    return Path(folder) / ABORT_NAME if folder and CONTROL_VARIABLE in os.environ else None


def come_together(store: dist.Store, size: int, word: Path, within: timedelta) -> None:
    """Return once every rank of a world has come. Raises torch's DistError after the word, or `within`."""
    if store.add(COME, 1) == size:
        store.set(ALL, "yes")
    _wait_for(lambda: store.check([ALL]), word, within, max(LONGEST_SECONDS, size / MOST_LOOKS))


def served_store(host: str, port: int, word: Path, within: timedelta) -> dist.TCPStore:
    """Return a client of the store there, once it is served. Raises torch's DistError after the word, or `within`.

    Torch connects to an address until the time-out of the store, and nothing ends that sooner. Who has answered may go
    before torch connects: its time is short at first, and who has gone by then is waited for no longer.
    """
    found, patience = list[dist.TCPStore](), CONNECT_SECONDS

    def has_connected() -> bool:
        nonlocal patience
        if not _answers(host, port):
            return False
        seconds, patience = timedelta(seconds=patience), min(2 * patience, within.total_seconds())
        try:
            found.append(dist.TCPStore(host, port, None, False, timeout=seconds, wait_for_workers=False))
        except dist.DistError:
            if _answers(host, port):  # slowly, as where it serves many
                return False
            raise
        return True

    _wait_for(has_connected, word, within, LONGEST_SECONDS)
    found[0].set_timeout(within)
    return found[0]


def is_served(store: dist.Store) -> bool:
    """Return whether the process that serves a store is there still: torch prints a page for a word to one that is not.

    Files and memory are served by nobody.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return not isinstance(store, dist.TCPStore) or _answers(store.host, store.port)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), KNOCK_SECONDS).close()
    except OSError:
        return False
    return True


def _wait_for(is_so: Callable[[], bool], word: Path, within: timedelta, longest_seconds: float) -> None:
    seconds, began = SHORTEST_SECONDS, time.monotonic()
    while not is_so():
        if word.exists():
            raise dist.DistError("a rank of the world has gone before all had come together")
        if has_lost_parent():  # who else was to come may never have been started, and nobody would tell
            raise dist.DistError("the supervisor has gone before all had come together")
        if time.monotonic() - began > within.total_seconds():
            raise dist.DistError(f"a rank of the world has not come within {format_seconds(within.total_seconds())}")
        time.sleep(seconds)
        seconds = min(1.5 * seconds, longest_seconds)
