"""Measures this machine: matrix products, memory, operator launches, and the links between processes.

Takes about 15 seconds on an idle machine, about 30 on a GPU, or on two CPU devices, which have to be timed
together as well. The result is kept, with its date, and every later forecast on this machine uses it.
"""

from __future__ import annotations

import argparse

from paceline.cli.json.shapes import FORGET, PROBE
from paceline.cli.output import print_json, say_to
from paceline.cli.parser import whole
from paceline.units import plural

EXAMPLE = "paceline probe --devices 2"
CODES = (74,)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline probe`."""
    devices_help = "how many devices measure at once (default: every GPU, or one CPU device)"
    parser.add_argument("--devices", metavar="N", type=whole, default=0, help=devices_help)
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu", help="which kind of device (default cpu)")

    parser.add_argument(
        "--forget", action="store_true", help="delete what finished runs and measured tasks left for later forecasts"
    )


def execute(options: argparse.Namespace) -> int:
    """Run `paceline probe`. The table for people is printed by the probe itself, as it is measured."""
    if options.forget:
        return _forget(options)
    from paceline.cluster.probe.probe import probe_machine

    record = probe_machine(options.devices, options.kind, say_to(options.json))
    if options.json:
        print_json(record, PROBE)
    return 0


def _forget(options: argparse.Namespace) -> int:
    from paceline.cluster.resolve import resolve_cluster
    from paceline.plan.learn.observation import machine_key
    from paceline.plan.learn.store import forget_observations
    from paceline.plan.learn.task_measurement import forget_measurements
    from paceline.spec.cluster import ClusterSpec

    machine = machine_key(resolve_cluster(ClusterSpec(device=options.kind))[0])
    runs, tasks = forget_observations(machine), forget_measurements(machine)
    if options.json:
        print_json({"machine": machine, "runs": runs, "tasks": tasks}, FORGET)
    else:
        print(f"forgot   {plural(runs, 'finished run')} and {plural(tasks, 'measured task')} on {machine}")
    return 0
