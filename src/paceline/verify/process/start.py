"""Start a proof: plan the task, make a twin, run both in disposable processes and say whether the two are equal."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.errors import ConfigError, DoesNotFit, PacelineError, VerificationFailed
from paceline.foreign_errors import ON_GPUS_ALONE, PLAIN_ON_CPU, tells_of_flex_attention, tells_of_no_second_derivative
from paceline.plan.feasible.refusals import (
    copies_in_step,
    layout_refusal,
    offloaded_activations,
    spread_frozen,
    watched_activations,
)
from paceline.plan.feasible.stages import pipeline_limits, with_pipeline
from paceline.plan.planned import Planned, plan_task
from paceline.spec.amounts import batch_samples
from paceline.spec.arguments import plan_spec
from paceline.spec.layout import Layout
from paceline.spec.load import Spec
from paceline.spec.optimizers import rounds_inside
from paceline.spec.plan import Plan, PlanSpec, classes_of, parse_rows
from paceline.spec.profile import ModelProfile
from paceline.spec.proof.records import CheckProof, PartProof, Proof
from paceline.spec.sync import PLAIN
from paceline.supervise.standby import StartsApart
from paceline.task.data.facts import data_facts
from paceline.task.profile.of_task import profile_task
from paceline.task.settled import settle
from paceline.verify.compare.tolerance import DTYPES, QUANTITIES, WITHOUT_SIZE, larger
from paceline.verify.process.group import Job, RankTraceback, run_jobs
from paceline.verify.rounding.verdict import ADVICE, ILL_CONDITIONED, explained_by_rounding, rounding_text, verdict_of
from paceline.verify.twin.proof_parts import WHOLE, Subject, jobs_of
from paceline.verify.twin.task import LARGEST_MICRO_BATCH, mixed_modes

STEPS = 3
SHOWN = 2  # thresholds that no number crossed
ONE_DEVICE = str(Layout())
Say = Callable[[str], None]


def verify_spec(
    spec: Spec,
    *,
    layout: str | None = None,
    steps: int = STEPS,
    dtypes: Sequence[str] = DTYPES,
    say: Say | None = None,
    standby: StartsApart | None = None,
) -> Proof:
    """Return whether the spec's plan, or the given layout ("dp_shard=2"), equals one device.

    A layout that cannot be had is not an error: it says in `refused_because` why not. One that is given need not fit
    this machine, since its twin is what runs. Processes are forked from `standby`, where there is one.
    """
    began, spec = time.perf_counter(), settle(spec, say).spec
    try:
        if layout is None:
            planned = plan_task(spec, say=say)
            return verify_planned(planned, steps=steps, dtypes=dtypes, standby=standby)
        plan, vocab = plan_layout(spec, plan_spec(layout), say)
        return verify_plan(spec, plan, vocab, steps=steps, dtypes=dtypes, standby=standby)
    except DoesNotFit as refusal:
        asked = spec.plan if layout is None else plan_spec(layout)
        return refused(str(degrees_of(asked)), refusal, steps, time.perf_counter() - began)


def degrees_of(asked: PlanSpec) -> Layout:
    """Return the layout that constraints state, with 1 for every axis they leave open."""
    return Layout(**{field.name: max(1, getattr(asked, field.name)) for field in dataclasses.fields(Layout)})


def plan_layout(spec: Spec, asked: PlanSpec, say: Say | None = None) -> tuple[Plan, int | None]:
    """Return a plan of exactly the layout asked for, without asking what fits, and the data's vocabulary.

    What `asked` leaves open is the spec's. Raises DoesNotFit for an axis that is closed to the model, with the reason.
    """
    facts = data_facts(spec.task.data, say)
    plan = exact_plan(spec, asked, profile_task(spec.task, facts))
    with contextlib.suppress(ConfigError):  # of a batch that is no whole number of samples: training says so
        if not plan.rows:
            plan = dataclasses.replace(plan, batch_samples=batch_samples(spec.task, facts.items_per_sample))
    return plan, facts.vocab


def exact_plan(spec: Spec, asked: PlanSpec, profile: ModelProfile) -> Plan:
    """Return a plan of exactly the layout asked for; what `asked` leaves open is the spec's. Raises DoesNotFit."""
    layout, default, closed = degrees_of(asked), PlanSpec(), profile.closed_axes or {}
    for axis in (field.name for field in dataclasses.fields(Layout)):
        if getattr(layout, axis) > 1 and axis in closed:
            raise DoesNotFit(
                f"{axis} = {getattr(layout, axis)} cannot be had", closed[axis], "dp_replicate or dp_shard"
            )
    because = layout_refusal(Plan(layout), profile)
    if because:
        raise DoesNotFit(f"{layout} cannot be had", because, "another degree")

    def chosen(name: str) -> Any:
        value = getattr(asked, name)
        return value if value != getattr(default, name) else getattr(spec.plan, name)

    whole_batch = "accumulation" in closed
    recompute, schedule, offload = chosen("recompute"), chosen("schedule"), chosen("offload")
    precision = chosen("precision")  # "auto" asks the device, of which nothing is known here
    shares = parse_rows(chosen("rows"))
    shares = shares if len(shares) == layout.data_degree else ()  # those of another layout
    classes = classes_of(chosen("zero"), chosen("gradients"))
    zero, whole = max(classes, key=lambda one: (one[0], not one[1]))
    plan = Plan(
        layout=layout,
        rows=shares,
        batch_samples=sum(shares) or 1,
        zero=zero,
        whole_gradients=whole,
        micro_batch=LARGEST_MICRO_BATCH if whole_batch else chosen("micro_batch") or 1,
        accumulation=1 if whole_batch else 2,
        recompute="none" if recompute == "auto" else recompute,
        recompute_save=chosen("recompute_save"),
        recompute_budget=chosen("recompute_budget"),
        recompute_blocks=mixed_modes(profile.repeated_blocks, offload in ("activations", "all"))
        if recompute == "budget"
        else (),
        offload="none" if offload == "auto" else offload,
        frozen="as-model" if chosen("frozen") == "auto" else chosen("frozen"),
        schedule="1f1b" if schedule == "auto" else schedule,
        cp_method=chosen("cp_method"),
        expert_slots=chosen("expert_slots"),
        precision="fp32" if precision == "auto" else precision,
        sync=chosen("sync") if layout.dp_replicate > 1 else PLAIN,
    )
    pipeline = dataclasses.replace(asked, **{name: chosen(name) for name in ("schedule", "virtual_stages", "stages")})
    plan = with_pipeline(plan, pipeline, profile)
    limit = pipeline_limits(plan, profile)
    if limit:
        raise DoesNotFit(f"the pipeline of {plan} cannot be had", limit, "another pp, schedule or split")
    asked_for = (watched_activations, offloaded_activations, copies_in_step, spread_frozen)
    limit = next((because for each in asked_for if (because := each(plan, profile))), None)
    if limit:
        raise DoesNotFit(f"{plan} cannot be had", limit, "another recompute, offload, frozen or sync")
    return plan


