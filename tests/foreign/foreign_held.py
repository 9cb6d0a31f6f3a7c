"""Holds a foreign model against one device and against a plain loop: what a row of the table is made of."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from distributed import run_ranks
from foreign_catalogue import Foreign
from plain_loop import BETAS, CLIP, DECAY, LR, SEED, trained
from torch.distributed.tensor import DTensor

from paceline.cluster.resolve import resolve_cluster
from paceline.errors import DoesNotFit, PacelineError
from paceline.plan.planned import Planned, plan_prepared
from paceline.plan.prepare import prepare_task
from paceline.run.loop.training import Training
from paceline.run.process.world import join_world
from paceline.session.ready.brief_of_plan import make_brief
from paceline.spec.cluster import ClusterSpec
from paceline.spec.load import Spec
from paceline.spec.plan import PlanSpec
from paceline.spec.profile import ModelProfile
from paceline.spec.proof.records import CheckProof
from paceline.spec.run import RunSpec
from paceline.spec.steps.update import OptimizerSpec, ScheduleSpec
from paceline.spec.task import DataSpec, ModelSpec, Task, TurnSpec
from paceline.supervise.told.brief import Brief
from paceline.task.data.source import open_sources
from paceline.units import Amount
from paceline.verify.process.checks import CHECKS
from paceline.verify.process.group import Job
from paceline.verify.process.start import exact_plan, proof_of, verify_text
from paceline.verify.twin.fold import for_twin
from paceline.verify.twin.proof_parts import SWEEP, WHOLE, Subject, jobs_of

STEPS, PROOF_STEPS, BATCH = 20, 2, 12
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
SECONDS = 90.0  # for the ranks of one proof or run; machines are busy, but none of them needs as many
# Losses and weights after twenty steps in fp64: rounding, or what a model computes in fp32 whatever it is asked for.
SAME, SAME_IN_FP32 = 1e-8, 1e-4


def task_of(row: Foreign) -> Task:
    """Return the task of a row."""
    return Task(
        name="foreign",
        model=ModelSpec(row.model, arguments=row.arguments),
        data=DataSpec(row.data),
        objective="auto" if row.turns else row.objective,
        turns=tuple(TurnSpec(name, objective, (pattern,)) for name, objective, pattern in row.turns),
        optimizer=OptimizerSpec(lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY, clip_norm=CLIP),
        schedule=ScheduleSpec(kind="constant"),
        global_batch=f"{BATCH} samples",
        stop=f"{STEPS} steps",
        seed=SEED,
    )


def spec_of(row: Foreign, degrees: dict[str, int]) -> Spec:
    """Return the spec of a row that asks for a layout; micro-batches are small, so that there are several."""
    devices = 1
    for axis, degree in degrees.items():
        devices *= degree if axis != "ep" else 1
    return Spec(
        task=task_of(row),
        cluster=ClusterSpec(device="cpu", devices=devices, probe=False, learn=False),
        plan=PlanSpec(**{axis: degrees.get(axis, 1) for axis in AXES}),
        run=RunSpec(dir="unused", evaluate_every=None, checkpoint_every=None, check_every=Amount(5, "steps")),
    )


def widest(profile: ModelProfile) -> dict[str, int]:
    """Return the layout of up to four ranks that composes most of what is open: {} where nothing is."""
    closed = profile.closed_axes or {}
    data = {"dp_shard": 2} if "dp_shard" not in closed else {}
    for axis in ("tp", "pp", "cp"):
        if axis not in closed:
            return {**data, axis: 2}
    return {**data, "dp_replicate": 2} if "dp_replicate" not in closed and data else data


def look(row: Foreign, *, whole: bool = True) -> dict[str, Any]:
    """Return the row of the table for a model, as plain data: axes, proofs, and twenty steps against a plain loop.

    Without `whole` the best layout alone is proven, not every open axis too.
    """
    record: dict[str, Any] = {"name": row.name, "kind": row.kind, "what": row.what, "random": row.random}
    plain = trained(row.model, row.arguments, row.data, row.objective, BATCH, STEPS, row.turns)
    record["plain"] = [plain["losses"][0], plain["losses"][-1]]
    try:
        profile = prepare_task(spec_of(row, {})).profile
    except PacelineError as error:
        return {**record, "refused": f"{error.what}: {error.because}"}
    closed = profile.closed_axes or {}
    record["closed"] = {axis: closed[axis] for axis in (*AXES, "accumulation") if axis in closed}
    record["open"] = [axis for axis in AXES if axis not in closed]
    best = widest(profile)
    alone = [_alone(axis) for axis in record["open"] if axis != "dp_replicate"] if whole else []
    record["proofs"] = dict(_proofs(row, profile, [degrees for degrees in alone if degrees != best], best))
    record["steps"] = {}
    expected: dict[str, Any] | None = None if row.random else plain
    for degrees in [{}, best] if best else [{}]:
        record["steps"][_named(degrees)], found = _steps(row, degrees, expected)
        expected = found if row.random else plain
    return record


def every_axis(row: Foreign) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return the axes that are open to a model, and the proof of each alone."""
    profile = prepare_task(spec_of(row, {})).profile
    opened = [axis for axis in AXES if axis not in (profile.closed_axes or {})]
    return opened, dict(_proofs(row, profile, [_alone(axis) for axis in opened], {}))


