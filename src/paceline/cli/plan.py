"""Chooses how to run the task on the cluster, and prices it: time, memory, money and energy, each with an interval.

Needs no accelerator and starts no training. What the machine can do is measured once and kept (see `paceline probe`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import COMPARED, GROUPED, MODELS, PLAN, PROVENANCE
from paceline.cli.output import print_error, print_json, say_to, table_lines
from paceline.cli.parser import add_spec_arguments, positive, whole
from paceline.config.build import Override
from paceline.errors import ConfigError, DoesNotFit, PacelineError

if TYPE_CHECKING:
    from paceline.plan.explain.compare_clusters import Comparison
    from paceline.plan.planned import Planned
    from paceline.session.verbs.planning import Answer
    from paceline.spec.load import Spec

EXAMPLE = "paceline plan examples/stdlib-code.toml --set cluster.devices=4 --explain"
CODES = (3, 5, 74)
SHOWN, LISTED = 10, 1_000  # plans and refusals that --json holds, and with --all: there may be hundreds of thousands
LISTED_FIGURES = ("step_seconds", "peak_bytes", "usd", "kwh")  # of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline plan`."""
    add_spec_arguments(parser)
    parser.add_argument(
        "--explain", action="store_true", help="what was weighed, on a screen: terms of the forecast, other plans"
    )
    parser.add_argument(
        "--all", action="store_true", help="with --explain or --json: every term, every plan, every figure"
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


def _short(options: argparse.Namespace) -> list[Override]:
    """Return the options that are short for one of the spec."""
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
    """Run `paceline plan`. Raises DoesNotFit (exit code 3) where no layout fits, or `train` would refuse the price.

    With --json the latter is told within the plan, whose exit code is the same.
    """
    if options.models:
        return _models(options.json)
    from paceline.session.verbs.planning import OF_ONE_PLAN, answer
    from paceline.spec.load import load_spec

    spec = load_spec(options.spec, [*options.overrides, *_short(options)])
    if options.provenance:
        return _provenance(spec, options.json)
    if options.all and not (options.explain or options.json):
        raise ConfigError("--all without --explain or --json", "it lists more in either", "--explain --all")
    several = len(options.devices) > 1 or len(options.device) > 1
    for option in ("explain", "timeline", "measure"):
        if several and getattr(options, option):
            raise ConfigError(f"--{option} with several clusters", "it speaks of one plan", "one of the clusters")
    for option in ("timeline", "picture") if spec.cluster.groups else ():  # and what is measured, `answer` refuses
        if getattr(options, option):
            raise ConfigError(f"--{option} with cluster.groups", OF_ONE_PLAN, "the devices of one group in [cluster]")
    say = say_to(options.json)
    found = answer(spec, names=options.device, counts=options.devices, measure=options.measure, say=say)
    _draw(found, options)
    if options.json:
        return _as_json(found, spec, options, say)
    for line in _lines(found, spec, options.explain, options.all):
        say(line)
    _hold_budget(found, spec, say)
    return 0


def _as_json(found: Answer, spec: Spec, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Print the answer as one object, with why `train` would refuse it for its budget; return the exit code."""
    from paceline.spec.load import spec_to_dict

    shape, fields = _fields(found, options.explain, options.all)
    refused: PacelineError | None = None
    try:
        _hold_budget(found, spec, say)
    except (ConfigError, DoesNotFit) as error:
        refused = error
    code, told = (refused.exit_code, {"budget_error": refused.as_dict()}) if refused else (0, {})
    print_json({**fields, "spec": spec_to_dict(spec), **told}, shape, code)
    if refused is not None:
        print_error(str(refused))
    return code


def _hold_budget(found: Answer, spec: Spec, say: Callable[[str], None]) -> None:
    """Say what the run's budgets leave, and raise what `train` would where the plan is beyond one.

    Of groups that is the layout over all of them, which trains; several clusters that are compared have none.
    """
    from paceline.plan.planned import Planned, plan_task

    if not (spec.run.budgets or spec.run.usd_limit is not None):  # as most, which need none of the imports
        return
    if isinstance(found, Planned) or spec.cluster.groups:
        from paceline.session.ready.budget import check_budget

        check_budget(found if isinstance(found, Planned) else plan_task(spec), say)


def _provenance(spec: Spec, as_json: bool) -> int:
    """Print every value of the spec and its origin."""
    from paceline.spec.load import provenance_lines, spec_to_dict

    if as_json:
        print_json({"spec": spec_to_dict(spec), "provenance": spec.provenance}, PROVENANCE)
    else:
        print("\n".join(provenance_lines(spec)))
    return 0


def _draw(found: Answer, options: argparse.Namespace) -> None:
    """Write the pictures that were asked for, of what has one."""
    if not (options.timeline or options.picture):
        return
    from paceline.plan.explain.compare_clusters import Comparison
    from paceline.plan.explain.draw_front import write_comparison, write_front
    from paceline.plan.planned import Planned

    if options.timeline and isinstance(found, Planned):
        from paceline.plan.schedules.steps import write_timeline

        write_timeline(found, Path(options.timeline))
    if options.picture and isinstance(found, Planned):
        write_front(found, Path(options.picture))
    if options.picture and isinstance(found, Comparison):
        write_comparison(found, Path(options.picture))


def _lines(found: Answer, spec: Spec, explain: bool, everything: bool) -> list[str]:
    """Return what is printed for people."""
    from paceline.plan.planned import Planned

    if not isinstance(found, Planned):
        from paceline.plan.explain.compare_clusters import Comparison
        from paceline.plan.explain.groups import grouped_lines

        return _compared(found, spec) if isinstance(found, Comparison) else list(grouped_lines(found, explain))
    if not explain:
        from paceline.plan.explain.headline import without_effect_lines

        return [*_headline(found), *without_effect_lines(found)]
    from paceline.plan.explain.explain import explain_lines
    from paceline.plan.explain.screen import screen_lines

    return [*_headline(found), "", *(explain_lines(found) if everything else screen_lines(found))]


def _headline(found: Planned) -> list[str]:
    """Return the block that every run opens with, and what training in its hours brings."""
    from paceline.cluster.grid.window import window_of
    from paceline.plan.explain.headline import headline_lines
    from paceline.plan.explain.hours import hours_lines

    return [*headline_lines(found), *hours_lines(found, window_of(found.spec.run.when))]


def _compared(found: Comparison, spec: Spec) -> list[str]:
    """Return clusters side by side as a table with each one's plan below it, and what the table weighs."""
    from paceline.plan.explain.compare_clusters import comparison_rows, stated_text
    from paceline.plan.explain.lines import wrap

    stated = stated_text(spec.cluster) if {row.device for row in found.rows} - {spec.cluster.device} else ""
    counted = "failures counted in" if found.with_failures else "failures not counted"
    front = f"front: no other is better in all of {', '.join(found.front)}"
    best = f"* best by {spec.plan.goal}; {front}; {counted}"
    rows = comparison_rows(found)
    head, *lines = table_lines([row[:-1] for row in rows])
    below = " " * (2 + max(len(row[0]) for row in rows))
    each = [[line, *wrap(below, row[-1])] for line, row in zip(lines, rows[1:], strict=True)]
    return [head, *itertools.chain(*each), best, *([f"note     {stated}"] if stated else [])]


def _fields(found: Answer, explain: bool, everything: bool) -> tuple[str, dict[str, object]]:
    """Return the shape of an answer, and what --json holds of it."""
    from paceline.plan.explain.compare_clusters import Comparison
    from paceline.plan.planned import Planned

    if isinstance(found, Planned):
        fields = _planned_fields(found, LISTED if everything else SHOWN)
        fields |= _explained(found) if explain else {}
        return PLAN, {**fields, "profile": found.profile} if everything else fields
    fields = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(found)
        if field.name not in ("spec", "profile")
    }
    if isinstance(found, Comparison):
        rows = [{**dataclasses.asdict(dataclasses.replace(row, planned=None)), "planned": row.planned and {
            "plan": row.planned.plan, "forecast": row.planned.forecast, "expected": row.planned.expected,
            "cluster": row.planned.cluster, "remarks": row.planned.remarks}} for row in found.rows]  # fmt: skip
        return COMPARED, {**fields, "rows": rows}
    return GROUPED, fields


def _planned_fields(planned: Planned, listed: int) -> dict[str, object]:
    """Return what was planned; of the search so many of the best plans and of the refusals, and how many there are."""
    from paceline.cluster.grid.window import window_of
    from paceline.plan.explain.hours import hours_as_data

    found = planned.search
    candidates = [
        {"plan": str(each.plan), **{name: getattr(each.forecast, name).value for name in LISTED_FIGURES}}
        for each in found.candidates[:listed]
    ]
    refused = [{"plan": str(each.plan), "because": each.because} for each in found.refused[:listed]]
    return {
        "plan": planned.plan,
        "plan_text": str(planned.plan),
        "because": planned.reason,
        "forecast": planned.forecast,
        "expected": planned.expected,
        "remarks": planned.remarks,
        "fits": len(found.candidates),
        "refusals": len(found.refused),
        "candidates": candidates,
        "refused": refused,
        "contest": planned.contest,
        "pareto": planned.front,
        "learnt": planned.learnt and planned.learnt.as_dict(),
        "placement": planned.placement,
        "hours": hours_as_data(planned, window_of(planned.spec.run.when)),
        "cluster": planned.cluster,
        "facts": planned.facts,
        "parameters": planned.profile.parameters,
        "batch_samples": planned.batch_samples,
        "steps": planned.steps,
    }


def _explained(planned: Planned) -> dict[str, object]:
    """Return what `--explain` adds: the other side of every choice, and what would change it."""
    from paceline.plan.explain.alternatives import alternatives

    return {"alternatives": alternatives(planned.search), "sensitivity": planned.sensitivity}


def _models(as_json: bool) -> int:
    from paceline.task.models.sizes import NAMED_SIZES, nominal_vocab
    from paceline.units import format_count

    sizes = [dataclasses.replace(size, vocab=nominal_vocab(size)) for size in NAMED_SIZES.values()]
    if as_json:
        named = {size.name: {**dataclasses.asdict(size), "parameters": size.parameters} for size in sizes}
        print_json({"models": named}, MODELS)
        return 0
    rows = [("model", "parameters", "hidden", "layers", "heads", "kv heads", "ffn", "vocabulary")]
    for size in sizes:
        heads = (f"{size.heads}", f"{size.kv_heads}")
        widths = (f"{size.ffn}", f"{size.vocab}")
        rows.append((size.name, format_count(size.parameters), f"{size.hidden}", f"{size.layers}", *heads, *widths))
    print("\n".join(table_lines(rows)))
    return 0
