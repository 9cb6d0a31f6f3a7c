"""Chooses how to run the task on the cluster, and prices it: time, memory, money and energy, each with an interval.

Needs no accelerator and starts no training. What the machine can do is measured once and kept (see `paceline probe`).
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from paceline.cli.output import print_json, say_to, table_lines
from paceline.cli.parser import add_spec_arguments, positive, whole
from paceline.errors import ConfigError

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
    parser.add_argument(
        "--devices", metavar="N,N", type=_counts, default=(),
        help="instead of the spec's cluster.devices; several are compared in a table",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="NAME,NAME", type=_names, default=(),
        help="instead of the spec's cluster.device; several are compared in a table",
    )  # fmt: skip
    parser.add_argument(
        "--deadline", metavar="DURATION", default=None, help='short for --set plan.deadline=DURATION, such as "20 h"'
    )
    parser.add_argument(
        "--budget", metavar="USD", type=positive, default=None, help="short for --set plan.budget_usd=USD"
    )
    parser.add_argument(
        "--picture", metavar="FILE.svg", default=None,
        help="draw time against memory of the plans that fit, or time against money of the clusters compared",
    )  # fmt: skip
    parser.add_argument("--provenance", action="store_true", help="print every value of the spec and its origin")
    parser.add_argument("--models", action="store_true", help="list the named model sizes")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of names with commas between them")
    return names


def _counts(text: str) -> tuple[int, ...]:
    return tuple(whole(name) for name in _names(text))


def _short(options: argparse.Namespace) -> list[Any]:
    """Return the options that are short for one of the spec."""
    from paceline.config.build import Override
    from paceline.config.values import toml

    found = []
    if options.deadline is not None:
        found.append(Override("plan.deadline", toml(options.deadline), "--deadline"))
    if options.budget is not None:
        found.append(Override("plan.budget_usd", toml(options.budget), "--budget"))
    if len(options.devices) == 1:
        found.append(Override("cluster.devices", toml(options.devices[0]), "--devices"))
    if len(options.device) == 1:
        found.append(Override("cluster.device", toml(options.device[0]), "--device"))
    return found


def execute(options: argparse.Namespace) -> int:
    """Run `paceline plan`. Raises DoesNotFit (exit code 3) where no layout fits."""
    if options.models:
        return _models(options.json)
    from paceline.spec.load import load_spec, provenance_lines, spec_to_dict

    spec = load_spec(options.spec, [*options.overrides, *_short(options)])
    if options.provenance:
        if options.json:
            print_json({"spec": spec_to_dict(spec), "provenance": spec.provenance})
        else:
            print("\n".join(provenance_lines(spec)))
        return 0
    if len(options.devices) > 1 or len(options.device) > 1:
        return _compare(spec, options)
    from paceline.plan.explain.explain import explain_lines, headline_lines, without_effect_lines
    from paceline.plan.planned import plan_task

    say = say_to(options.json)
    if spec.cluster.groups:
        return _groups(spec, options, say)
    planned = plan_task(spec, say=say)
    if options.measure:
        from paceline.session.measure import measure_task

        measure_task(planned, say)
        planned = plan_task(spec, say=say)
    if options.timeline:
        from paceline.simulate.schedules.steps import write_timeline

        write_timeline(planned, Path(options.timeline))
    if options.picture:
        from paceline.plan.explain.draw_front import write_front

        write_front(planned, Path(options.picture))
    if options.json:
        more = _explained(planned) if options.explain else {}
        print_json({**_fields(planned), **more, "placement": planned.placement, "spec": spec_to_dict(spec)})
        return 0
    told = ["", *explain_lines(planned)] if options.explain else without_effect_lines(planned)
    for line in [*headline_lines(planned), *told]:
        say(line)
    return 0


def _groups(spec: Any, options: argparse.Namespace, say: Any) -> int:
    """Plan on groups of different devices."""
    from paceline.plan.explain.groups import grouped_lines
    from paceline.plan.placement.grouped import plan_groups
    from paceline.spec.load import spec_to_dict

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
    return {**fields, "search": listed, "expected": planned.expected, "contest": planned.contest,
            "pareto": _front(planned), "learnt": learnt}  # fmt: skip


def _front(planned: Any) -> dict[str, Any]:
    """Return the Pareto front: what it weighs, and its plans with what they take."""
    from paceline.plan.search.pareto import front_of
    from paceline.spec.plan import QUANTITIES

    candidates = planned.search.candidates
    places, names = front_of(candidates.values)
    plans = [
        {"plan": candidates.plan(int(place)), "risk": float(candidates.values.risk[place]),
         **{name: float(getattr(candidates.values, name)[place]) for name in QUANTITIES}}
        for place in places
    ]  # fmt: skip
    return {"over": names, "plans": plans}


def _explained(planned: Any) -> dict[str, Any]:
    """Return what `--explain` adds: the other side of every choice, and what would change it."""
    from paceline.plan.explain.alternatives import alternatives

    return {"alternatives": alternatives(planned.search), "sensitivity": planned.sensitivity}


def _compare(spec: Any, options: argparse.Namespace) -> int:
    """Print one task on several clusters."""
    from paceline.plan.explain.compare_clusters import compare_clusters, comparison_rows
    from paceline.spec.load import spec_to_dict

    say = say_to(options.json)
    for option in ("explain", "timeline", "measure"):
        if getattr(options, option):
            raise ConfigError(f"--{option} with several clusters", "it speaks of one plan", "one of the clusters")
    found = compare_clusters(spec, options.device, options.devices, say=say)
    if options.picture:
        from paceline.plan.explain.draw_front import write_comparison

        write_comparison(found, Path(options.picture))
    if options.json:
        rows = [{**dataclasses.asdict(dataclasses.replace(row, planned=None)), "planned": row.planned and {
            "plan": row.planned.plan, "forecast": row.planned.forecast, "expected": row.planned.expected,
            "cluster": row.planned.cluster, "remarks": row.planned.remarks}} for row in found.rows]  # fmt: skip
        print_json({"rows": rows, "best": found.best, "front": found.front, "with_failures": found.with_failures,
                    "spec": spec_to_dict(spec)})  # fmt: skip
        return 0
    for line in table_lines(comparison_rows(found)):
        say(line)
    counted = "failures counted in" if found.with_failures else "failures not counted"
    say(f"* best by {spec.plan.goal}; front: no other is better in all of {', '.join(found.front)}; {counted}")
    return 0


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
