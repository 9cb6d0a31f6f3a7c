"""Chooses how to run the task on the cluster, and prices it: time, memory, money and energy, each with an interval.

Needs no accelerator and starts no training. What the machine can do is measured once and kept (see `paceline probe`).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from paceline.cli.output import print_json, say_to, table_lines
from paceline.cli.parser import add_spec_arguments

EXAMPLE = "paceline plan examples/stdlib-code.toml --set cluster.devices=4 --explain"
CODES = (3, 5, 74)
LISTED = 1_000  # plans and refusals that --json holds: a large cluster has hundreds of thousands


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline plan`."""
    add_spec_arguments(parser)
    parser.add_argument(
        "--explain", action="store_true", help="every term of the forecast, and why others were refused"
    )
    parser.add_argument(
        "--timeline", metavar="FILE", default=None,
        help="write a step of the chosen pipeline: .svg is a picture, .json a trace for Perfetto or chrome://tracing",
    )  # fmt: skip
    parser.add_argument(
        "--measure", action="store_true",
        help="measure the task's own blocks, loss and update on this machine's devices first, and plan with that",
    )  # fmt: skip
    parser.add_argument("--provenance", action="store_true", help="print every value of the spec and its origin")
    parser.add_argument("--models", action="store_true", help="list the named model sizes")


def execute(options: argparse.Namespace) -> int:
    """Run `paceline plan`. Raises DoesNotFit (exit code 3) where no layout fits."""
    if options.models:
        return _models(options.json)
    from paceline.spec import load_spec, provenance_lines, spec_to_dict

    spec = load_spec(options.spec, options.overrides)
    if options.provenance:
        if options.json:
            print_json({"spec": spec_to_dict(spec), "provenance": spec.provenance})
        else:
            print("\n".join(provenance_lines(spec)))
        return 0
    from paceline.plan.explain import explain_lines, headline_lines
    from paceline.plan.session import plan_task

    say = say_to(options.json)
    if spec.cluster.groups:
        return _groups(spec, options, say)
    planned = plan_task(spec, say=say)
    if options.measure:
        from paceline.launch.measure import measure_task

        measure_task(planned, say)
        planned = plan_task(spec, say=say)
    if options.timeline:
        from paceline.plan.simulate.steps import write_timeline

        write_timeline(planned, Path(options.timeline))
    if options.json:
        print_json({**_fields(planned), "placement": planned.placement, "spec": spec_to_dict(spec)})
        return 0
    for line in [*headline_lines(planned), *(["", *explain_lines(planned)] if options.explain else [])]:
        say(line)
    return 0


def _groups(spec: Any, options: argparse.Namespace, say: Any) -> int:
    """Plan on groups of different devices."""
    from paceline.plan.placement.grouped import grouped_lines, plan_groups
    from paceline.spec import spec_to_dict

    found = plan_groups(spec, say=say)
    if options.json:
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        print_json({**fields, "spec": spec_to_dict(spec)})
        return 0
    for line in grouped_lines(found, options.explain):
        say(line)
    return 0


def _fields(planned: Any) -> dict[str, Any]:
    """Return what was planned; of the search, the best plans and the first refusals, and how many there are."""
    found = planned.search
    listed = {
        "best": found.best,
        "candidates": list(found.candidates[:LISTED]),
        "fits": len(found.candidates),
        "refused": list(found.refused[:LISTED]),
        "refusals": len(found.refused),
        "precision_because": found.precision_because,
    }
    fields = {field.name: getattr(planned, field.name) for field in dataclasses.fields(planned)}
    learnt = planned.learnt and planned.learnt.as_dict()
    return {**fields, "search": listed, "expected": planned.expected, "learnt": learnt}


def _models(as_json: bool) -> int:
    from paceline.task.models.sizes import NAMED_SIZES, nominal_vocab
    from paceline.units import format_count

    sizes = [dataclasses.replace(size, vocab=nominal_vocab(size)) for size in NAMED_SIZES.values()]
    if as_json:
        print_json({size.name: {**dataclasses.asdict(size), "parameters": size.parameters} for size in sizes})
        return 0
    rows = [("model", "parameters", "hidden", "layers", "heads", "kv heads", "ffn", "vocabulary")]
    for size in sizes:
        heads = (f"{size.heads}", f"{size.kv_heads}")
        widths = (f"{size.ffn}", f"{size.vocab}")
        rows.append((size.name, format_count(size.parameters), f"{size.hidden}", f"{size.layers}", *heads, *widths))
    print("\n".join(table_lines(rows)))
    return 0