def refused(layout: str, refusal: PacelineError, steps: int, seconds: float) -> Proof:
    """Return what there is to say of a layout that cannot be had."""
    because = f"{refusal.what}: {refusal.because}" if refusal.because else refusal.what
    return Proof(layout, equal=False, verdict=None, seconds=seconds, steps=steps, refused_because=because)


def verify_planned(
    planned: Planned,
    *,
    steps: int = STEPS,
    dtypes: Sequence[str] = DTYPES,
    scope: str = WHOLE,
    standby: StartsApart | None = None,
) -> Proof:
    """Return the proof of one planned task; `scope` BRIEF is the one before training."""
    given = (planned.spec, planned.plan, planned.facts.vocab)
    return verify_plan(*given, steps=steps, dtypes=dtypes, scope=scope, standby=standby)


def verify_plan(
    spec: Spec,
    plan: Plan,
    data_vocab: int | None,
    *,
    steps: int = STEPS,
    dtypes: Sequence[str] = DTYPES,
    scope: str = WHOLE,
    standby: StartsApart | None = None,
) -> Proof:
    """Return the proof of a plan: the worst differences over its parts up to the first of which one is too large."""
    began = time.perf_counter()
    if rounds_inside(spec.task.optimizer):
        # The last digit of an fp32 gradient decides how Muon's bf16 rounds: only fp64 tells a mistake from that.
        dtypes = ("fp64",)
    jobs = jobs_of(Subject(spec, plan, data_vocab, dtypes), scope)
    results: list[CheckProof] = []
    for result in run_jobs(jobs, steps, None, standby, until_failed=True):
        if isinstance(result, PacelineError):
            if all(known.equal for known in results):
                raise _ended(result, plan, jobs, results) from result
            break  # a run of wrong numbers ends as it must; what the parts before it named says more
        results.append(result)
        if not result.equal:
            break
    return proof_of(plan, jobs, results, steps, time.perf_counter() - began)


