"""Start: plan, price, prove, train and report a spec. What `paceline train` and `paceline.fit` have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import MissingExtra, StorageError, VerificationFailed
from paceline.plan.explain import headline_lines
from paceline.plan.session import Planned, plan_task
from paceline.report.build import build_report, report_lines, write_report
from paceline.run.brief import BRIEF_VARIABLE, make_brief
from paceline.run.journal import mark_end
from paceline.run.recovery.supervisor import Outcome, explain, supervise
from paceline.run.world_place import ranks_from_environment
from paceline.spec import Spec, spec_to_dict
from paceline.verify.start import verify_planned, verify_text

Say = Callable[[str], None]


def train(spec: Spec, say: Say = print) -> int:
    """Train the spec on this machine's devices, or as one rank of torchrun's or srun's; return the exit code.

    Raises the PacelineError that stopped it where this process knows it.
    """
    run_dir = run_directory(spec)
    if ranks_from_environment(os.environ) is not None:
        from paceline.run.run import train_here

        train_here(spec)
        return 0
    _check_writable(run_dir)
    planned = plan_task(spec, say=say)
    for line in headline_lines(planned):
        say(line)
    verified = _verify(planned, say)
    outcome = _run(spec, planned, verified)
    if outcome.error is not None:
        mark_end(run_dir, outcome.exit_code, outcome.error)
    with contextlib.suppress(StorageError):  # a run that failed before its first record has nothing to report
        write_report(run_dir)
        for line in report_lines(build_report(run_dir)):
            say(line)
    explain(outcome)
    return outcome.exit_code
