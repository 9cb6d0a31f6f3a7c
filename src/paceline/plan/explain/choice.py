"""Explain the choice in words: how sure it is, what to try, why not otherwise, the front, what would change it."""

from __future__ import annotations

import math
import shlex

from paceline.plan.cost.pricing import price
from paceline.plan.explain.alternatives import Alternative, alternatives
from paceline.plan.explain.difference import difference, plan_options
from paceline.plan.explain.lines import wrap
from paceline.plan.explain.money import money_text
from paceline.plan.planned import Planned
from paceline.plan.risk.choice_switches import WIDEST, Sensitivity, Switch
from paceline.plan.risk.contest import Contest
from paceline.plan.search.pareto import front_of
from paceline.spec.plan import Plan
from paceline.units import format_bytes, format_seconds

TRIAL_STEPS = 20
LIKELY = 0.5  # chances from which on the chosen plan is said to be best
NOTABLE_RISK = 0.005
SHOWN_FRONT = 24


def contest_lines(planned: Planned) -> list[str]:
    """Return how sure the choice is, and the commands that try what may be better."""
    lines = sure_lines(planned)
    if not planned.contest.is_open:
        return lines
    lines += wrap("  ", f"{tried_gain(planned)}:")
    for contender in planned.contest.contenders:
        lines.append(f"  {trial_command(planned, contender.plan)}")  # in one line, to be copied
    return lines


def sure_lines(planned: Planned) -> list[str]:
    """Return how sure the choice is."""
    contest = planned.contest
    if contest.compared == 1:
        because = "memory is counted" if set(planned.spec.plan.goal.weights) == {"memory"} else "no other kind of plan"
        return wrap("how sure: ", f"nothing to try: {because}", 2)
    chance, kinds = contest.contenders[0].chance_best, f"the {contest.compared} best kinds of plan"
    regret = f"takes {contest.regret:.0%} more than the best one on average"
    if chance >= LIKELY:
        sure = f"the chosen plan is the best of {kinds} with a chance of {chance:.0%}"
        text = f"{sure}, given how far forecasts of plans err from each other; it {regret}."
    else:
        text = f"forecasts cannot tell which of {kinds} is the best one; the chosen one {regret}."
    text += "" if contest.is_open else " Trying others would gain less than 1 %."
    return wrap("how sure: ", text, 2)


def tried_gain(planned: Planned) -> str:
    """Return what trying the plans that are worth it takes, and what it leaves."""
    contest, seconds = planned.contest, trial_seconds(planned)
    usd = seconds / 3600 * planned.cluster.devices * planned.cluster.price_usd_per_device_hour.value
    paid = f" and {money_text(usd)}" if math.isfinite(usd) else ""
    takes = f"{TRIAL_STEPS} steps of each of these {len(contest.contenders)} take {format_seconds(seconds)}{paid}"
    return f"{takes}, and taking the fastest leaves {contest.regret_tried:.0%}"


def trial_seconds(planned: Planned) -> float:
    """Return what the steps take in which the plans are tried that are worth it, without the starts of their runs."""
    context = planned.search.candidates.context
    steps = [price(context, contender.plan).step_seconds.value for contender in planned.contest.contenders]
    return TRIAL_STEPS * math.fsum(steps)


def tried_text(contest: Contest) -> str:
    """Return how many plans are worth a try besides the chosen one; empty where there are none."""
    more = len(contest.contenders) - 1
    return f", {more} more worth a try" if more else ""


def trial_command(planned: Planned, plan: Plan) -> str:
    """Return the command that runs a few steps of a plan."""
    spec = planned.spec
    path = shlex.quote(str(spec.path)) if spec.path else ""
    stated = [f"{key}={value}" for key, value in _stated(planned).items() if not key.startswith("plan.")]
    options = " ".join(
        f"--set {shlex.quote(option)}" for option in (*stated, *plan_options(plan, planned.profile.experts > 0))
    )
    return " ".join(filter(None, ["paceline train", path, f"--steps {TRIAL_STEPS}", options]))


def _stated(planned: Planned) -> dict[str, str]:
    """Return the options of the command line, in TOML."""
    from paceline.config.values import toml
    from paceline.spec.load import spec_values

    origins = planned.spec.provenance
    return {key: toml(value) for key, value in spec_values(planned.spec) if origins.get(key) == "--set"}


def alternative_lines(planned: Planned) -> list[str]:
    """Return the best plan on the other side of every choice, and the terms that make the difference."""
    found = alternatives(planned.search)
    if not found:
        return ["why not otherwise: there was no choice"]
    lines = ["why not otherwise (the best plan on the other side of each choice, and where its time goes):"]
    for alternative in found:
        lines += wrap(f"  {_side(alternative):22}", _outcome(planned, alternative), 24)
    return lines


def _side(alternative: Alternative) -> str:
    return f"{'with' if alternative.has_it else 'without'} {alternative.choice}"


def _outcome(planned: Planned, alternative: Alternative) -> str:
    if alternative.plan is None:
        return f"none: {alternative.because}"
    slower = alternative.slower
    size = "as fast" if abs(slower) < 0.005 else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    return f"{size}: {difference(planned.plan, alternative.plan)} ({alternative.because})"


def front_lines(planned: Planned) -> list[str]:
    """Return the plans that none beats in everything, with what they take."""
    candidates = planned.search.candidates
    places, names = front_of(candidates.values)
    if not names:
        return ["Pareto front: unknown, as the time of a step is"]
    lines = [f"Pareto front over {', '.join(names)} (none beats these in all; like ones are left out):"]
    for place in places[:SHOWN_FRONT]:
        values, plan = candidates.values.take([place]), candidates.plan(int(place))
        energy = f"  {values.energy[0]:>9,.3g} kWh" if "energy" in names else ""
        head = f"  {format_seconds(values.time[0]):>8}  {format_bytes(values.memory[0]):>9}{energy}  "
        lines += wrap(head, "the chosen one" if place == 0 else difference(planned.plan, plan))
    if len(places) > SHOWN_FRONT:
        lines.append(f"  and {len(places) - SHOWN_FRONT} more: --json")
    return lines


def sensitivity_lines(planned: Planned) -> list[str]:
    """Return what would change the choice."""
    found: Sensitivity = planned.sensitivity
    lines = [f"what would change the choice (each alone, up to {WIDEST:g} times either way):"]
    for switch in found.switches:
        lines += wrap(f"  {switch.figure:20}", switch_text(planned, switch), 22)
    if found.steady:
        lines += wrap("  ", f"nothing from {', '.join(found.steady)}")
    return lines


def switch_text(planned: Planned, switch: Switch) -> str:
    """Return a switch in words: "at 800 Gb/s or more (x2): tp=4 for 8 (12% less at x4)"."""
    where = f"at {switch.value} or {'more' if switch.factor > 1 else 'less'} (x{switch.factor:.3g}): "
    if switch.plan is None:
        return f"{where}no plan fits"
    gain = "the chosen one does not fit" if switch.gain is None else f"{switch.gain:.0%} less at x{switch.gain_at:g}"
    return f"{where}{difference(planned.plan, switch.plan)} ({gain})"


def risk_text(risk: float) -> str:
    """Return a chance of running out of memory that is worth a word, else nothing."""
    return f"{risk:.1%} risk" if math.isfinite(risk) and risk >= NOTABLE_RISK else ""
