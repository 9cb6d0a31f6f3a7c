"""Advice on checkpoints: saved too often for how rarely this run fails, or too rarely."""

from __future__ import annotations

import itertools
import statistics

from paceline.account.advice.advice import AdviceEvidence, CostAdvice
from paceline.history.phases import surviving
from paceline.history.records import number
from paceline.simulate.interval import daly_interval
from paceline.spec.journal.kinds import CheckpointRecord, RecoveryRecord, RunEnded
from paceline.spec.journal.record import plain_mean
from paceline.units import format_seconds, plural

APART = 1.5  # times too long or too short, from which on an interval is worth a word
FAULTLESS = 1.6  # -ln 0.2: four runs out of five without a fault in T have more than T / 1.6 between them


def checkpoint_interval(evidence: AdviceEvidence) -> CostAdvice | None:
    """Return a better interval by Daly's formula, from what saves cost here and how often faults came."""
    saves = [each for each in evidence.records.of(CheckpointRecord) if each.tier is None]
    stalls = [cost for each in saves if (cost := number(each.cost_seconds)) is not None]
    steps = sorted({each.step for each in saves if each.step})
    counted = len(surviving(evidence.records))
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    if not gaps or not stalls or not counted:
        return None
    # What lies between two checkpoints is all the useful time there: rare long steps and evaluations are a part of it.
    step, stall = evidence.goodput.useful_seconds / counted, plain_mean(stalls)
    every, faults, exposed = statistics.median(gaps) * step, _interruptions(evidence), evidence.goodput.exposed_seconds
    between = exposed / faults if faults else exposed / FAULTLESS
    best = max(step, daly_interval(stall, between))
    if not step or not every or 1 / APART < best / every < APART or (not faults and best < every):
        return None
    saved = _overhead(every, stall, between) - _overhead(best, stall, between)
    seen = f"{plural(faults, 'fault') if faults else 'no fault'} in {format_seconds(exposed)}"
    text = f"checkpoints come every {format_seconds(every)}, too {'often' if best > every else 'rarely'}"
    because = f"a save costs {format_seconds(stall)}, and there was {seen}; Daly's interval is {format_seconds(best)}"
    value = f'run.checkpoint_every = "{max(1, round(best / step))} steps"'
    return CostAdvice("checkpoints", text, value, "cost", saved, "measured" if faults > 1 else "likely", because)


def _interruptions(evidence: AdviceEvidence) -> int:
    """Return how often work was lost: faults that the run went on from, and starts that broke off and were resumed."""
    records = evidence.records
    recoveries = records.of(RecoveryRecord)
    recovered, orderly = ({each.attempt for each in found} for found in (
        recoveries, [end for end in records.of(RunEnded) if end.status != "failed"]))  # fmt: skip
    broken = [before for before, after in itertools.pairwise(records.starts)
              if before.attempt not in orderly and after.attempt not in recovered]  # fmt: skip
    return len(recoveries) + len(broken)


def _overhead(every: float, stall: float, between: float) -> float:
    """Return the part of time that saving and losing half an interval with each fault take."""
    return stall / every + every / (2 * between)
