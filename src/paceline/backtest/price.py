"""The one place where backtests meet the planner's pricing: cases in, forecasts out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.backtest.layout import spreads_experts, takes_tensor_ranks
from paceline.backtest.rows import Case
from paceline.backtest.schema import StepRow
from paceline.backtest.words.engine import starts_engine_layers
from paceline.backtest.words.settings import CLASS, modules_of
from paceline.cluster.catalog.devices import published_watts, read_catalog
from paceline.cluster.catalog.power import power_model
from paceline.plan.cost import pricing
from paceline.plan.cost.columns import Floats
from paceline.plan.cost.components import Component, only, without
from paceline.plan.cost.constants import Constants, read_constants
from paceline.plan.cost.intervals import memory_widths, published_widths, waiting_parts
from paceline.plan.cost.memory.usable import needed, usable_bytes
from paceline.plan.cost.programs.known import (
    CAPTURED_ON,
    CLONED_LOGITS,
    DDP,
    DEEPSPEED,
    FUSED_LOGITS,
    MEGATRON,
    MEGATRON_BRIDGE,
    TORCHTITAN,
    is_around_transformers,
    program_of,
    with_modules,
)
from paceline.plan.cost.programs.low import recipe_of
from paceline.plan.cost.programs.workspaces import workspace_bytes
from paceline.plan.cost.rates import BYTES
from paceline.plan.cost.sheet import PricedTask, Sheet
from paceline.plan.cost.software import Software
from paceline.plan.cost.time import ring
from paceline.plan.cost.time.compute import host_starts
from paceline.plan.cost.time.ring import hop
from paceline.plan.cost.unknown import Widths, held_widths
from paceline.plan.search.values import TIE_RATIO
from paceline.spec.cluster import Cluster
from paceline.spec.forecast import Kind
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

# Terms of memory that are outside of what a table's figure counts.
OUTSIDE: dict[str, tuple[Kind, ...]] = {"allocated": ("runtime", "cache"), "reserved": ("runtime",), "device": ()}
# Terms of a step's time that are no part of a layer's forward and backward pass.
BESIDE_LAYERS: tuple[Kind, ...] = ("update", "host", "casts", "sync")
# A figure of memory as Megatron-LM's own log has it ("mem-max-allocated-bytes"): of the rank that writes the log.
OF_ITS_LOG = re.compile(r"mem[-_ ]max[-_ ]allocated[-_ ]bytes")
# The loss as compiled pieces, which keep a copy of what they write in place (fusions/fused_cross_entropy.py).
COMPILED_LOSS = re.compile(r"cross-entropy-loss-fusion=true")
# What sends a token to a node once, whatever program asks it to: as a note says of a row's dispatcher. DeepEP is of
# February 2025 (deepseek-ai/DeepEP), younger than Transformer Engine's preference of cuDNN's attention on Hopper
# (its get_attention_backend; when that came is from memory), so Megatron-LM that sends by it attends by cuDNN.
ONCE_PER_NODE = re.compile(r"(?<!no )(?<!without )\b(?:deepep|hybridep)\b")
# Fused attention of cuDNN, or FlashAttention-3, which is as fast on Hopper.
FOR_HOPPER = re.compile(r"cudnn|\b(?:fa|flash)[-_ ]?(?:attention[-_ ]?)?3\b")
FOR_BLACKWELL = re.compile(r"\b(?:fa|flash)[-_ ]?(?:attention[-_ ]?)?v?4\b")
# FlashAttention of before its second version (Dao 2023, arXiv:2307.08691).
FIRST_FLASH = re.compile(r"\b(?:fa|flash)[-_ ]?(?:attention[-_ ]?)?v?1\b")
SECOND_FLASH = re.compile(r"\b(?:fa|flash)[-_ ]?(?:attention[-_ ]?)?v?2\b|\bflash2\b")
# A sentence of a row's notes that names what an optimizer keeps in 16 bits, and weights where no wider ones are kept.
NARROW_STATE = re.compile(
    r"(?:^|; )((?:weights,? and )?(?:moments|(?:optimizer )?states?)) (?:rest |are )?in (?:bf16|fp16|16 bits)\b"
)
# Before and after the name of what a row may say it had, or had not; a version's "0.5" says nothing of that.
NOT, OFF = r"(?<!no )(?<!not )(?<!without )", r'(?!"?(?: ?[=:])? ?(?:false\b|off\b|0(?![.\d])))'
# Gradients go to one buffer while the other is reduced (`overlap_comm` of stage_1_and_2.py; ZeRO-3 has one).
TWO_BUCKETS = re.compile(NOT + r"\boverlap_comm\b" + OFF)
# The head's product and the loss over some tokens at a time, whose logits are as many values as all tokens' inputs of
# the head, or up to twice as many: tokens at a time are a power of two (Hsu et al. 2024, arXiv:2410.10989, section
# 3.2; `fused_linear_cross_entropy_forward`, read 2026-11-30).
LIGER = re.compile(NOT + r"\bliger\b" + OFF)
# torch's AdamW in one kernel, and DistributedDataParallel whose gradients lie in its buckets. Apex has a fused Adam,
# and lets go of a bucket once it is reduced (`allreduce_bucket` of apex/parallel/distributed.py, read 2026-11-30).
FUSED_UPDATE = re.compile(NOT + r"\b(?:apex|fused[-_ ]adamw?|adamw?(?:_torch)?[-_ ]fused)\b" + OFF)
BUCKET_VIEWS = re.compile(NOT + r"\b(?:apex|gradient_as_bucket_view)\b" + OFF)
# Layers of Transformer Engine, whose tensor collectives run in pieces beside products (`--tp-comm-overlap`).
TRANSFORMER_ENGINE = re.compile(r"\bte\b|transformer.?engine")


@dataclass(frozen=True)
class Interval:
    """A forecast value with its 80 % and its 95 % interval."""

    value: float
    low_80: float
    high_80: float
    low_95: float
    high_95: float


@dataclass(frozen=True)
class TermSeconds:
    """What one term of a forecast takes of a step."""

    name: str
    kind: Kind
    seconds: float


@dataclass(frozen=True)
class Priced:
    """What a case is forecast to take, of the plan that the planner would choose among those the row may have run."""

    plan: Plan
    step_seconds: Interval
    memory_bytes: float  # of the kind that the row measured
    fits: bool  # that or another plan that the row may have run
    terms: tuple[TermSeconds, ...]
    program: str = ""  # whose conventions it was priced by; empty where those of the row's own are not known
    memory_widths: tuple[float, float] = (
        math.nan,
        math.nan,
    )  # half-widths of its 80 % and 95 % intervals, as logarithms
    starting: float = 0.0  # what launching takes the host by itself, as a part of the step


def constants_sha256() -> str:
    """Return the hash of the constants that forecasts of published devices rest on."""
    return read_constants().sha256


def software_of(case: Case) -> Software:
    """Return the conventions of the program that ran a case, in the case's precision."""
    found, assumed = program_of(case.row.program, case.row.zero_stage)
    found = replace(found, guessed=bool(assumed), fills_bucket=found.fills_bucket and not assumed)
    if found.half_in_fp16 and case.plans[0].precision == "fp16":
        found = replace(found, gradient_bytes=2, reduce_bytes=2)
    if found.overlaps_with_te and TRANSFORMER_ENGINE.search(case.row.attention_kernel.lower()):
        found = replace(found, hides_tensor=True)
    if case.row.attention_kernel:  # what a row says of its kernel is no program's default
        named = FOR_HOPPER.search(case.row.attention_kernel.lower())
        fourth = FOR_BLACKWELL.search(case.row.attention_kernel.lower())
        found = replace(found, cudnn_attention=named is not None, fourth_flash=fourth is not None)
        if FIRST_FLASH.search(case.row.attention_kernel.lower()):
            found = replace(found, first_flash=True)
        elif SECOND_FLASH.search(case.row.attention_kernel.lower()):
            found = replace(found, first_flash=False)
    if found.fused and starts_engine_layers(case.row):
        found = replace(found, engine_layers=True)
    found = with_modules(found, modules_of(case.row.recompute))
    found = _with_buffers(_with_narrow_state(found, case.row), case)
    if ONCE_PER_NODE.search(case.row.notes.lower()):
        found = replace(found, sends_once_per_node=True)
        if found.name == MEGATRON.name and not case.row.attention_kernel:
            found = replace(found, cudnn_attention=True)
    if spreads_experts(case.row):
        found = replace(found, spreads_experts=True)
    elif found.name == TORCHTITAN.name and takes_tensor_ranks(case.row):
        found = replace(found, spreads_experts=True, routes_parts=True)
    if found.memory_rank == "last" and not OF_ITS_LOG.search(case.row.notes):
        found = replace(found, memory_rank="")
    if found.name == MEGATRON.name and COMPILED_LOSS.search(case.row.notes.lower()):
        found = replace(found, logit_share=CLONED_LOGITS)
    if found.fuses_compiled and not case.plans[0].compile:
        found = replace(found, fused=False)
    if case.plans[0].compile and is_around_transformers(case.row.program):
        found = replace(found, fused=True)
    if found.fuses_unless_told and case.row.compile == 0:
        found = replace(found, fused=False)
    # torchtitan has had mixtures since 2025, when what it compiles is "model" and "loss" (`components` of `Compile` in
    # its config/job_config.py, from memory): logits and their gradients in bf16.
    if found.name == TORCHTITAN.name and case.row.experts and case.plans[0].compile:
        found = replace(found, logit_share=FUSED_LOGITS)
    if case.plans[0].precision == "fp8":
        found = replace(found, recipe=recipe_of(case.row.precision, found.recipe))
    if found.name == MEGATRON_BRIDGE.name and found.recipe == "mxfp8":
        found = replace(found, captured=any(chip in case.cluster.device.name.split() for chip in CAPTURED_ON))
    return replace(found, sequence_parallel=case.sequence_parallel) if found.master_weights else found