def _alone(axis: str) -> dict[str, int]:
    """Return the smallest layout of an axis: the ranks that share experts are those of the sharding axis."""
    return {"dp_shard": 2, "ep": 2} if axis == "ep" else {axis: 2}


def _named(degrees: dict[str, int]) -> str:
    return " ".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "one device"


# ---- the proof -----------------------------------------------------------------------------------------------------


def _proofs(
    row: Foreign, profile: ModelProfile, alone: list[dict[str, int]], best: dict[str, int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the proof of every layout in fp64, of the parts that `paceline verify` makes: all of them for the best."""
    for degrees in [*alone, *([best] if best else [])]:
        name, scope = _named(degrees), WHOLE if degrees == best else SWEEP
        spec = spec_of(row, degrees)
        try:
            plan = exact_plan(spec, spec.plan, profile)
        except DoesNotFit as refusal:
            yield name, {"refused": refusal.because}
            continue
        jobs = jobs_of(Subject(spec, plan, None, ("fp64",), exact=True), scope)
        results: dict[int, CheckProof] = {}
        try:
            for ranks in sorted({job.plan.layout.devices for job in jobs}):
                mine = {index: job for index, job in enumerate(jobs) if job.plan.layout.devices == ranks}
                found = run_ranks(prove_here, ranks, list(mine.values()), timeout_seconds=SECONDS)[0]
                results |= dict(zip(mine, found, strict=True))
        except Exception as error:  # whatever it is, it is what the row has to say
            if all(found.equal for found in results.values()):
                yield name, {"failed": said(error)}
                continue  # else a part before it has named the cause, as the command does
        made = itertools.takewhile(results.__contains__, range(len(jobs)))
        proof = proof_of(plan, jobs, [results[index] for index in made], PROOF_STEPS, 0.0)
        worst = max(proof.differences["loss"], proof.differences["weights"])
        rounding = proof.ill_conditioned
        inside = f"computes parts in {rounding.format}: {rounding.where}" if rounding and rounding.where else ""
        why = "" if proof.equal else verify_text(proof)
        yield name, {"equal": proof.equal, "worst": worst, "inside": inside, "why": why}


def prove_here(jobs: list[Job]) -> list[CheckProof]:
    """Return the results of the jobs of one plan; every rank calls it."""
    world, kept = join_world("cpu", threads=1), {}
    results = []
    for job in jobs:
        task, steps = job.spec.task, job.steps or PROOF_STEPS
        source = for_twin(open_sources(task.data, task.seed)[0], task, job.masked)
        results.append(CHECKS[job.check](task, job.plan, world, source, source.items_per_sample, steps, kept))
        kept.clear()
    return results


def said(error: BaseException) -> str:
    """Return the first line of what an error says."""
    if isinstance(error, PacelineError):
        return f"{error.what}: {error.because}"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


# ---- twenty steps --------------------------------------------------------------------------------------------------


def _steps(
    row: Foreign, degrees: dict[str, int], expected: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return how far twenty steps under a layout are from those expected, or why there are none; and what they gave."""
    try:
        spec = spec_of(row, degrees)
        planned = plan_prepared(prepare_task(spec), resolve_cluster(spec.cluster)[0])
        brief = make_brief(planned)
        brief = dataclasses.replace(brief, plan=in_micro_batches(planned))
        ranks = run_ranks(train_here, brief.plan.layout.devices, spec, brief, timeout_seconds=SECONDS)
    except Exception as error:  # as above
        if not isinstance(error, PacelineError):
            traceback.print_exception(error)
        return {"failed": said(error)}, None
    state = {name: tensor for rank in ranks for name, tensor in rank["state"].items()}
    found = {"losses": ranks[0]["losses"], "state": state}
    record = {"plan": str(brief.plan), "first": found["losses"][0], "last": found["losses"][-1]}
    if expected is not None:
        both = zip(found["losses"], expected["losses"], strict=True)
        record["loss"] = max(abs(a - b) / max(abs(b), 1e-12) for a, b in both)
        record["weights"] = distance(state, expected["state"])
        record["missing"] = sorted(set(expected["state"]) - set(state))
    return record, found


def in_micro_batches(planned: Planned) -> Any:
    """Return the plan in fp64 and, where accumulation is open, in micro-batches of two rows at most."""
    plan, closed = planned.plan, planned.profile.closed_axes or {}
    if "accumulation" in closed:
        return dataclasses.replace(plan, precision="fp64")
    rows = -(-BATCH // plan.layout.data_degree)
    return dataclasses.replace(plan, precision="fp64", micro_batch=2, accumulation=-(-rows // 2))


def train_here(spec: Spec, brief: Brief) -> dict[str, Any]:
    """Train a task to its end in this world; return the losses and this rank's parameters, whole."""
    world = join_world("cpu", threads=1)
    with tempfile.TemporaryDirectory() as folder:
        folder = world.share(folder)
        training = Training(spec, brief, world, Path(folder))
        stats = [training.step(batch) for batch in training]
        world.wait()
    losses = [one.loss for step in stats for one in list(step.turns.values()) or [step]]
    state = {}
    for name, parameter in training.model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        state[name] = whole.detach().clone()
    return {"losses": losses, "state": state}


def distance(state: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all weights over that of the reference, of those that both have."""
    both = [name for name in reference if name in state]
    apart = sum(float((state[name] - reference[name]).abs().square().sum()) for name in both)
    return (apart / sum(float(reference[name].abs().square().sum()) for name in both)) ** 0.5
