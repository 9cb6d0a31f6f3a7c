"""Rounds: contenders stay alive in processes of their own, and one at a time is let run for a few steps.

A contender's loop calls `Pacer.step_done` after every step and is held there until its next turn. What disturbs the
machine for longer than a round then disturbs all contenders alike, and the ratios of one round are free of it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
ROUND_SECONDS = 300.0


@dataclass(frozen=True)
class Turn:
    """One rank's part of a round: the wall and CPU time of its steps and its loss in the last of them."""

    seconds: float
    cpu_seconds: float
    loss: float


class Pacer:
    """What holds a contender's loop between its turns. Lives in the contender's process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._left = 0
        self._began = self._cpu_began = 0.0

    def ready(self) -> None:
        """Say that everything is built, and wait for the first turn. Call it right before the loop."""
        self._pipe.send("ready")
        self._wait()

    def step_done(self, loss: Callable[[], float]) -> bool:
        """Count a step; at the end of a turn report it and wait for the next. False means that there is none."""
        self._left -= 1
        if self._left > 0:
            return True
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        self._pipe.send(Turn(seconds, cpu_seconds, loss()))
        return self._wait()

    def _wait(self) -> bool:
        self._left = self._pipe.recv()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        return self._left > 0


class Contender:
    """A loop that runs in `processes` ranks, each in its own process. Starts at once; `ready` waits for it."""

    def __init__(
        self, name: str, loop: Callable[..., None], arguments: dict[str, Any], processes: int, port: int, folder: Path
    ) -> None:
        self.name = name
        self._logs = [folder / f"{name}-{rank}.log" for rank in range(processes)]
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(processes):
            here, there = spawn.Pipe()
            # A cache of its own: a plan must not depend on what was probed on this machine before.
            environment = {**_rank_environment(rank, processes, port), "XDG_CACHE_HOME": str(folder / "cache")}
            work = (loop, arguments, environment, there, self._logs[rank])
            process = spawn.Process(target=_run_rank, args=work, name=f"{name}-{rank}", daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def ready(self) -> None:
        """Return once every rank is built and waits for its first turn."""
        self._answers(START_SECONDS)

    def turn(self, steps: int) -> Turn:
        """Let all ranks run `steps` steps; return the time of the slowest, all CPU time, the mean loss."""
        for pipe in self._pipes:
            pipe.send(steps)
        turns = self._answers(ROUND_SECONDS)
        loss = sum(t.loss for t in turns) / len(turns)
        return Turn(max(t.seconds for t in turns), sum(t.cpu_seconds for t in turns), loss)

    def close(self) -> None:
        """End the contender's processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self, timeout_seconds: float) -> list[Any]:
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._pipes):
            silent = [pipe for pipe in self._pipes if pipe not in answers]
            arrived = wait(silent, timeout_seconds)
            try:
                answers.update({pipe: pipe.recv() for pipe in arrived if isinstance(pipe, Connection)})
            except EOFError:
                arrived = []
            if not arrived:
                logs = "\n".join(log.read_text(errors="replace")[-3000:] for log in self._logs if log.exists())
                raise RuntimeError(f"contender '{self.name}' ended or hangs; its last words:\n{logs}")
        return [answers[pipe] for pipe in self._pipes]


def _rank_environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return what torchrun would set for the rank; nothing for a single process."""
    if processes == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "benchmark",  # how Lightning knows that its ranks were started for it
    }


def _run_rank(
    loop: Callable[..., None], arguments: dict[str, Any], environment: dict[str, str], pipe: Connection, log: Path
) -> None:
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    loop(Pacer(pipe), **arguments)
