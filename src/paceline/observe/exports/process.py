"""The process beside a run that delivers its journal to other tools: `python -m paceline.observe.exports.process`.

Its standard input says what to do, in one line of JSON, and ends when the run does; then it has a while to deliver the
rest. One process at a time delivers a run: a second one waits for the first, which is still at the end before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.observe.exports.cursor import FOLDER
from paceline.observe.exports.deliver import Delivery
from paceline.observe.exports.logged import open_wandb
from paceline.observe.exports.mlflow import MlflowSink
from paceline.observe.exports.openmetrics import OpenMetricsSink
from paceline.observe.exports.sink import ExportedRun, OpenExport
from paceline.observe.exports.trackio import open_trackio
from paceline.spec.watch.exports import ExportsSpec

SINKS: dict[str, OpenExport] = {
    "mlflow": MlflowSink, "trackio": open_trackio, "wandb": open_wandb, "openmetrics": OpenMetricsSink,
}  # fmt: skip
REST_SECONDS = 60.0  # that sinks have for the rest when the run is over


def deliver_until(
    run: ExportedRun, over: Callable[[], object], say: Callable[[str], None], rest_seconds: float
) -> list[str]:
    """Deliver a run's journal until `over` returns, and what is left then; return the sinks that have not got all."""
    run = dataclasses.replace(run, say=say)
    with _alone(run.dir):
        deliveries = [Delivery(name, run, SINKS[name], say).start() for name in run.exports.names]
        over()
        for each in deliveries:
            each.finish()
        until = time.monotonic() + rest_seconds
        ended = [each.join(max(0.0, until - time.monotonic())) for each in deliveries]
        return [each.name for each, is_over in zip(deliveries, ended, strict=True) if not is_over or not each.has_all]


class _alone:
    """Holds RUN/exports/lock: who waits for it waits for whoever delivers the run at the moment."""

    def __init__(self, run_dir: Path) -> None:
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / FOLDER / "lock").open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        self._file.close()


def main() -> None:
    """Deliver as standard input says."""
    told = json.loads(sys.stdin.readline())
    run = ExportedRun(Path(told["dir"]), told["name"], ExportsSpec(**told["exports"]))
    speaking, heard = threading.Lock(), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what tools print is not the run's to say

    def say(line: str) -> None:
        with speaking, contextlib.suppress(OSError):  # whoever listened may have gone
            print(line, file=heard, flush=True)

    deliver_until(run, sys.stdin.read, say, REST_SECONDS)
    os._exit(0)  # a sink that hangs in a thread would hold the process


if __name__ == "__main__":
    main()
