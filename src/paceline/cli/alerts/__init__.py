"""What wakes somebody while a run lives (docs/guide/run/alerts.md).

test SPEC|RUN    sends a message to every sink, and says which took it; of a run's directory also what the rules
                 find in its journal. Ends with 2 where a sink took none
list [RUNS]      alerts on record, of runs' directories or folders of them (default: runs)
silence RUN      nobody is woken by a rule (--rule, or all) --for so long; it stays on record
rules            the rules, and when each fires
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from paceline.cli.json.shapes import ALERTS, ALERTS_RULES, ALERTS_SILENCE, ALERTS_TEST
from paceline.cli.output import print_json, say_folded
from paceline.errors import ConfigError
from paceline.spec.watch.alerts import RULES
from paceline.units import parse_seconds

EXAMPLE = "paceline alerts test spec.toml\npaceline alerts list runs"
EXAMPLE_NEEDS = "a spec of your own"
CODES = (74,)
ACTIONS = ("test", "list", "silence", "rules")
HANGING = 13  # columns that a sink's name takes, and that are free below an alert's first line
RULE_COLUMNS = 26  # that a rule's name and severity take


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline alerts`."""
    parser.add_argument("action", metavar="ACTION", choices=ACTIONS, help=f"what to do: {', '.join(ACTIONS)}")
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="*", help="a spec file, or runs' directories")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides",
        help="test: replace one value of the spec (repeatable)",
    )  # fmt: skip
    parser.add_argument("--rule", default="", metavar="RULE", help="silence: this rule alone")
    parser.add_argument("--for", default="1 h", metavar="DURATION", dest="duration", help="silence: so long (1 h)")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline alerts`."""
    if options.action in ("test", "silence") and len(options.paths) != 1:
        because = f"it takes one path, and {len(options.paths)} were given"
        raise ConfigError(f"alerts {options.action}", because, f"paceline alerts {options.action} runs/first")
    return {"test": _test, "list": _list, "silence": _silence, "rules": _rules}[options.action](options)


def _test(options: argparse.Namespace) -> int:
    from paceline.observe.alerts.message import line_of_alert
    from paceline.session.watch.verbs import try_alerts

    tried = try_alerts(options.paths[0], options.overrides)
    if options.json:
        print_json(tried, ALERTS_TEST)
        return tried.exit_code
    if not tried.sinks:
        say_folded("no sink: run.alerts.sinks is empty, and alerts go to the terminal and the journal")
    for sink in tried.sinks:
        say_folded(f"{sink.name:<12} {'took the message' if sink.sent else f'took none: {sink.because}'}", HANGING)
    for record in tried.replayed:
        say_folded(f"journal      {_day(record.time)}  {line_of_alert(record)}", HANGING)
    return tried.exit_code


def _list(options: argparse.Namespace) -> int:
    from paceline.observe.alerts.message import line_of_alert
    from paceline.session.watch.verbs import alerts_of, firing_of

    found = alerts_of(options.paths or [Path("runs")])
    firing = firing_of(found)
    if options.json:
        print_json({"alerts": [{"run": each.run, **vars(each.alert)} for each in found], "firing": firing}, ALERTS)
        return 0
    for each in found:
        told = f"{each.run:<16} {each.alert.rule:<14} {line_of_alert(each.alert)}"
        say_folded(f"{_day(each.alert.time)}  {told}", HANGING)
    print(f"{len(found)} on record, {firing} firing")
    return 0


def _silence(options: argparse.Namespace) -> int:
    from paceline.session.watch.verbs import silence_rule

    found = silence_rule(options.paths[0], options.rule, float(parse_seconds(options.duration)))
    if options.json:
        print_json({"silences": found}, ALERTS_SILENCE)
        return 0
    for rule, until in found.items():
        print(f"{'all rules' if rule == '*' else rule:<14} until {_day(until)}")
    return 0


def _rules(options: argparse.Namespace) -> int:
    rules = [{"rule": name, "severity": severity, "fires": fires} for name, (severity, fires) in RULES.items()]
    if options.json:
        print_json({"rules": rules}, ALERTS_RULES)
        return 0
    for rule in rules:
        say_folded(f"{rule['rule']:<15} {rule['severity']:<9} {rule['fires']}", RULE_COLUMNS)
    return 0


def _day(moment: float | None) -> str:
    if moment is None:
        return "unknown"
    return datetime.datetime.fromtimestamp(moment).isoformat(" ", "seconds")
