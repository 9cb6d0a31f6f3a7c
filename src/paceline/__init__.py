"""Paceline plans, prices, proves and runs the training of PyTorch models on however many devices there are.

    run = paceline.Run(task, plan="auto")
    for batch in run:
        stats = run.step(batch)

The verbs of the command line are functions here: `paceline.plan("task.toml")`. Names are imported when they are first
used, and what functions need when they are called: `import paceline` imports neither torch nor numpy.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.version import __version__ as __version__

if sys.version_info < (3, 11):  # noqa: UP036 - a file tree needs no pip, which would have refused it
    _OLD = "Paceline %s needs Python 3.11 or later, and this is %s: python3.11 -m venv .venv, and install it there"
    if sys.argv[0] == "-m" or sys.argv[0].endswith("paceline"):
        print(_OLD % (__version__, sys.version.split()[0]), file=sys.stderr)
        sys.exit(2)
    raise ImportError(_OLD % (__version__, sys.version.split()[0]))

# Five rooms have the name of a verb. Python gives the name of a package to the package once, when it is first imported:
# these are empty and imported here, so that the names are the verbs' whatever is imported later.
# `from paceline.plan.planned import plan_task` finds the room all the same.
for _room in ("backtest", "plan", "report", "simulate", "verify"):
    import_module(f"paceline.{_room}")

from paceline.cluster.here.collector import collector_at_rest  # noqa: E402
from paceline.cluster.here.waiting import waiting  # noqa: E402
from paceline.session.verbs.public import backtest, bill, load_run, plan, report, simulate, verify  # noqa: E402

if TYPE_CHECKING:
    from paceline.errors import PacelineError
    from paceline.session.fit import fit
    from paceline.session.run import Run
    from paceline.spec.cluster import ClusterSpec
    from paceline.spec.plan import PlanSpec
    from paceline.spec.run import RunSpec
    from paceline.spec.steps.update import GroupSpec, OptimizerSpec, ScheduleSpec
    from paceline.spec.task import DataSpec, ModelSpec, Task, TurnSpec
    from paceline.units import Amount
    from paceline.verify.loops.adapter import verify_loop

_WHERE = {
    "Task": "paceline.spec.task",
    "ModelSpec": "paceline.spec.task",
    "DataSpec": "paceline.spec.task",
    "OptimizerSpec": "paceline.spec.steps.update",
    "ScheduleSpec": "paceline.spec.steps.update",
    "GroupSpec": "paceline.spec.steps.update",
    "TurnSpec": "paceline.spec.task",
    "ClusterSpec": "paceline.spec.cluster",
    "PlanSpec": "paceline.spec.plan",
    "RunSpec": "paceline.spec.run",
    "Run": "paceline.session.run",
    "fit": "paceline.session.fit",
    "verify_loop": "paceline.verify.loops.adapter",
    "Amount": "paceline.units",
    "PacelineError": "paceline.errors",
}

__all__ = [
    "Amount",
    "ClusterSpec",
    "DataSpec",
    "GroupSpec",
    "ModelSpec",
    "OptimizerSpec",
    "PacelineError",
    "PlanSpec",
    "Run",
    "RunSpec",
    "ScheduleSpec",
    "Task",
    "TurnSpec",
    "backtest",
    "bill",
    "fit",
    "load_run",
    "plan",
    "report",
    "simulate",
    "verify",
    "verify_loop",
]

_TRAINS = ("Run", "fit")  # in this very process, where one device is all


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        if name in _TRAINS and "torch" not in sys.modules:
            os.environ.update(waiting(os.environ))  # of a script that computes by itself: read as torch is loaded
        with nullcontext() if _WHERE[name] in sys.modules else collector_at_rest():
            return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
