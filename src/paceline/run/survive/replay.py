"""The first step after a resume, held against the same step of the start before, as the journal has it.

A step's loss and gradient norm follow from the weights that were restored and from the samples that are read. The
journal of a run that was killed goes beyond its newest checkpoint, so both are known already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import VerificationFailed
from paceline.run.loop.resume import Progress
from paceline.run.loop.step import StepStats
from paceline.spec.journal.kinds import DecisionRecord, ReplayRecord, RunStarted, StepRecord, parse
from paceline.spec.journal.reading import reading_of, records_back_to, records_of_kind, starts_on
from paceline.spec.journal.record import read
from paceline.spec.plan import Plan
from paceline.spec.task import ModelSpec
from paceline.task.models.sizes import is_named

SWITCHES = ("tf32", "cudnn_benchmark")
PASSED_OVER = ("rollback",)  # decisions after which a step that was made is made with other samples
# Largest relative differences. On the same layout there are none; on another one sums are made in another order.
# fp64 has the proof's; fp32 ten times the proof's for the loss, a hundred for the norm, since no second look settles
# here what rounding explains; low precision has units in the last place (2^-10, 2^-7), one for the loss, four for the
# norm. Between layouts of tiny decoders bf16 was 6e-5 and 5e-4 off, fp16 1e-5 and 6e-5, and weights a step old 1e-2
# and 2e-2 (tests/run/survive/test_replay_layouts.py).
TOLERANCES = {
    "loss": {"fp64": 1e-12, "fp32": 1e-4, "fp16": 2.0**-10, "bf16": 2.0**-7},
    "grad_norm": {"fp64": 1e-10, "fp32": 1e-3, "fp16": 4 * 2.0**-10, "bf16": 4 * 2.0**-7},
}


@dataclass(frozen=True)
class StepBefore:
    """What the journal says of the step that comes first after a resume, and which start made it."""

    step: int
    position_before: int
    position_after: int
    loss: float
    grad_norm: float
    attempt: int
    sample_ids: tuple[int, ...] | None


def expected_step(
    run_dir: Path, progress: Progress, plan: Plan, switches: Sequence[object], fingerprint: str | None = None
) -> StepBefore | None:
    """Return what the newest record of the step after `progress` says, or None where the journal has none to hold to.

    `switches` are the run's options that change how numbers are rounded; a start that had others is passed over, and so
    is one on other data than those of the fingerprint. Starts are read newest first, and each from its end.
    """
    step = progress.step + 1
    with reading_of(run_dir):
        for attempt, path in reversed(starts_on(run_dir, fingerprint)):
            said = [record for record in records_back_to(path, step) if _is_about(record, step)]
            if said:
                last = parse({"attempt": attempt, **said[-1]})
                # An update that was left out was so for what may not come again.
                if isinstance(last, StepRecord) and last.updated is not False and _is_alike(path, plan, switches):
                    return _expected(last)
                return None
    return None


def _is_about(record: Mapping[str, object], step: int) -> bool:
    """Return whether a record is of the step, or says that steps before it are to be made with other samples."""
    if record["kind"] == StepRecord.KIND:
        return bool(record.get("step") == step)
    return record["kind"] == DecisionRecord.KIND and record.get("what") in PASSED_OVER


def _is_alike(path: Path, plan: Plan, switches: Sequence[object]) -> bool:
    """Return whether a start rounded its numbers as `plan` and `switches` do."""
    started = read(RunStarted, next(records_of_kind(path, RunStarted.KIND), {}))
    run = started.spec.get("run", {})
    as_planned = started.plan.get("precision") == plan.precision
    return as_planned and [run.get(name) for name in SWITCHES] == [*switches]


def _expected(record: StepRecord) -> StepBefore | None:
    known = record.position_before, record.position_after, record.loss, record.grad_norm
    if record.step is None or None in known:
        return None
    before, after, loss, norm = known
    assert before is not None and after is not None and loss is not None and norm is not None
    return StepBefore(record.step, before, after, loss, norm, record.attempt or 0, record.sample_ids)


def rounding_of(precision: str, model: object) -> str:
    """Return the format in which a model rounds at its coarsest: one that is not ours may compute parts in fp32.

    Norms and scans of transformers' models do so whatever they are asked for, which fp64's tolerances would not allow.
    """
    is_ours = isinstance(model, ModelSpec) and is_named(model.name)
    return precision if is_ours or precision != "fp64" else "fp32"


def hold_against(
    expected: StepBefore, stats: StepStats, sample_ids: Sequence[int] | None, precision: str
) -> ReplayRecord:
    """Return how far the first step is from the one in the journal.

    Raises VerificationFailed naming the first quantity that is too far off: positions, samples, loss, gradient norm.
    """
    positions = (stats.position_before, stats.position_after)
    if positions != (expected.position_before, expected.position_after):
        was = f"{expected.position_before} to {expected.position_after}"
        raise _another_step(expected, f"its samples were those from position {was}, and are {positions[0]} to "
                            f"{positions[1]}")  # fmt: skip
    if sample_ids is not None and expected.sample_ids is not None and tuple(sample_ids) != expected.sample_ids:
        place = next(
            (at for at, (now, then) in enumerate(zip(sample_ids, expected.sample_ids, strict=False)) if now != then),
            min(len(sample_ids), len(expected.sample_ids)),
        )
        raise _another_step(expected, f"the sample at position {positions[0] + place} is another one")
    differences = {
        "loss": relative(stats.loss, expected.loss), "grad_norm": relative(stats.grad_norm, expected.grad_norm),
    }  # fmt: skip
    numbers = {"loss": (expected.loss, stats.loss), "grad_norm": (expected.grad_norm, stats.grad_norm)}
    for name, allowed in TOLERANCES.items():
        if not differences[name] <= allowed[precision]:
            then, now = numbers[name]
            raise _another_step(
                expected, f"its {name} was {then!r} and is {now!r}: {differences[name]:.1e} off, where rounding in "
                f"{precision} explains {allowed[precision]:.1e}",
            )  # fmt: skip
    return ReplayRecord(stats.step, expected.attempt, differences)


def relative(now: float, then: float) -> float:
    """Return the relative difference of two numbers; none between two that are both NaN, or the same infinity."""
    if now == then or (math.isnan(now) and math.isnan(then)):
        return 0.0
    return abs(now - then) / max(abs(then), 1e-300)


def _another_step(expected: StepBefore, because: str) -> VerificationFailed:
    return VerificationFailed(
        f"step {expected.step} is not the one that start {expected.attempt} of this run made",
        because,
        "report this with both journals; `paceline checkpoint verify` reads the checkpoint again, an earlier one may "
        "do; run.replay=false goes on all the same, on record",
    )
