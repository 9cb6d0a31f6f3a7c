"""Simulates the run on machines that fail: weeks of failures, repairs and restarts in seconds, many times over.

Policies are compared under the same failures. Rates are those published for the device, or your own
(`cluster.reliability`). Nothing is trained, and no accelerator is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.json.shapes import SIMULATE
from paceline.cli.output import Say, print_json, say_to, table_lines
from paceline.cli.parser import add_spec_arguments, positive, whole

if TYPE_CHECKING:
    from paceline.session.verbs.simulation import SideBySide, Simulation
    from paceline.simulate.policy import Policy
    from paceline.simulate.sweep import IntervalSweep, PolicyResult

EXAMPLE = "paceline simulate examples/llama-405b.toml --days 54 --runs 20"
CODES = (3, 5, 74)
RUNS = 50
WIDTH, BETWEEN = 100, "  "  # columns of a line, and what stands between two of a table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `paceline simulate`."""
    add_spec_arguments(parser)
    parser.add_argument(
        "--devices", metavar="N", type=whole, default=None, help="instead of the spec's cluster.devices"
    )
    parser.add_argument(
        "--days", metavar="D", type=positive, default=None,
        help="look at so many days of wall time (default: until the task is done)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", metavar="NAME[,KEY=VALUE...]", action="append", default=[],
        help="spares, blocking, memory, shrink or wait, with settings such as every=30min, spares=16, restart=2min "
        "(repeatable; default: the first four)",
    )  # fmt: skip
    parser.add_argument("--runs", metavar="N", type=whole, default=RUNS, help=f"runs per policy (default {RUNS})")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the failures (default 0)")
    parser.add_argument(
        "--intervals", action="store_true", help="also look for the best interval between checkpoints (first policy)"
    )
    parser.add_argument(
        "--picture", metavar="FILE.svg", default=None, help="draw goodput over intervals; with --intervals"
    )
    parser.add_argument(
        "--measured", metavar="RUN", type=Path, default=None,
        help="take failure rate and costs from a run that went on after faults, and hold it against its simulation",
    )  # fmt: skip
    parser.add_argument(
        "--trace", metavar="FILE.json", default=None,
        help="write the first run of the first policy for Perfetto or chrome://tracing",
    )  # fmt: skip


def execute(options: argparse.Namespace) -> int:
    """Run `paceline simulate`. Raises ConfigError where nothing is known of how often the machines fail."""
    from paceline.errors import ConfigError
    from paceline.plan.explain.headline import headline_lines
    from paceline.session.verbs.simulation import simulation
    from paceline.spec.load import load_spec

    if options.picture and not options.intervals:
        raise ConfigError("--picture without --intervals", "it draws goodput over intervals", "add --intervals")
    devices = [f"cluster.devices={options.devices}"] if options.devices else []
    spec = load_spec(options.spec, [*options.overrides, *devices])
    say = say_to(options.json)
    found = simulation(
        spec, days=options.days, policies=options.policy, runs=options.runs, seed=options.seed,
        intervals=options.intervals, measured=options.measured, say=say,
    )  # fmt: skip
    _write_files(options, found)
    if options.json:
        print_json({
            "scenario": found.scenario, "mtbf_seconds": found.scenario.mtbf_seconds, "runs": found.runs,
            "seed": found.seed, "policies": [_plain(result) for result in found.results], "intervals": found.sweep,
            "measured": found.held,
        }, SIMULATE)  # fmt: skip
        return 0
    for line in headline_lines(found.planned):
        say(line)
    _tell(say, found)
    if found.held is not None:
        _tell_held(say, found.held)
    if found.sweep is not None:
        _tell_intervals(say, found.results[0].policy, found.sweep)
    return 0


def _plain(result: PolicyResult) -> dict[str, object]:
    return {"policy": dataclasses.asdict(result.policy), **dataclasses.asdict(result.summary)}


def _write_files(options: argparse.Namespace, found: Simulation) -> None:
    from paceline.durable import write_output
    from paceline.simulate.draw import intervals_svg
    from paceline.simulate.perfetto import run_trace

    if options.trace:
        write_output(Path(options.trace), run_trace(found.first_run()))
    if options.picture and found.sweep is not None:
        write_output(Path(options.picture), intervals_svg(found.sweep))


def _tell(say: Say, found: Simulation) -> None:
    """Print what was assumed, the policies side by side, and where the time of each goes."""
    from paceline.simulate.events import KINDS
    from paceline.simulate.policy import duration_text
    from paceline.units import format_seconds, plural

    scenario, results = found.scenario, found.results
    rates, days = scenario.rates, scenario.horizon_seconds / 86400
    between = "never" if math.isinf(scenario.mtbf_seconds) else f"every {format_seconds(scenario.mtbf_seconds)}"
    say(f"failures {between} on {plural(scenario.nodes, 'node')}: {rates.text} ({rates.source})")
    reliability = found.planned.spec.cluster.reliability
    say(
        f"         detection {duration_text(reliability.detection)}, restart {duration_text(reliability.restart)}, "
        f"repair {duration_text(reliability.repair)} (cluster.reliability)"
    )
    say(f"runs     {results[0].summary.runs} of each policy, " + (
        f"{days:g} days of wall time" if math.isfinite(days)
        else f"each {format_seconds(scenario.work_seconds)} of training at full speed"
    ))  # fmt: skip
    say("")
    kinds = [kind for kind in KINDS if any(result.summary.seconds[kind] > 0 for result in results)]
    looks = math.isfinite(days)
    columns = [(*_column(result, looks), "", "", *_shares(result, kinds)) for result in results]
    say(
        "\n\n".join(
            "\n".join(table_lines(rows)) for rows in side_by_side((*_head(looks), "", "time spent in", *kinds), columns)
        )
    )
    causes = list(results[0].summary.by_cause.items())
    listed = ", ".join(f"{name} {count:,.3g}" for name, count in causes[:6])
    if listed:
        say("")
        say(f"interruptions ({results[0].policy.name}): {listed}" + (", and others" if len(causes) > 6 else ""))


