"""The watch as a process beside a run, which outlives it: `python -m paceline.observe.alerts.process RUN_DIR`.

Its standard input has a line of JSON with the run's options, and then one for each thing that its parent tells. Where
the parent is gone without a word, that is an alert.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.config.build import build, mapping_layer
from paceline.config.declared import declared_table, from_file
from paceline.config.problems import Problems
from paceline.observe.alerts.sinks.make import sinks_here
from paceline.observe.alerts.watch import LOOK_SECONDS, SINK_SECONDS, AlertWatch
from paceline.observe.alerts.watch_of_run import watch_of
from paceline.patience import Patience
from paceline.said import say_line
from paceline.spec.run import RunSpec
from paceline.supervise.nodes.meeting import Meeting, find_meeting
from paceline.supervise.parent import name_process
from paceline.supervise.ranks_lost import RanksLost

TAKEN_OVER_SECONDS = 30.0  # at least, that another node has to take a lost coordinator's place
LOST, OVER = "lost", "over"


def main() -> int:
    """Watch the run that the command line names until it is over, and return 0."""
    name_process("paceline-alerts")
    told = json.loads(sys.stdin.readline())
    run = run_from_plain(told["run"])
    run_dir = Path(sys.argv[1])
    before = find_meeting(run_dir)
    watch = watch_of(run, run_dir, str(told["name"]), sinks_here(run.alerts, _say), _say, bool(told["goes_on"]))
    watch.watch()
    if not _followed(watch, int(told["parent"])):
        watch.pause()
        if run.nodes.count > 1 and _is_taken_over(run_dir, before, max(TAKEN_OVER_SECONDS, 3 * run.nodes.lost_after)):
            watch.hand_over(SINK_SECONDS)
            return 0
        watch.gone()
    watch.close(SINK_SECONDS)
    return 0


def _is_taken_over(run_dir: Path, before: Meeting | None, seconds: float) -> bool:
    """Return whether another node coordinates the run within so many seconds: it watches the run, and tells of it."""
    patience = Patience(seconds)
    while not patience.is_over:
        if (there := find_meeting(run_dir)) is not None and there.follows(before):
            return True
        time.sleep(LOOK_SECONDS)  # for a node to be elected
    return False


def run_from_plain(values: Mapping[str, object]) -> RunSpec:
    """Return the run's options of what `to_plain` made of them."""
    table, problems = declared_table(RunSpec), Problems()
    with from_file():
        run, _ = build(table, mapping_layer(table, values, lambda key: "its parent"), problems)
    problems.raise_all()
    assert isinstance(run, RunSpec)
    return run


def _followed(watch: AlertWatch, parent: int) -> bool:
    """Pass on what the parent tells; return whether it said that the run is over, False where it is gone."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)

    threading.Thread(target=read, name="paceline-told", daemon=True).start()
    while True:
        try:
            told = json.loads(lines.get(timeout=LOOK_SECONDS))
        except queue.Empty:
            if os.getppid() != parent:
                return False
            continue
        if LOST in told:
            watch.tell(RanksLost(**{**told[LOST], "ranks": tuple(told[LOST]["ranks"])}))
        if OVER in told:
            watch.ended(**told[OVER])
            return True


def _say(line: str) -> None:
    try:
        say_line(line)
    except (OSError, ValueError):  # who listened is gone, and the sinks are not
        return


if __name__ == "__main__":
    sys.exit(main())