def _ended(error: PacelineError, plan: Plan, jobs: Sequence[Job], before: Sequence[CheckProof]) -> PacelineError:
    """Return the error that ended a proof; of one that nobody wrote for users, what it says of the layout.

    `before` are the results of the parts before it, which are equal. What one device alone runs into, and an error
    that says itself what to do, stay as they are.
    """
    job = jobs[len(before)]
    if isinstance(error, RankTraceback) and tells_of_no_second_derivative(error.what):
        return ConfigError(
            "the loss holds a gradient of an operator that torch cannot differentiate twice",
            f"a penalty on gradients leads back through the operator's own backward pass: {error.what}",
            "of attention: `with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):` around the objective's forward"
            " passes; of other operators: the same written out in sums and products",
        )
    if isinstance(error, RankTraceback) and tells_of_flex_attention(error.what):
        return ConfigError("the program cannot be proven here", ON_GPUS_ALONE, PLAIN_ON_CPU)
    if not isinstance(error, RankTraceback) or job.plan.layout.devices == 1:
        return error
    cut = [known for one, known in zip(jobs, before, strict=False) if one.check == "whole batch" and not known.left_out]
    if job.plan.precision == "fp64" and any(known.dtype == "fp32" for known in cut):
        return ConfigError(
            "the program knows no fp64, in which it was to be proven",
            f"{error.what} ({job.part} in fp64); in fp32 one device computes loss and gradients of the same task",
            "--dtype fp32 proves all parts in fp32",
        )
    known = "; one device computes loss and gradients of the same task" if cut else ""
    found = VerificationFailed(
        f"layout {plan.layout} ends with an error in its proof",
        f"{error.what} ({job.part} in {job.plan.precision}{_ran_as(str(plan.layout), str(job.plan.layout))}){known}",
        "a layout without one of its axes shows which axis it is; report it with the traceback where model, data and"
        " objective are not your own",
    )
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def proof_of(plan: Plan, jobs: Sequence[Job], results: Sequence[CheckProof], steps: int, seconds: float) -> Proof:
    """Return the proof of a plan from the results of its jobs; they may end with the first that is not equal."""
    parts = [_part_of(job, result) for job, result in zip(jobs, results, strict=False)]
    wrong = None
    for part, result in zip(parts, results, strict=True):
        if result.first_difference is not None:
            where = {name: getattr(part, name) for name in ("part", "dtype", "ran_as")}
            wrong = dataclasses.replace(result.first_difference, **where)
            break
    dtypes: dict[str, dict[str, float]] = {}
    for result in results:
        _keep_larger(dtypes.setdefault(result.dtype, {}), result.differences)
    differences = dict.fromkeys(QUANTITIES, 0.0)
    for dtype, found in dtypes.items():
        if dtype in DTYPES:  # what rounds more would hide the rest
            _keep_larger(differences, found)
    rounding = explained_by_rounding(parts)
    twins = [str(job.plan.layout) for job in jobs if job.plan.layout.devices > 1]  # some parts ask one device alone
    return Proof(
        layout=str(plan.layout),
        ran_as="; ".join(dict.fromkeys(twins or [ONE_DEVICE])),
        equal=wrong is None,
        verdict=verdict_of(wrong, rounding),
        ill_conditioned=rounding,
        seconds=seconds,
        steps=steps,
        parts=tuple(parts),
        dtypes=dtypes,
        differences=differences,
        sync="" if plan.sync.is_plain else str(plan.sync),
        first_difference=wrong,
    )


def _part_of(job: Job, result: CheckProof) -> PartProof:
    shown = {
        name: getattr(result, name)
        for name in ("dtype", "equal", "seconds", "left_out", "ill_conditioned", "steps", "not_tried")
    }
    return PartProof(part=job.part, check=job.check, ran_as=str(job.plan.layout), **shown)


