"""Traces steps of a job that runs, without stopping it, and says where their time went.

RUN is the run's directory. The files, RUN/traces/steps-A-B/rank-K.json.gz, open in Perfetto (ui.perfetto.dev) or in
chrome://tracing; phases of a step and collectives have Paceline's names there. SIGUSR2 to the process that started the
run asks for the next three steps.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from paceline.cli.json.shapes import TRACE
from paceline.cli.output import print_json
from paceline.cli.parser import whole
from paceline.errors import ConfigError

EXAMPLE = "paceline trace runs/stdlib-code --steps 100..102\npaceline trace runs/stdlib-code --summary"
EXAMPLE_NEEDS = "a job that trains"
CODES = (5, 74)
WAIT_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline trace`."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the directory of a run that trains")
    parser.add_argument(
        "--steps", metavar="STEPS", default="3", help="which steps, such as 100..102, or how many of the next ones (3)"
    )
    parser.add_argument("--ranks", metavar="RANKS", default="", help="only these ranks, such as 0,3 (default: all)")
    parser.add_argument(
        "--memory", action="store_true", help="trace allocations too, and name the kinds of tensor that grew"
    )
    parser.add_argument("--summary", action="store_true", help="ask for nothing: say what the newest trace tells")
    parser.add_argument("--no-wait", action="store_true", help="ask, and do not wait for the files")
    parser.add_argument(
        "--limit", metavar="SECONDS", type=whole, default=int(WAIT_SECONDS), help="how long to wait (600)"
    )


def execute(options: argparse.Namespace) -> int:
    """Run `paceline trace`."""
    from paceline.observe.traces.texts import trace_lines
    from paceline.said import say_line
    from paceline.session.verbs.tracing import summaries, take_trace
    from paceline.spec.watch.traced import TraceRequest

    folder = None
    if not options.summary:
        first, last = _steps(options.steps)
        request = TraceRequest(last, first, _ranks(options.ranks), options.memory)
        say = (lambda line: None) if options.json else say_line
        folder = take_trace(options.run_dir, request, 0 if options.no_wait else options.limit, say)
    found = summaries(options.run_dir, folder) if folder is not None or options.summary else []
    if options.json:
        print_json({"run_dir": str(options.run_dir), "asked": not options.summary, "traces": found}, TRACE)
        return 0
    for each in found:
        print("\n".join([*trace_lines(each), f"  {each.path}"]))
    if not found:
        print("trace    asked for; `paceline trace RUN --summary` says what is in it when the steps are made")
    return 0


def _steps(text: str) -> tuple[int | None, int]:
    """Return the first and the last step; without a first one the last is how many."""
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    if text.isdigit() and int(text) >= 1:
        return None, int(text)
    raise ConfigError(
        f"--steps {text}", "steps are counted from 1, the first one before the last", "--steps 100..102, or --steps 3"
    )


def _ranks(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"--ranks {text}", "ranks are numbers from 0, with commas between them", "--ranks 0,3")
    return tuple(sorted({int(word) for word in text.split(",")}))