def _with_buffers(software: Software, case: Case) -> Software:
    """Return the conventions with what a row's notes say of buffers beside weights and their state."""
    notes, found = case.row.notes.lower(), software
    if LIGER.search(notes) and case.row.hidden and case.row.vocab:
        found = replace(found, logit_share=case.row.hidden / case.row.vocab)
    if found.fills_bucket and case.plans[0].zero < 3 and TWO_BUCKETS.search(notes):
        found = replace(found, reduce_bucket=2 * found.reduce_bucket)
    if FUSED_UPDATE.search(notes):
        found = replace(found, roots_at_once=False)
    return replace(found, copies_to_buckets=False) if BUCKET_VIEWS.search(notes) else found


def _with_narrow_state(software: Software, row: StepRow) -> Software:
    """Return the conventions with what a row's notes say is kept in 16 bits.

    Example: "weights and moments in bf16" is a model that was loaded in bf16 and is trained so, 8 bytes a weight with
    its gradient; of "optimizer states in bf16" the weights that are updated stay in fp32. Where neither DeepSpeed nor
    one of its classes of ZeRO is named, that is torch's own AdamW.
    """
    said = NARROW_STATE.search(row.notes.lower())
    if said is None:
        return software
    if "weights" not in said[1]:
        return replace(software, moment_bytes=2)
    own = replace(software, roots_at_once=not software.master_weights)
    stage = CLASS.match(row.zero_stage.lower().strip())
    is_named = "deepspeed" in row.program.lower() or (stage is not None and stage[1] != "0")
    if software.name == DEEPSPEED.name and not is_named:
        own = replace(DDP, fused=False, fuses_compiled=False, logit_share=0.0, guessed=software.guessed)
    return replace(own, moment_bytes=2, weight_bytes=2, gradient_bytes=2, reduce_bytes=2)


