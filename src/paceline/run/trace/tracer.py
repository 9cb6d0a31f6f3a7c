"""The tracer: takes a trace of steps of a job that runs, when the run's directory asks for one.

A thread looks for the request; a step that is not traced pays for a comparison. Ranks do not talk about it: they read
the same file, and the steps in it are ahead of all of them. Where a request names no first step rank 0 names one.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.run.process.world import World
from paceline.run.survive.points import Points
from paceline.run.trace.naming import PHASES, PREFIX, named
from paceline.run.trace.tensors import HeldBytes, grown, tensors_held
from paceline.said import say_line
from paceline.spec.journal.bound import TraceRecord
from paceline.spec.watch.traced import TraceRequest, ask_for_trace, requested_trace, trace_file

LOOK_SECONDS = 0.5  # between two looks for a request
AHEAD_SECONDS = 3.0  # that ranks are given to see a request, on a shared file system too
LEAST_AHEAD = 2  # steps


class Tracer:
    """Traces on this rank. `at(step, ...)` is called before the batch of each step is read."""

    def __init__(self, run_dir: Path, world: World, told: Callable[[TraceRecord], None]) -> None:
        """`told` is called on rank 0 with what was traced."""
        self._dir, self._world, self._told = run_dir, world, told
        self._wanted: TraceRequest | None = None
        self._trace: _Trace | None = None
        self._step, self._stepped_at, self._step_seconds = 0, time.monotonic(), math.nan
        self._waited = 0.0  # on this rank, for the trace under way
        self._seen = 0  # the number of the newest request that was looked at
        self._ended, self._writers = threading.Event(), list[threading.Thread]()

    def watch(self, next_step: int) -> None:
        """Look for requests from now on; steps before `next_step` are not traced any more."""
        self._step = next_step
        self._ended.clear()
        self._look_once()
        threading.Thread(target=self._look, name="paceline-trace", daemon=True).start()

    def at(self, step: int, world: World, points: Points, model: nn.Module) -> None:
        """Begin or end a trace where that is due before this step."""
        now = time.monotonic()
        self._step_seconds, self._stepped_at = now - self._stepped_at, now
        self._step, self._world = step, world
        wanted = self._wanted
        if wanted is None or wanted.first is None:
            return
        if self._trace is not None and not self._trace.is_of(points):  # the world was formed anew
            self._abandon()
        elif step > wanted.last:
            self._end(model)
        elif self._trace is not None:
            self._trace.step_begins(step)
        elif step >= wanted.first and wanted.is_of(world.rank):
            began = time.perf_counter()
            self._trace = _Trace(wanted, step, points, model if wanted.memory else None)
            self._waited = time.perf_counter() - began

    @property
    def is_tracing(self) -> bool:
        """Whether steps are traced now, or written: on rank 0 also those of other ranks. That takes memory."""
        wanted = self._wanted
        is_due = wanted is not None and wanted.first is not None and self._step >= wanted.first
        return is_due or any(writer.is_alive() for writer in self._writers)

    def close(self, model: nn.Module | None = None) -> None:
        """End a trace under way, and wait until all are written. Without a model it is given up: the run has failed."""
        self._ended.set()
        if self._trace is not None and model is not None:
            self._end(model)
        elif self._trace is not None:
            self._abandon()
        while self._writers:
            self._writers.pop().join()

    # ---- the request -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look_once()

    def _look_once(self) -> None:
        request = requested_trace(self._dir) if self._trace is None else None
        if request is None or request.number == self._seen:
            return
        if request.first is None:
            if self._world.is_first:
                with contextlib.suppress(
                    OSError
                ):  # a disk that takes nothing costs the trace; the next look tries again
                    ask_for_trace(self._dir, self._with_steps(request))
            return
        self._seen = request.number
        is_done = trace_file(request.folder(self._dir), self._world.rank).exists()
        if request.last >= self._step and not is_done and (request.is_of(self._world.rank) or self._world.is_first):
            self._wanted = request

    def _with_steps(self, request: TraceRequest) -> TraceRequest:
        """Return a request with steps that every rank comes to after it has seen them."""
        seconds = self._step_seconds
        ahead = math.ceil(AHEAD_SECONDS / seconds) if math.isfinite(seconds) and seconds > 0 else 0
        first = self._step + max(LEAST_AHEAD, ahead)
        return TraceRequest(first + request.last - 1, first, request.ranks, request.memory, request.by, request.number)

    # ---- a trace ---------------------------------------------------------------------------------------------------

    def _end(self, model: nn.Module) -> None:
        """Write what was traced; on rank 0 tell that it was, whichever rank traced."""
        wanted, trace, rank = self._wanted, self._trace, self._world.rank
        self._wanted = self._trace = None
        assert wanted is not None and wanted.first is not None
        first, last, began, folder = wanted.first, wanted.last, time.perf_counter(), wanted.folder(self._dir)
        if trace is not None:
            first, last = trace.first, trace.last
            about = {"run": str(self._dir), "rank": rank, "world_size": self._world.size, "first": first, "last": last,
                     "device": self._world.device.type, **trace.end(model)}  # fmt: skip
            writer = threading.Thread(target=_write, args=(trace, folder, rank, about), name="paceline-trace-writer")
            writer.start()
            self._writers.append(writer)
        if self._world.is_first and (trace is not None or not wanted.is_of(rank)):
            seconds = self._waited + time.perf_counter() - began
            self._told(TraceRecord(last, first, last, wanted.ranks, str(folder), wanted.by, seconds))

    def _abandon(self) -> None:
        assert self._trace is not None
        self._trace.stop()
        self._wanted = self._trace = None


class _Trace:
    """A trace under way: torch's profiler, the phases of each step as ranges, and tensors counted where asked for."""

    def __init__(self, wanted: TraceRequest, step: int, points: Points, model: nn.Module | None) -> None:
        self.first = self.last = step
        self._points = points
        self._before: HeldBytes | None = tensors_held(model) if model is not None else None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities, profile_memory=wanted.memory)
        self._profiler.start()
        self._ranges: list[Any] = []
        self.step_begins(step)
        points.tell_also(self._reached)

    def step_begins(self, step: int) -> None:
        """Begin the range of a step."""
        self.last = step
        self._leave(0)
        self._enter(f"{PREFIX}step {step}")

    def is_of(self, points: Points) -> bool:
        """Return whether these are the points whose phases it has."""
        return points is self._points

    def stop(self) -> None:
        """Trace no more."""
        self._points.tell_no_more(self._reached)
        self._leave(0)
        self._profiler.stop()

    def end(self, model: nn.Module) -> dict[str, object]:
        """Stop, and return what was counted."""
        self.stop()
        if self._before is None:
            return {}
        found: dict[str, object] = {"grown": grown(self._before, tensors_held(model))}
        if torch.cuda.is_available():
            found["cuda_memory"] = torch.cuda.memory_stats()
        return found

    def export(self, path: Path) -> None:
        """Write what torch has of it."""
        self._profiler.export_chrome_trace(str(path))

    def _reached(self, phase: str, step: int) -> None:
        self._leave(1)
        if phase in PHASES:
            self._enter(f"{PREFIX}{PHASES[phase]}")

    def _enter(self, name: str) -> None:
        entered = torch.profiler.record_function(name)
        entered.__enter__()
        self._ranges.append(entered)

    def _leave(self, depth: int) -> None:
        while len(self._ranges) > depth:
            self._ranges.pop().__exit__(None, None, None)


def _write(trace: _Trace, folder: Path, rank: int, about: dict[str, object]) -> None:
    """Write a rank's file, whole or not at all. A disk that does not take it costs the trace, and a line says so."""
    path = trace_file(folder, rank)
    raw = path.with_name(f"{path.name}.raw")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trace.export(raw)
        found = json.loads(raw.read_text(errors="replace"))
        found["traceEvents"] = [named(event) for event in found.get("traceEvents", ())]
        found["paceline"] = about
        part = path.with_name(f"{path.name}.part")
        with gzip.open(part, "wt", compresslevel=3) as file:
            json.dump(found, file)
        part.replace(path)
    except (OSError, ValueError, RuntimeError) as error:
        say_line(f"warning  the trace of rank {rank} was not written: {error}")
    finally:
        raw.unlink(missing_ok=True)
