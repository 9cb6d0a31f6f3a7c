"""Delivers a run's journal to the tools of run.exports: what they have missed, of runs that live and runs that ended.

While a run trains a process beside it does the same. Each tool has a file in RUN/exports that says how far it has got.
--rules and --dashboard write what Prometheus and Grafana need to show runs, for all runs alike.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from paceline.cli.json.shapes import DELIVER
from paceline.cli.output import print_json
from paceline.cli.parser import whole
from paceline.errors import ConfigError, StorageError

EXAMPLE = (
    "paceline deliver runs/stdlib-code --to openmetrics=file\n"
    "paceline deliver --rules rules.json --dashboard grafana.json"
)
CODES = (74,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline deliver`."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, nargs="?", help="a run's directory")
    parser.add_argument(
        "--to", metavar="OPTION=VALUE", action="append", default=[],
        help="an option of run.exports in the place of the run's own, such as mlflow=URI (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", metavar="SECONDS", type=whole, default=600, help="how long tools have to take it all (600)"
    )
    parser.add_argument(
        "--rules", metavar="FILE", type=Path, help="write alert rules for Prometheus (JSON is YAML too)"
    )
    parser.add_argument("--dashboard", metavar="FILE", type=Path, help="write a dashboard for Grafana")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline deliver`."""
    from paceline.observe.exports.generated import alert_rules, dashboard
    from paceline.said import say_line
    from paceline.session.verbs.delivering import deliver_run

    written = {options.rules: alert_rules, options.dashboard: dashboard}
    files = [_write(path, made()) for path, made in written.items() if path is not None]
    if options.run_dir is None and not files:
        raise ConfigError("RUN is missing", "nothing says what is delivered", "paceline deliver runs/NAME")
    names: tuple[str, ...] = ()
    left: list[str] = []
    if options.run_dir is not None:
        say = (lambda line: None) if options.json else say_line
        exports, left = deliver_run(options.run_dir, dict(map(_given, options.to)), options.limit, say)
        names = exports.names
    code = 74 if left else 0
    if options.json:
        got = [name for name in names if name not in left]
        print_json({"run_dir": options.run_dir and str(options.run_dir), "delivered": got,
                    "left": left, "files": files}, DELIVER, code)  # fmt: skip
        return code
    for name in names:
        say_line(f"exports  {name} has {'not got all of it: try again' if name in left else 'got all of it'}")
    for file in files:
        say_line(f"exports  {file}")
    return code


def _given(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--to {text}", "it is no option with a value", "--to openmetrics=file, or --to wandb=true")
    return name, {"true": True, "false": False}.get(value, value)


def _write(path: Path, told: dict[str, object]) -> str:
    try:
        path.write_text(json.dumps(told, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}", str(error), "another place") from error
    return str(path)