@dataclass(frozen=True)
class Alike:
    """Cases that are priced in one context: the first of them, the program that ran all, and their places."""

    first: Case
    software: Software
    places: list[int]


def alike_cases(cases: Sequence[Case]) -> list[Alike]:
    """Return cases by the contexts that they are priced in, whatever the constants are."""
    found: dict[tuple[object, ...], Alike] = {}
    for place, case in enumerate(cases):
        first, software = case.plans[0], software_of(case)
        machine = (id(case.profile), id(case.cluster), case.batch_samples)
        key = (*machine, software, first.precision, first.compile, first.offload, first.frozen)
        found.setdefault(key, Alike(case, software, [])).places.append(place)
    return list(found.values())


def contexts_of(
    cases: Sequence[Case], constants: Constants, groups: Sequence[Alike] | None = None
) -> list[tuple[PricedTask, list[int]]]:
    """Return the contexts that cases are priced in, each with the places of its cases; `groups` are theirs."""
    return [
        (PricedTask(alike.first.profile, alike.first.cluster, alike.first.batch_samples, 1, software=alike.software,
                    constants=constants), alike.places)
        for alike in (alike_cases(cases) if groups is None else groups)
    ]  # fmt: skip


def price_cases(cases: Sequence[Case], constants: Constants | None = None) -> list[Priced | str]:
    """Return the forecast of every case, or the reason for which there is none."""
    parted = [_by_offload(case) for case in cases]
    each = iter(_price_alike([part for parts in parted for part in parts], constants or read_constants()))
    return [_fastest([next(each) for _ in parts]) for parts in parted]


