"""The process of one rank: `python -m paceline.launch.worker SPEC`, started by the supervisor or a scheduler.

SPEC is a JSON file of a spec, or a file of a task that was pickled by `paceline.fit` because it holds objects.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from paceline.cluster.here.collector import collector_at_rest
from paceline.errors import PacelineError, Requeue, first_line
from paceline.launch.here import place_here
from paceline.run.process.handover import take_over
from paceline.said import flush_said, say_own_warnings
from paceline.supervise.forked import leave
from paceline.supervise.groups import end_own_group
from paceline.supervise.logs.rank import into_log
from paceline.supervise.parent import end_with_parent
from paceline.supervise.supervisor import report_error
from paceline.supervise.told.brief import take_brief


def guarded(work: Callable[[], object]) -> int:
    """Call `work()` and return this process's exit code, leaving errors where the supervisor reads them."""
    from paceline.run.record.recorder import describe, is_echo

    say_own_warnings()
    try:
        work()
        return 0
    except Requeue as stop:
        return stop.exit_code
    except BaseException as error:
        details, code = describe(error)
        echo = is_echo(error)
        if not isinstance(error, PacelineError | KeyboardInterrupt) and not echo:
            details["traceback"] = traceback.format_exc()
        report_error({**details, "exit_code": code}, cause=not echo)
        return code


def main() -> int:
    """Run this rank to the end of the task and return its exit code."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as any stop signal, until the run hears them: who sent it knows why
    into_log()
    try:
        import_all()
    except Exception as error:  # of a library that cannot be loaded, or no memory for it
        what = f"a rank cannot import what it needs: {type(error).__name__}: {first_line(error)}"
        told = PacelineError(what, "torch or a library of torch's does not load", "`paceline doctor`")
        report_error({**told.as_dict(), "traceback": traceback.format_exc()}, cause=True)
        return told.exit_code
    return guarded(lambda: _train(Path(sys.argv[1])))


def import_all() -> None:
    """Import what a rank needs, where it was not forked from a process that has; no garbage is looked for meanwhile."""
    if "paceline.launch.run" not in sys.modules:
        with collector_at_rest():
            import paceline.launch.run  # noqa: F401


def _train(path: Path) -> None:
    from paceline.launch.run import train_here
    from paceline.run.process.alike import begin_alike

    begin_alike()
    brief = take_brief()
    assert brief is not None, "a supervisor starts this process, and leaves a brief"
    if brief.plan.layout.devices > brief.plan.layout.dp_replicate and "torch._dynamo" not in sys.modules:
        with collector_at_rest():
            import torch._dynamo  # noqa: F401 (the first use of a spread tensor imports it; plain copies have none)
    train_here(take_over(path), brief, place_here(os.environ))


if __name__ == "__main__":
    supervisor = os.getppid()
    code = main()
    flush_said()
    end_own_group(supervisor)
    leave(code)  # a peer may be dead: nothing is waited for