def _tell_held(say: Say, held: SideBySide) -> None:
    """Print a run beside its simulation."""
    from paceline.units import format_durations, format_seconds

    measured, simulated, costs = held.measured, held.simulated, held.costs
    idle = f" and between starts ({format_seconds(measured.between_seconds)})" if measured.between_seconds else ""
    wall, share = simulated.wall, simulated.goodput
    goodput = measured.useful_seconds / measured.exposed_seconds
    took, mean, low, high = format_durations(measured.exposed_seconds, wall.mean, wall.p10, wall.p90)
    rows: list[tuple[str, ...]] = [
        ("", "measured", "simulated (p10 to p90)"),
        ("wall time", took, f"{mean} ({low} to {high})"),
        ("goodput", f"{goodput:.1%}", f"{share.mean:.1%} ({share.p10:.1%} to {share.p90:.1%})"),
    ]
    say("")
    say("\n".join(table_lines(rows)))
    say(
        f"held     {held.run_dir}, which went on after {measured.faults + measured.restarts} interruptions, simulated "
        f"with its own costs: "
        f"detection {format_seconds(costs.detection)}, restart {format_seconds(costs.restart)}, "
        f"restore {format_seconds(costs.restore)}; "
        f"starting and other ({format_seconds(measured.other_seconds)}){idle} apart"
    )


def side_by_side(head: tuple[str, ...], columns: Sequence[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield tables, as rows, that have `head` at the left and so many of the columns each as fit into a line."""
    room = WIDTH - max(map(len, head))
    shown, taken = [head], 0
    for column in columns:
        width = len(BETWEEN) + max(map(len, column))
        if len(shown) > 1 and taken + width > room:
            yield list(zip(*shown, strict=True))
            shown, taken = [head], 0
        shown.append(column)
        taken += width
    yield list(zip(*shown, strict=True))


def _head(looks: bool) -> tuple[str, ...]:
    end = ("trained",) if looks else ("finish", "p10 to p90")
    return ("policy", "saves every", "spares", "goodput", *end, "interruptions", "lost work", "money", "energy")


def _shares(result: PolicyResult, kinds: Sequence[str]) -> list[str]:
    """Return which part of the wall time went to each kind."""
    return [f"{result.summary.seconds[kind] / result.summary.wall_seconds.mean:.2%}" for kind in kinds]


def _column(result: PolicyResult, looks: bool) -> tuple[str, ...]:
    from paceline.plan.explain.money import money_text
    from paceline.simulate.policy import duration_text
    from paceline.units import format_durations, format_energy, format_seconds

    policy, summary = result.policy, result.summary
    wall = summary.wall_seconds
    end: tuple[str, ...] = (format_seconds(wall.mean * summary.goodput.mean),)
    if not looks and summary.finished < summary.runs:
        end = f"{summary.runs - summary.finished} of {summary.runs} never", "–"
    elif not looks:
        mean, low, high = format_durations(wall.mean, wall.p10, wall.p90)
        end = mean, f"{low} to {high}"
    every = duration_text(policy.every)
    if policy.cycle.copies > 1:
        every += f", copies {duration_text(policy.cycle.block)}"
    energy = format_energy(summary.kwh.mean)[0] if math.isfinite(summary.kwh.mean) else "unknown"
    return (
        policy.name, every, f"{policy.spares}", f"{summary.goodput.mean:.1%} ±{summary.goodput.deviation:.1%}", *end,
        f"{summary.interruptions.mean:,.0f} ±{summary.interruptions.deviation:.0f}",
        format_seconds(summary.lost_seconds.mean), money_text(summary.usd.mean), energy,
    )  # fmt: skip


def _tell_intervals(say: Say, policy: Policy, sweep: IntervalSweep) -> None:
    from paceline.simulate.policy import duration_text

    rows: list[tuple[str, ...]] = [("saves every", "goodput", "standard error", "Daly's formula")]
    for point in sweep.points:
        formula = f"{point.expected_goodput:.2%}"
        rows.append((duration_text(point.every), f"{point.goodput:.2%}", f"{point.standard_error:.2%}", formula))
    say("")
    say("\n".join(table_lines(rows)))
    say(
        f"best interval ({policy.name}): Young {duration_text(sweep.young)}, Daly {duration_text(sweep.daly)}, "
        f"simulated {duration_text(sweep.simulated)}"
    )
