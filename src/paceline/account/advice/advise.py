"""All advice on a run's cost, the largest saving first. Each is made by a small function; ADVISERS is their table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from paceline.account.advice.advice import LEAST_SHARE, SURE, AdviceEvidence, CostAdvice
from paceline.account.advice.checkpoints import checkpoint_interval
from paceline.account.advice.devices import idle_devices, other_device
from paceline.account.advice.hours import other_hours
from paceline.account.advice.memory import micro_batch_headroom
from paceline.account.advice.places import greener_region
from paceline.account.timeline import held_devices
from paceline.history.goodput import MeasuredGoodput
from paceline.history.records import Records
from paceline.run.survive.budget import spent_in
from paceline.spec.journal.kinds import RunStarted
from paceline.units import format_count
from paceline.verdict.verdict import BoundVerdict

ADVISERS: tuple[Callable[[AdviceEvidence], CostAdvice | None], ...] = (
    idle_devices, other_device, checkpoint_interval, micro_batch_headroom, greener_region,
    other_hours,
)  # fmt: skip
FEWEST_STEPS = 20  # from which on a run's figures say something


def advice_on(
    records: Records, start: RunStarted, bound: BoundVerdict | None, goodput: MeasuredGoodput
) -> tuple[CostAdvice, ...]:
    """Return what would make a run cheaper, as far as its journal tells; nothing of a run that has hardly begun."""
    if len(records.steps) < FEWEST_STEPS:
        return ()
    spent = spent_in(held_devices(records))
    evidence = AdviceEvidence(records, start, bound, goodput, spent)
    found = [advice for adviser in ADVISERS if (advice := adviser(evidence)) is not None]
    told = [_with_amounts(advice, evidence) for advice in found if advice.saves >= LEAST_SHARE]
    return tuple(sorted(told, key=lambda each: (-each.saves, SURE.index(each.sure))))


def advice_line(advice: CostAdvice, said: str = "") -> str:
    """Return a piece of advice in one line: what, how much, how sure. What to try is left out where it is `said`."""
    usd, carbon = advice.amounts.get("usd"), advice.amounts.get("carbon_kg")
    amount = f", ${format_count(usd)}" if usd else f", {carbon:.3g} kg CO2e" if carbon and advice.of == "carbon" else ""
    what = "of the carbon" if advice.of == "carbon" else "of the cost"
    fix = "try what the verdict says" if advice.try_ == said else f"try: {advice.try_}"
    return f"{advice.text}; {fix} (saves {advice.saves:.0%} {what}{amount}; {advice.sure})"


def _with_amounts(advice: CostAdvice, evidence: AdviceEvidence) -> CostAdvice:
    """Return the advice with what its share is of all that is spent so far."""
    spent = evidence.spent
    known = {"usd": spent["usd"], "kwh": spent["kwh"], "carbon_kg": spent["carbon_g"] / 1000,
             "device_hours": spent["device_seconds"] / 3600}  # fmt: skip
    wanted = {"cost": tuple(known), "usd": ("usd",), "carbon": ("carbon_kg",)}[advice.of]
    amounts = {name: known[name] * advice.saves for name in wanted if known[name] > 0}
    return dataclasses.replace(advice, amounts=amounts)