def _keep_larger(kept: dict[str, float], found: Mapping[str, float]) -> None:
    for quantity, relative in found.items():
        kept[quantity] = larger(kept.get(quantity, 0.0), relative)


def verify_text(result: Proof) -> str:
    """Return the proof in a line: "equal to one device: loss 0, grad norm 3e-8, weights 1e-7 (2.1 s)"."""
    if result.equal and {part.check for part in result.parts} == {"whole batch"}:
        cut = result.differences["whole batch"]
        return f"the loss is the same however the batch is cut: {cut:.0e}{_not_tried(result)} ({result.seconds:.1f} s)"
    if result.equal:
        rounding = result.ill_conditioned
        ill = result.verdict == ILL_CONDITIONED
        sizes = _sizes(rounding.fp64 if rounding and rounding.fp64 and ill else result.differences)
        head = "ill-conditioned, equal to one device in fp64" if ill else "equal to one device"
        because = f"; {rounding_text(rounding)}" if rounding else ""
        because += f"; {ADVICE}" if ill else ""
        ran_as = _ran_as(result.layout, result.ran_as)
        return f"{head}: {sizes}{ran_as}{because}{_of_copies(result)}{_not_tried(result)} ({result.seconds:.1f} s)"
    first = result.first_difference
    assert first is not None
    if first.quantity in WITHOUT_SIZE:
        return (
            f"NOT equal to one device: {first.name} at step {first.step} on rank {first.rank}"
            f" ({first.part} in {first.dtype}{_ran_as(result.layout, first.ran_as)})"
        )
    return (
        f"NOT equal to one device: {first.quantity} of {first.name} at step {first.step} on rank"
        f" {first.rank} differs by {first.relative:.1e} in {first.dtype} (ratio {first.ratio:.6g};"
        f" {first.part}{_ran_as(result.layout, first.ran_as)})"
    )


def _more_of(layout: str, spec: str) -> str:
    """Return what tells more of a layout that is not equal, and what trains all the same."""
    named = "" if layout == ONE_DEVICE else layout.replace(" ", ",")
    if not spec:
        asked = f", layout='{named}'" if named else ""
        return f"paceline.verify(task{asked}) for every quantity; verify=False trains all the same"
    asked = f" --layout {named}" if named else ""
    return f"paceline verify {spec}{asked} --json for every quantity; --no-verify trains all the same"


def _of_copies(result: Proof) -> str:
    """Return what the proof says of copies that are not summed exactly in every step; empty for others."""
    if not result.sync:
        return ""
    return f" with exact sums; with {result.sync}, another algorithm, equal to copies that one device takes in turn"


def _not_tried(result: Proof) -> str:
    """Return the first thresholds of the user's code that no number of the proof crossed; empty where all were."""
    found = list(dict.fromkeys(place for part in result.parts for place in part.not_tried))  # alike in several parts
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"; never tried: the other side of {', '.join(found[:SHOWN])}{more}" if found else ""


def _sizes(worst: Mapping[str, float]) -> str:
    """Return the differences that a line has room for; those of whole batches where there are no others."""
    labels = {"loss": "loss", "grad_norm": "grad norm", "weights": "weights"}
    if "loss" not in worst:
        labels = {"whole batch": "whole batch"}
    return ", ".join(f"{label} {worst[name]:.0e}" if worst[name] else f"{label} 0" for name, label in labels.items())


def _ran_as(layout: str, ran_as: str | None) -> str:
    """Return what a proof ran as, where that is not the layout itself; empty where it is."""
    return "" if ran_as in (layout, None) else f", ran as {ran_as}"


def failure_of(result: Proof, spec: str) -> VerificationFailed:
    """Return the error for a layout that is not equal to one device.

    `spec` is the spec file in the command that it suggests; "" of a task that was made in Python.
    """
    first = result.first_difference
    assert first is not None
    cut = result.layout == ONE_DEVICE and first.quantity == "whole batch"
    return VerificationFailed(
        "the batch cannot be cut into micro-batches"
        if cut
        else f"layout {result.layout} does not compute the numbers of one device",
        f"{verify_text(result)}; likely cause ({first.family}): {first.likely}",
        _more_of(result.layout, spec),
    )
