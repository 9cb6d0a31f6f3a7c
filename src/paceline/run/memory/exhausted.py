"""A device's memory is exhausted: where, what was planned and what is used, by what, and which change would fit."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ExhaustedTogether, OutOfMemory, first_line
from paceline.foreign_errors import asked_bytes
from paceline.run.memory.free_memory import format_gib, free_bytes
from paceline.run.memory.live import LiveTensors, largest_live
from paceline.run.memory.spent import MemoryMeter, held_bytes
from paceline.run.process.world import World
from paceline.spec.journal.settled import conditions_of
from paceline.spec.plan import Plan
from paceline.spec.survive.phases import TOLD
from paceline.spec.survive.smaller import FIXED, SmallerPlan
from paceline.supervise.told.brief import Brief
from paceline.units import format_bytes, format_sizes

METERED = ("weights", "gradients", "optimizer")  # kinds of memory that are measured each by itself
REST = "activations_and_runtime"
WORD = "paceline/out_of_memory"  # key of the world's store
OPENING = "opening the data"  # the phase of a batch's reading, before there is a step
LARGEST = 5  # groups of tensors that are told
LEAST_OTHERS = 2 << 30  # bytes of a device that others hold, which are told: what is one's own is not known to less


def out_of_memory(
    error: BaseException,
    at: tuple[str, int],
    brief: Brief,
    plan: Plan,
    world: World,
    meter: MemoryMeter,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> OutOfMemory:
    """Return what an exhausted memory means for the run: the error to end with, its evidence as plain data.

    `at` is the phase and the step that this rank was in, `plan` what it trains under: the brief's, or that with a
    smaller micro-batch; `model` and `optimizer` are what it holds, where that is built.
    """
    phase, step = _phase(error, at[0]), at[1]
    where = OPENING if (phase, step) == ("data", 0) else TOLD[phase]
    used, asked, (free, limit) = meter.now_bytes(), asked_bytes(error), free_bytes(world.device)
    recomputes = plan.recompute != "none" or plan.offloads_activations
    try:
        largest = largest_live(model, optimizer, world.device, LARGEST, looks_into_graph=not recomputes)
    except MemoryError:  # not even a list of what there is has room: all else is told
        largest = []
    kinds, smaller = forecast_kinds(brief, plan), smaller_than(brief.smaller, plan)
    planned = _by_meter(kinds)
    held = held_bytes(model, optimizer) if model is not None and optimizer is not None else {}
    actual = {**held, REST: used - sum(held.values())}
    fits = smallest_that_fits(kinds, smaller, used + (asked or 0), used + free)
    nearest = fits or min(smaller, key=lambda each: each.bytes, default=None)
    others = found if (found := meter.others_bytes()) >= LEAST_OTHERS else 0
    evidence: dict[str, object] = {
        "conditions": conditions_of(plan), "micro_batch": max(1, plan.micro_batch // 2),
        "rank": world.rank, "phase": phase, "step": step, "asked_bytes": asked,
        "free_bytes": free if math.isfinite(free) else None, "limit": limit, "used_bytes": used,
        "others_bytes": others,
        "planned": planned, "actual": actual,
        "largest": [{"what": each.what, "dtype": each.dtype, "shape": list(each.shape), "count": each.count,
                     "bytes": each.bytes} for each in largest],
        "smallest_change": {"change": nearest.change, "bytes": nearest.bytes, "step_seconds": nearest.step_seconds,
                            "fits": fits is not None} if nearest else None,
    }  # fmt: skip
    in_step = f" of step {step}" if step else ""
    return OutOfMemory(
        f"out of memory on rank {world.rank} of {world.size}, {where}{in_step}",
        _because(first_line(error), planned, actual, used, asked, free, limit, largest, others),
        _try(nearest, fits is not None, others, sum(kinds.values()) <= used + free + others),
        evidence,
    ).naming_ranks()


def told_together(error: ExhaustedTogether, told: OutOfMemory | None, world: World) -> OutOfMemory:
    """Return what an agreed call found no memory for as the rank `told` it whose memory it was, on every rank.

    Every rank calls it. The error itself says less, and stays where a peer goes meanwhile.
    """
    try:
        of_rank: OutOfMemory | None = world.share(told, error.rank)
    except RuntimeError:  # torch's errors of a lost peer, and of memory that is short for this too
        return error
    return of_rank or error


def tell_peers(error: OutOfMemory) -> None:
    """Leave the error where ranks that lose this one look for the cause; a supervisor of ours needs no such word."""
    if dist.is_initialized():
        dist.distributed_c10d._get_default_store().set(WORD, json.dumps(error.as_dict()))


def told_by_peer() -> OutOfMemory | None:
    """Return what a peer has left that ran out of memory; None where none has, or the store has gone with it."""
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    try:
        told = json.loads(store.get(WORD)) if store.check([WORD]) else None
    except RuntimeError:  # the store's own host is the rank that is gone
        return None
    return OutOfMemory(told["what"], told["because"], told["try"], told["evidence"]).naming_ranks() if told else None


def forecast_kinds(brief: Brief, plan: Plan) -> dict[str, float]:
    """Return the bytes that a run's plan was forecast to take, by kind.

    Where it goes on with a smaller micro-batch than it was planned with, they are of that one.
    """
    found: dict[str, float] = {}
    for term in brief.record.forecast.get("memory") or ():
        found[term["kind"]] = found.get(term["kind"], 0.0) + float(term["value"])
    if plan.micro_batch == brief.plan.micro_batch:
        return found
    shape, share = _shape(plan), plan.micro_batch / brief.plan.micro_batch
    known = next((each.held for each in brief.smaller if _shape(each) == shape), None)
    scaled = {kind: value if kind in FIXED else share * value for kind, value in found.items()}
    return scaled if known is None else dict(known)


def smaller_than(plans: Sequence[SmallerPlan], plan: Plan) -> list[SmallerPlan]:
    """Return those of some plans that are smaller than a plan too: of no larger micro-batch, and not the same."""
    return [each for each in plans if each.micro_batch <= plan.micro_batch and _shape(each) != _shape(plan)]


def _shape(plan: Plan | SmallerPlan) -> tuple[int, str, str]:
    return plan.micro_batch, plan.recompute, plan.offload


def smallest_that_fits(
    kinds: Mapping[str, float], smaller: Sequence[SmallerPlan], needed: float, limit: float
) -> SmallerPlan | None:
    """Return the first of some smaller plans that would have fitted by forecast, None where none would.

    `kinds` are the forecast bytes of the plan that ran, `needed` those that it was seen to need at least, `limit` those
    that there were. Where it needed more than its forecast, what depends on the micro-batch is taken to do so in all
    plans alike.
    """
    forecast, fixed = sum(kinds.values()), sum(kinds.get(kind, 0.0) for kind in FIXED)
    more = max(1.0, (needed - fixed) / (forecast - fixed)) if forecast > fixed else 1.0
    for each in smaller:
        own = sum(each.held.get(kind, 0.0) for kind in FIXED)
        if own + (each.bytes - own) * more <= limit:
            return each
    return None


def _phase(error: BaseException, phase: str) -> str:
    """Return the phase that an error arose in: forward and backward passes are one point of a run, and two phases."""
    trace = error.__traceback__
    while phase == "forward" and trace is not None:
        if trace.tb_frame.f_code.co_name == "_engine_run_backward":
            return "backward"
        trace = trace.tb_next
    return phase


def _by_meter(kinds: Mapping[str, float]) -> dict[str, float]:
    """Return planned bytes as they can be measured."""
    if not kinds:
        return {}
    known = {kind: kinds.get(kind, 0.0) for kind in METERED}
    return {**known, REST: sum(kinds.values()) - sum(known.values())}


def _because(
    says: str,
    planned: Mapping[str, float],
    actual: Mapping[str, float],
    used: float,
    asked: int | None,
    free: float,
    limit: str,
    largest: Sequence[LiveTensors],
    others: int,
) -> str:
    parts = [f"{format_bytes(asked)} were asked for" if asked is not None else says]
    if math.isfinite(free):
        held = f", of which other programs hold {format_gib(others)}" if others else ""
        parts.append(f"{format_bytes(free)} were free of {limit}{held}")
    each = ", ".join(
        f"{name.replace('_', ' ')} "
        + ("{} (planned {})".format(*format_sizes(value, planned[name])) if name in planned else format_bytes(value))
        for name, value in actual.items()
    )
    whole = "{} of {} planned".format(*format_sizes(used, sum(planned.values()))) if planned else format_bytes(used)
    parts.append(f"in use were {whole}: {each}")
    if largest:
        parts.append("the largest tensors: " + ", ".join(f"{each} {format_bytes(each.bytes)}" for each in largest))
    return "; ".join(parts)


def _try(nearest: SmallerPlan | None, fits: bool, others: int, fits_alone: bool) -> str:
    """Return what to try: `others` bytes are other programs', without which the plan fits by forecast, or does not."""
    if others:
        alone = "without them this plan fits by forecast" if fits_alone else "though by forecast that is not enough"
        end = f"end the other programs on the device, which hold {format_gib(others)} of it (`nvidia-smi` lists them)"
        return f"{end}: {alone}; or {_try(nearest, fits, 0, fits_alone)}"
    if nearest is None:
        return "more devices, a smaller model or shorter samples: the plan is the smallest of its layout"
    needs = f"{format_bytes(nearest.bytes)} a device by forecast"
    if fits:
        return f"{nearest.change}, the smallest change that fits ({needs}); the run goes on from its last checkpoint"
    return (
        "more devices or shorter samples: by forecast no change of micro-batch, recompute or offload fits; the nearest "
        f"is {nearest.change} ({needs})"
    )
