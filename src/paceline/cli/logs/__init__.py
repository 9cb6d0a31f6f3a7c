"""What the ranks of a run have printed: the log of a rank, or the logs of all ranks by the moments of lines.

What failed first comes first, with its traceback. Without `--rank` or `--merge` it is rank 0's log.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import LOGS
from paceline.cli.output import print_json
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.observe.logs.read import FirstFailure, LogLine

EXAMPLE = "paceline logs runs/stdlib-code --merge\npaceline logs runs/stdlib-code --rank 0 --last 20"
CODES = (74,)
LOOK_SECONDS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline logs`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's directory: the one that holds `logs`")
    parser.add_argument("--rank", metavar="K", type=int, action="append", help="a rank; may be given several times")
    parser.add_argument("--merge", action="store_true", help="all ranks, by the moments of their lines")
    parser.add_argument("--last", metavar="N", type=int, help="of the lines the last so many")
    parser.add_argument("--follow", action="store_true", help="go on with what is added, until Ctrl-C")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline logs`."""
    from paceline.observe.logs.read import LogFollower, first_failure, merged, ranks_with_logs
    from paceline.session.verbs.run_folder import open_run

    if options.follow and options.json:
        raise ConfigError("--follow with --json", "one object is written, and what follows has no end", "one of them")
    if options.last is not None and options.last < 1:
        raise ConfigError(f"--last {options.last}", "that is no line", "--last 100")
    run_dir = options.run_dir
    there = ranks_with_logs(run_dir) or ranks_with_logs(open_run(run_dir).dir)
    asked = options.rank or (there if options.merge else there[:1])
    missing = [rank for rank in asked if rank not in there]
    if (missing or not there) and not options.follow:
        raise ConfigError(
            f"{run_dir} has no log of {f'rank {missing[0]}' if missing else 'any rank'}",
            f"logs are there of ranks {', '.join(map(str, there))}" if there else "run.observe.logs may have been off",
            f"--rank {there[0]}" if there else "what a rank says of its end is in `paceline report`",
        )
    failure = first_failure(run_dir)
    lines = LogFollower(run_dir, options.rank or (None if options.merge else [0])) if options.follow else None
    shown = lines.new() if lines else list(merged(run_dir, asked))
    shown = shown[-options.last :] if options.last else shown
    if options.json:
        failed = dataclasses.asdict(failure) if failure else None
        print_json({"failure": failed, "ranks": there, "lines": [dataclasses.asdict(line) for line in shown]}, LOGS)
        return 0
    if failure is not None:
        print(failure_text(failure))
    several = len(asked) > 1 or (options.merge and not options.rank)
    _show(shown, several)
    while lines is not None:
        time.sleep(LOOK_SECONDS)
        _show(lines.new(), several)
    return 0


def failure_text(failure: FirstFailure) -> str:
    """Return what failed first, as it is shown before all logs."""
    who = "the run" if failure.rank is None else f"rank {failure.rank}"
    because = f": {failure.because}" if failure.because else ""
    trace = f"{failure.traceback.rstrip()}\n" if failure.traceback else ""
    return f"{trace}failed   {who} first: {failure.what}{because}\n"


def _show(lines: list[LogLine], several: bool) -> None:
    for line in lines:
        print(f"{line.time}  rank {line.rank:<5} {line.text}" if several else line.text)
    if lines:
        print(end="", flush=True)
