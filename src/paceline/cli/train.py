"""Plans the task, proves the plan equal to one device, trains, and reports against the forecast.

A run that was stopped goes on where its newest complete checkpoint is, on however many devices there are now: start
the same command again.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import TRAIN
from paceline.cli.output import print_json, stdout_to_stderr
from paceline.cli.parser import add_spec_arguments, number, whole
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.spec.load import Spec

EXAMPLE = "paceline train examples/stdlib-code.toml --steps 30 --run-dir runs/short"
CODES = (3, 4, 5, 6, 74, 75)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline train`."""
    add_spec_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", help="the run's directory, short for --set run.dir=DIR")
    steps_help = "stop after N steps, short for --set 'task.stop=N steps'"
    parser.add_argument("--steps", metavar="N", type=whole, help=steps_help)
    parser.add_argument("--no-verify", action="store_true", help="skip the proof, short for --set run.verify=false")
    parser.add_argument("--faults", metavar="FILE", help="rehearse the faults of a TOML file (run.faults, as a file)")
    nodes_help = "train on N nodes, on each of which this command is started, short for --set run.nodes.count=N"
    parser.add_argument("--nodes", metavar="N", type=whole, help=nodes_help)
    node_help = "the number of this node, from 0, short for --set run.nodes.node=K"
    parser.add_argument("--node", metavar="K", type=number, help=node_help)
    meet_help = "where node 0 is reached, short for --set run.nodes.rendezvous=HOST:PORT"
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help=meet_help)
    parser.add_argument(
        "--record-samples", action="store_true",
        help="write the sample ids of every step to the journal, short for --set run.record_samples=true",
    )  # fmt: skip


def execute(options: argparse.Namespace) -> int:
    """Run `paceline train` and return the run's exit code."""
    from paceline.cluster.here.collector import collector_at_rest

    with collector_at_rest():
        from paceline.config.build import Override
        from paceline.config.values import toml
        from paceline.spec.load import load_spec
        from paceline.spec.run import with_faults

    if options.spec is None and not options.overrides:
        because = "without a SPEC and without --set it would be the task of all defaults, which takes hours"
        raise ConfigError("nothing is named to train", because, "paceline train SPEC (docs/guide/spec-files.md)")
    short: list[str | Override] = []
    if options.run_dir is not None:
        short.append(Override("run.dir", toml(options.run_dir), "--run-dir"))
    if options.steps is not None:
        short.append(Override("task.stop", toml(f"{options.steps} steps"), "--steps"))
    if options.no_verify:
        short.append(Override("run.verify", "false", "--no-verify"))
    if options.record_samples:
        short.append(Override("run.record_samples", "true", "--record-samples"))
    if options.nodes is not None:
        short.append(Override("run.nodes.count", toml(options.nodes), "--nodes"))
    if options.node is not None:
        short.append(Override("run.nodes.node", toml(options.node), "--node"))
    if options.rendezvous is not None:
        short.append(Override("run.nodes.rendezvous", toml(options.rendezvous), "--rendezvous"))
    spec = load_spec(options.spec, [*options.overrides, *short])
    if options.faults is not None:
        spec = dataclasses.replace(spec, run=with_faults(spec.run, options.faults))
    if not options.json:
        return _trained(spec)
    from paceline.launch.here import place_here
    from paceline.report.build import build_report
    from paceline.spec.arguments import run_directory
    from paceline.spec.run_files import is_run

    with stdout_to_stderr():
        code = _trained(spec)
    place = place_here(os.environ)
    if place is None or place.rank == 0:  # under torchrun every rank is here, and one object is wanted
        run_dir = run_directory(spec)
        report = build_report(run_dir).as_dict() if is_run(run_dir) else None
        print_json({"run_dir": str(run_dir), "report": report}, TRAIN, code)
    return code


def _trained(spec: Spec) -> int:
    """Train, and import what that needs while the standby imports torch; return the exit code."""
    from paceline.cluster.here.collector import collector_at_rest
    from paceline.session.ahead import standby_first

    with standby_first(spec) as standby:
        with collector_at_rest():
            from paceline.session.start import train
        return train(spec, standby=standby)