def _by_offload(case: Case) -> list[Case]:
    """Return a case for each way in which it may have used host memory, and spread frozen weights: a sheet has one."""
    ways = dict.fromkeys((plan.offload, plan.frozen) for plan in case.plans)
    if len(ways) == 1:
        return [case]
    return [
        replace(case, plans=tuple(plan for plan in case.plans if (plan.offload, plan.frozen) == way)) for way in ways
    ]


def _fastest(found: list[Priced | str]) -> Priced | str:
    """Return the fastest of several forecasts that fit, of all where none does; a reason where there is no forecast."""
    priced = [one for one in found if isinstance(one, Priced)]
    return min(priced, key=lambda one: (not one.fits, one.step_seconds.value)) if priced else found[0]


def _price_alike(cases: Sequence[Case], constants: Constants) -> list[Priced | str]:
    """Return the forecast of every case, each of plans that use host memory alike, or why there is none."""
    found: list[Priced | str] = [""] * len(cases)
    for context, places in contexts_of(cases, constants):
        precision, device = cases[places[0]].plans[0].precision, context.cluster.device
        if precision not in BYTES or precision not in device.matmul_flops:
            for place in places:
                found[place] = f"no rate of {precision} products of {device.name}"
            continue
        sheet = context.sheet(*(plan for place in places for plan in cases[place].plans))
        time, memory = pricing.time_components(sheet), pricing.memory_components(sheet)
        written = _written_down(sheet, memory)
        seconds, peaks = pricing.total(time), needed(sheet, memory)
        starts = host_starts(sheet).seconds
        held = pricing.total(without(memory, *OUTSIDE["allocated"]))
        usable = usable_bytes(context.cluster)
        at = 0
        for place in places:
            case = cases[place]
            mine = slice(at, at + len(case.plans))
            at = mine.stop
            fits = ~(peaks[mine] > usable)
            best = _resolved(seconds[mine], held[mine], peaks[mine], context) + mine.start
            if not math.isfinite(seconds[best]):
                found[place] = "a rate of the cluster is unknown"
                continue
            counted = sum(column.values[best] for column in without(written, *OUTSIDE[case.memory_kind]))
            counted += _workspaces(case) if OUTSIDE[case.memory_kind] else 0.0
            terms = tuple(TermSeconds(column.name, column.kind, float(column.values[best])) for column in time)
            parts = waiting_parts([(term.kind, term.seconds) for term in terms])
            starting = float(starts[best] / seconds[best])
            of_step = published_widths(sheet).of_step(*parts, starting, is_open=case.is_open)
            interval = _interval(float(seconds[best]), of_step)
            plan = case.plans[best - mine.start]
            program = "" if context.software.guessed else context.software.name
            memory_held = held_widths(memory_widths(context.cluster, constants), constants, program)
            found[place] = Priced(
                plan, interval, float(counted), bool(fits.any()), terms, program, memory_held, starting
            )
    return found


def _written_down(sheet: Sheet, memory: list[Component]) -> list[Component]:
    """Return the bytes of the device whose memory the program writes down, where that is not the fullest one's."""
    rank = sheet.context.software.memory_rank
    return pricing.memory_components(sheet, rank) if rank else memory


def _workspaces(case: Case) -> float:
    """Return what is no part of a program's tensors, but allocated by torch all the same."""
    layers = TRANSFORMER_ENGINE.search(case.row.attention_kernel.lower()) is not None
    return workspace_bytes(case.cluster.device.name, case.row.notes, layers)


def seconds_of_cases(cases: Sequence[Case], constants: Constants, groups: Sequence[Alike] | None = None) -> Floats:
    """Return the seconds per step of every case's first plan; `groups` are those of the cases, if they are known."""
    found = np.full(len(cases), math.nan)
    for context, places in contexts_of(cases, constants, groups):
        sheet = context.sheet(*(cases[place].plans[0] for place in places))
        found[places] = pricing.total(pricing.time_components(sheet))
    return found


