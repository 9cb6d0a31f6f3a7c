"""What rank 0 finds out while the other ranks wait for it, however long it takes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import paceline.errors
from paceline.errors import ConfigError, ConfigErrors, OutOfMemory, PacelineError
from paceline.run.process.world import World
from paceline.run.record.recorder import describe

BEAT_SECONDS = 20.0  # a wait of this length is far from the time-out of a collective
LIMIT_SECONDS = 3600.0  # longer than any tokenising and proof: rank 0 must be stuck


def from_first(world: World, work: Callable[[], str]) -> str:
    """Return what `work()` returns on rank 0, on every rank; an error of it is raised on every rank.

    Rank 0 sends a sign of life every few seconds, so that the others wait as long as it works and no longer.
    """
    if world.size == 1:
        return work()
    if not world.is_first:
        _wait(world.device, time.monotonic() + LIMIT_SECONDS)
        told = json.loads(world.share(""))
        if "error" in told:
            raise as_error(told["error"])
        return str(told["text"])
    ended = threading.Event()
    beats = threading.Thread(target=_beat, args=(world.device, ended), name="paceline-alive", daemon=True)
    beats.start()
    told = {"error": {"what": "rank 0 ended", "because": "", "try": "", "exit_code": 1}}
    try:
        told = {"text": work()}
    except BaseException as error:
        details, code = describe(error)
        told = {"error": {**details, "exit_code": code}}
        raise
    finally:
        ended.set()
        beats.join()
        _send(world.device, True)
        world.share(json.dumps(told))
    return str(told["text"])


def _beat(device: torch.device, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        _send(device, False)


def _send(device: torch.device, over: bool) -> None:
    dist.broadcast(torch.tensor([int(over)], device=device), src=0)


def _wait(device: torch.device, latest: float) -> None:
    """Return when rank 0 has done its work."""
    over = torch.tensor([0], device=device)
    while not over.item():
        if time.monotonic() > latest:
            because = f"it has planned and proved for more than {LIMIT_SECONDS / 3600:.0f} h"
            raise PacelineError("rank 0 does not come to an end", because, "--no-verify, or look at what rank 0 does")
        dist.broadcast(over, src=0)


def as_error(details: Mapping[str, Any]) -> PacelineError:
    """Return the error of another process as this one's."""
    kind = getattr(paceline.errors, str(details.get("error", "")), PacelineError)
    if not (isinstance(kind, type) and issubclass(kind, PacelineError)):
        kind = PacelineError
    error = PacelineError.__new__(kind)
    PacelineError.__init__(error, str(details["what"]), str(details["because"]), str(details["try"]))
    error.exit_code, error.names_ranks = int(details["exit_code"]), bool(details.get("names_ranks"))
    if isinstance(error, OutOfMemory):
        error.evidence = dict(details.get("evidence") or {})
    elif isinstance(error, ConfigErrors):
        each = map(as_error, details.get("errors") or ())
        error.errors = tuple(one for one in each if isinstance(one, ConfigError))
    return error
