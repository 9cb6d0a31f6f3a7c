"""`plan.micro_batch = "auto"`: the forecast's choice, confirmed in processes that end before the run begins.

A few steps of the plan are made with the chosen micro-batch, half of it and twice as much. Running out of memory there
costs a process that nobody needs, and never a step of the run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import DoesNotFit, PacelineError, tells_exhausted
from paceline.plan.cost.memory.usable import usable_bytes
from paceline.plan.cost.pricing import price
from paceline.plan.feasible.micro_batch import with_micro_batch
from paceline.plan.planned import Planned
from paceline.plan.search.micro_batch import TriedMicroBatch, taken, worth_a_try
from paceline.run.process.handover import hand_over
from paceline.scratch import Scratch
from paceline.session.confirm.device import spread_of
from paceline.session.ready.prove import cannot_be_handed_over
from paceline.spec.arguments import run_directory
from paceline.spec.journal.kinds import DecisionRecord
from paceline.spec.journal.settled import MICRO_BATCH, conditions_of, settled_micro_batch
from paceline.supervise.blame import Outcome
from paceline.supervise.supervisor import supervise
from paceline.units import format_bytes, format_seconds, format_sizes

SECONDS = 4.0  # of timing; starting the processes comes on top
LIMIT_SECONDS = 600.0
PASSES = 2  # that the largest micro-batch makes, so that gradients are added up as in a step

Say = Callable[[str], None]


@dataclass(frozen=True)
class Tries:
    """What the probe found: the micro-batches whose steps were made, and those for which memory was too small."""

    made: tuple[TriedMicroBatch, ...]
    failed: dict[int, str]


def confirm_micro_batch(planned: Planned, say: Say) -> tuple[Planned, tuple[DecisionRecord, ...]]:
    """Return the plan with its micro-batch confirmed where the spec asks for that, and what was decided.

    What an earlier start of the run has settled is repeated. Raises DoesNotFit where no micro-batch fits.
    """
    if not planned.spec.plan.confirms:
        return planned, ()
    before, settled = planned.plan, settled_micro_batch(run_directory(planned.spec), planned.plan)
    evidence: dict[str, object] = {"conditions": conditions_of(before)}
    if settled is not None:
        return _decided(planned, settled, "an earlier start of this run has settled it", evidence, say)
    because = _why_not(planned)
    if because:
        return _decided(planned, before.micro_batch, f"the forecast's, not confirmed: {because}", evidence, say)
    tries = _tries(planned, say)
    known = usable_bytes(planned.cluster)
    fits = [each for each in tries.made if not each.peak_bytes > known]
    evidence |= {"tried": [dataclasses.asdict(each) for each in tries.made], "out_of_memory": tries.failed,
                 "usable_bytes": known, "forecast_micro_batch": before.micro_batch}  # fmt: skip
    if not fits:
        raise DoesNotFit(
            f"no micro-batch of {before} fits",
            "; ".join(f"{size}: {why}" for size, why in tries.failed.items())
            or "the smallest takes {} of {} usable".format(*format_sizes(tries.made[0].peak_bytes, known)),
            'more devices, shorter samples, or plan.recompute = "full"',
        )
    best = taken(fits)
    told = ", ".join(
        f"{each.micro_batch} in {format_seconds(each.seconds)} and {format_bytes(each.peak_bytes)}" for each in fits
    )
    told += "".join(f", {size} runs out of memory" for size in tries.failed)
    return _decided(planned, best.micro_batch, f"measured, the same samples: {told}", evidence, say)


def _why_not(planned: Planned) -> str:
    """Return why no probe can be made here, or ""."""
    cluster, layout = planned.cluster, planned.plan.layout
    if not cluster.host:
        return f"the cluster is {cluster.devices} x {cluster.device.name}, and this is another machine"
    if layout.devices > cluster.devices_per_node:
        return f"the plan's {layout.devices} devices are not all on this machine"
    if "accumulation" in (planned.profile.closed_axes or {}):
        return (planned.profile.closed_axes or {})["accumulation"]
    return cannot_be_handed_over(planned)


def _tries(planned: Planned, say: Say) -> Tries:
    """Make the probe's steps; where memory runs out, again with smaller micro-batches, in other processes."""
    context = planned.search.candidates.context
    sizes = worth_a_try(context, planned.plan)
    failed: dict[int, str] = {}
    while sizes:
        say(f"probe    steps with micro-batch {', '.join(map(str, sizes))}, in processes of their own")
        made, (size, why) = _probe(planned, sizes)
        if not why:
            return Tries(made, failed)
        failed[size] = why
        sizes = tuple(each for each in sizes if each < size) or ((size // 2,) if size > 1 else ())
    return Tries((), failed)


def _probe(planned: Planned, sizes: tuple[int, ...]) -> tuple[tuple[TriedMicroBatch, ...], tuple[int, str]]:
    """Return what one probe measured, and at which micro-batch memory ran out with what words (0 and "": at none).

    Raises what else ended it.
    """
    plan, cluster = with_micro_batch(planned.plan, sizes[-1]), planned.cluster
    samples = min(plan.batch_samples, PASSES * sizes[-1] * plan.layout.data_degree)
    samples = plan.batch_samples if plan.layout.pp > 1 else samples
    with Scratch("probe") as name:
        folder = Path(name)
        request, result = folder / "request.json", folder / "result.json"
        asked = {"spec": str(hand_over(planned.spec, folder)), "plan": dataclasses.asdict(plan),
                 "kind": cluster.device.kind, "threads": planned.threads, "sizes": sizes, "samples": samples,
                 "seconds": SECONDS}  # fmt: skip
        request.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "paceline.session.confirm.device", str(request), str(result)]
        environ = {**os.environ, **({"OMP_NUM_THREADS": str(planned.threads)} if planned.threads else {})}
        outcome = supervise(command, plan.layout.devices, environ, LIMIT_SECONDS)
        told: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"trying": sizes[0]}
    if outcome.error is None:
        return tuple(
            TriedMicroBatch(size, statistics.median(seconds), spread_of(seconds), told["peak_bytes"][str(size)])
            for size in sizes
            if (seconds := told["seconds"][str(size)])
        ), (0, "")
    if not _ran_out(outcome):
        raise PacelineError(
            f"micro-batch {told['trying']} of {plan} could not be tried",
            f"{outcome.error['what']}: {outcome.error['because']}",
            "plan.micro_batch = 0 takes the forecast's without a probe",
        )
    return (), (told["trying"] or sizes[-1], f"{outcome.error['what']}: {outcome.error['because']}")


def _ran_out(outcome: Outcome) -> bool:
    """Return whether memory is what ended a probe: told by a rank, or by the kernel, whose usual reason it is."""
    assert outcome.error is not None
    return tells_exhausted(outcome.error) or outcome.exit_code == 128 + signal.SIGKILL


def _decided(
    planned: Planned, micro_batch: int, because: str, evidence: dict[str, object], say: Say
) -> tuple[Planned, tuple[DecisionRecord, ...]]:
    plan = with_micro_batch(planned.plan, micro_batch)
    evidence["micro_batch"] = plan.micro_batch
    say(f"probe    micro-batch {plan.micro_batch}: {because}")
    decision = DecisionRecord(MICRO_BATCH, planned.plan.micro_batch, plan.micro_batch, because, evidence)
    if plan == planned.plan:
        return planned, (decision,)
    forecast = price(planned.search.candidates.context, plan)
    forecast = dataclasses.replace(forecast, copies=planned.forecast.copies)
    return dataclasses.replace(planned, plan=plan, forecast=forecast), (decision,)