def _resolved(seconds: Floats, held: Floats, peaks: Floats, context: PricedTask) -> int:
    """Return the place of the plan that a row is taken to have run: the fastest that fits, because it ran.

    Of those that tie with it, as a search has ties, the one that needs least memory, as a search would take it.

    What fits is what memory's own forecast says, without its interval: a row that ran did not have to be safe. Where
    nothing fits, memory's forecast is too high for all plans of the row alike, so it cannot tell those from each other
    whose needs are nearer than its own 95 % interval is wide: the fastest of them.
    """
    memory = context.cluster.device.memory_bytes.value
    least = float(held.min()) * math.exp(memory_widths(context.cluster, context.constants)[1])
    among = next(fit for fit in (peaks <= memory, held <= least) if fit.any())
    seconds = np.where(among, seconds, math.inf)
    return int(np.argmin(np.where(seconds <= TIE_RATIO * seconds.min(), held, math.inf)))


def _interval(value: float, widths: Widths) -> Interval:
    """Return the value with intervals of these half-widths."""
    (low, low95), (high, high95) = widths.downwards, (widths.narrow, widths.wide)
    ends = (value * math.exp(by) for by in (-low, high, -low95, high95))
    return Interval(value, *ends)


def allocated_and_kept(cases: Sequence[Case], constants: Constants) -> list[tuple[float, float]]:
    """Return the bytes of every case's first plan that tensors hold, and those that the allocator keeps beside them.

    The latter are 0 where the device is full: there the allocator keeps as much as has room, which tells nothing of how
    much the allocator would keep elsewhere.
    """
    found = [(math.nan, math.nan)] * len(cases)
    for context, places in contexts_of(cases, constants):
        sheet = context.sheet(*(cases[place].plans[0] for place in places))
        memory = _written_down(sheet, pricing.memory_components(sheet))
        full = pricing.total(memory) >= context.cluster.device.memory_bytes.value
        held = pricing.total(without(memory, *OUTSIDE["allocated"]))
        kept = np.where(full, 0.0, pricing.total(only(memory, "cache")))
        for place, both in zip(places, zip(held, kept, strict=True), strict=True):
            found[place] = (float(both[0]) + _workspaces(cases[place]), float(both[1]))
    return found


def layer_seconds(profile: ModelProfile, cluster: Cluster, plan: Plan, sequence_parallel: bool = True) -> float:
    """Return the seconds of forward and backward of the profile's one layer on one micro-batch, recompute included."""
    software = replace(MEGATRON, sequence_parallel=sequence_parallel)
    sheet = PricedTask(profile, cluster, plan.batch_samples, 1, software=software).sheet(plan)
    return float(sum(column.values[0] for column in without(pricing.time_components(sheet), *BESIDE_LAYERS)))


def collective_seconds(
    cluster: Cluster, collective: str, size: int, total_bytes: float, constants: Constants | None = None
) -> float:
    """Return the seconds of one collective (all_reduce, all_gather, reduce_scatter, all_to_all, send) over `size`."""
    constants, sizes, stride = constants or read_constants(), np.array([size]), np.array([1])
    if collective == "send":
        rate, latency, _ = hop(cluster, constants, sizes, stride)
        return float((total_bytes / rate + latency)[0])
    return float(
        ring.ring(cluster, constants, sizes, stride).seconds(collective, np.array([total_bytes]), np.ones(1))[0]
    )


def watts_per_device(accelerator: str, nodes: int) -> float:
    """Return the watts that a device of a catalog name and its share of the node draw in training on so many nodes.

    Devices of several nodes wait for each other. For how long a table of power does not say, so it is taken to be as in
    what the power model was fitted on.
    """
    busy = power_model().several_nodes_busy if nodes > 1 else 1.0
    return published_watts(read_catalog()[accelerator], busy).value


def plan_of_layer(tp: int, micro_batch: int, recompute: str, precision: str) -> Plan:
    """Return the plan of one layer over `tp` devices on one micro-batch."""
    base = Plan(layout=Layout(tp=tp), micro_batch=micro_batch, batch_samples=micro_batch)
    return replace(base, recompute=recompute, precision=precision)
