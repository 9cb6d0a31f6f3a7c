"""The plans that a table's row may have run: the row's layout in Paceline's terms, and each choice the row leaves open.

| as tables print it | as planned here |
|---|---|
| ZeRO-0, plain data parallel | `dp_replicate`; with `cp` or `ep` class 0, whose ranks hold all state |
| ZeRO-1, distributed optimizer | `dp_shard`, class 1 |
| ZeRO-2; ZeRO-3, FSDP | `dp_shard`, class 2; class 3 |
| HSDP | `dp_shard` over a node, or several where that is too small, `dp_replicate` over these |
| ZeRO-1 in groups of k | `dp_shard` of k, class 1, `dp_replicate` |
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.backtest.schema import StepRow
from paceline.backtest.words.plausible import batch_in_samples
from paceline.backtest.words.settings import part_kept
from paceline.plan.cost.programs.known import program_of
from paceline.plan.cost.software import Software
from paceline.plan.feasible.split import split_by_cost, split_in_order
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

DEFAULT_BATCH_TOKENS = 2**20  # of a step, where a table states neither a batch nor what it is made of
LARGEST_MICRO_BATCH = 64
# Layers fewer that a pipeline may have than even stages: the first and the last hold embedding and head too, and stages
# of one layer hold nothing else there (Llama Team 2024, arXiv:2407.21783, section 3.3.2).
ENDS = 2
# A note of Megatron-LM's `--expert-tensor-parallel-size 1`: every tensor rank holds whole experts.
WHOLE_EXPERTS = re.compile(r"\b(?:etp|expert[-_ ]tensor[-_ ]parallel(?:[-_ ]size)?) ?[=:]? ?1\b")
BUDGETS = (0.25, 0.5, 0.75)  # of what a device keeps without recompute
# A sentence of a row's notes that names what rests in host memory, or what does not, and that it is of rows at large.
OF_A_TABLE = re.compile(r"\bnot printed\b|\bnot stated\b|\btext says\b")
OFFLOADED = re.compile(r"(\b(?:no|nor) )?((?:\b(?:activations?|optimizers?|states?|and)\b[ ,]*)+)(?:is|are) offloaded")
Schedule = tuple[str, int, tuple[int, ...]]  # name, stages per device, layers of each stage


def degrees_of(row: StepRow, marks: list[str]) -> tuple[dict[str, int] | None, str]:
    """Return the degrees tp, pp, cp, ep and dp of a row, 1 where not stated; None with the reason where they clash."""
    assert row.n_devices is not None
    degrees = {axis: getattr(row, axis) or 1 for axis in ("tp", "pp", "cp", "ep")}
    split = degrees["tp"] * degrees["pp"] * degrees["cp"]
    if row.n_devices % split or (row.dp and row.dp * split != row.n_devices):
        return None, "the layout's degrees do not multiply to the devices"
    if row.tp is None and row.pp is None and row.dp is None and not row.zero_stage:
        return None, "no layout is stated"
    degrees["dp"] = row.n_devices // split
    whole, tp, ranks = degrees["ep"], degrees["tp"], degrees["dp"] * degrees["cp"]
    if whole % tp == 0 and (program_of(row.program, row.zero_stage)[0].spreads_experts or spreads_experts(row)):
        degrees["ep"] = math.gcd(whole // tp, ranks)  # tp ranks have experts of their own: they are in the group
        return (degrees, "") if degrees["ep"] * tp == whole else (None, "ep does not divide dp x cp x tp")
    degrees["ep"] = math.gcd(whole, ranks)
    if degrees["ep"] != whole:  # spread over some of the tp ranks; here tp splits each of them instead
        if tp % (whole // degrees["ep"]):
            return None, "ep does not divide dp x cp x tp"
        marks.append("experts split by tp instead of spread over it")
    return degrees, ""


def spreads_experts(row: StepRow) -> bool:
    """Return whether a row's tensor ranks hold whole experts of their own, by its degrees or as its notes say.

    A group of ranks that each hold a part of every expert lies within dp x cp. One that does not divide it reaches over
    tp: `expert_tensor_parallel_size` of Megatron-LM is less than tp there.

    Example: 256 devices with tp 2 and pp 32 have dp 4, and experts over 8 devices; so has "ETP=1" in the notes, which
    is that option.
    """
    if not row.ep or not row.n_devices or (row.tp or 1) == 1:
        return False
    within = row.n_devices // ((row.tp or 1) * (row.pp or 1))  # dp x cp
    whole = within * (row.tp or 1) % row.ep == 0 and row.ep % (row.tp or 1) == 0
    return whole and (within % row.ep != 0 or WHOLE_EXPERTS.search(row.notes.lower()) is not None)


def takes_tensor_ranks(row: StepRow) -> bool:
    """Return whether a group of torchtitan's experts is of tensor ranks too, each of which has whole experts then.

    It is unless it is told otherwise (`expert_tensor_parallel_degree` is 1), where "EP would borrow all cp and tp and
    some dp_shard": `ep % (cp * tp) == 0` (`_validate` of its distributed/parallel_dims.py, read 2026-11-28). A smaller
    group needs `etp == tp`, so that ranks have a part of every expert.

    Example: of tp 4 a group of 8 is of whole experts, a group of 2 of quarters.
    """
    tensor, context = row.tp or 1, row.cp or 1
    return tensor > 1 and row.ep is not None and row.ep > 1 and row.ep % (tensor * context) == 0


def experts_of(row: StepRow, degrees: dict[str, int], marks: list[str]) -> list[dict[str, int]]:
    """Return the degrees with every group over which the row may have spread experts: the stated one, else any."""
    if not row.experts or row.ep is not None:
        return [degrees]
    ranks = math.gcd(row.experts, degrees["dp"] * degrees["cp"])
    marks.append("groups of experts: the best that fit")
    return [{**degrees, "ep": size} for size in _doublings(1, ranks) if ranks % size == 0]


def batch_of(row: StepRow, dp: int, marks: list[str]) -> int:
    """Return the sequences of a global batch: as stated, as micro-batches add up to, or of a million tokens."""
    if row.global_batch:
        return batch_in_samples(row.global_batch, row.seq_len or 1, marks)
    if row.micro_batch and row.grad_accum:
        return row.micro_batch * row.grad_accum * dp
    samples = max(1, round(DEFAULT_BATCH_TOKENS / (row.seq_len or 1) / dp)) * dp
    marks.append(f"global batch of {DEFAULT_BATCH_TOKENS:,} tokens assumed")
    return samples


def stages_of(in_order: bool, profile: ModelProfile, count: int, ends: int = 0) -> tuple[int, ...]:
    """Return the layers of each of so many stages, () with too few layers or one stage.

    Frameworks deal out layers evenly where they can, whatever embedding and head cost; a few fill stages `in_order`, by
    what blocks cost. Where up to `ends` layers are missing, the last stage is the head's, the first the embedding's.
    """
    layers = profile.repeated_blocks
    if count == 1 or layers + ends < count:
        return ()
    if layers < count:
        return (*((0,) if layers + 1 < count else ()), *(1,) * layers, 0)
    if in_order and (found := split_in_order(profile, count)):
        return found
    if layers % count or in_order:
        return split_by_cost(profile, count)
    return (layers // count,) * count


def plans_of(
    row: StepRow,
    degrees: dict[str, int],
    batch: int,
    schedules: Sequence[Schedule],
    devices_per_node: int,
    precision: str,
    marks: list[str],
) -> tuple[list[Plan], str]:
    """Return every plan that the row may have run: one, or several where it leaves choices open; else the reason.

    What is open is open jointly: every class of sharding with every recompute, micro-batch and interleaving that the
    program has.
    """
    recompute = _recompute(row, program_of(row.program, row.zero_stage)[0], marks)
    if not recompute:
        return [], "recompute of some layers only"
    micro_batches = _micro_batches(row, batch, degrees["dp"], marks)
    offloads = _offloads(row, marks)
    plans = []
    for placed, zero in _data_axes(row, degrees["dp"], degrees, devices_per_node, marks):
        whole = placed.get("dp_shard", 1) * degrees["cp"] % degrees["ep"]  # groups smaller than those of the experts
        over = {"dp_shard": degrees["dp"]} if whole else placed
        layout = Layout(**over, cp=degrees["cp"], tp=degrees["tp"], pp=degrees["pp"], ep=degrees["ep"])
        base = Plan(layout=layout, zero=zero, batch_samples=batch, precision=precision, compile=bool(row.compile))
        plans += [
            replace(
                base,
                schedule=schedule,
                virtual_stages=chunks,
                stages=stages,
                recompute=mode,
                recompute_budget=part,
                micro_batch=micro,
                accumulation=accumulation_for(batch, layout.data_degree, micro),
                offload=offload,
            )
            for offload, (schedule, chunks, stages), micro, (mode, part) in itertools.product(
                offloads, schedules, micro_batches, recompute
            )
        ]
    by_stage = program_of(row.program, row.zero_stage)[0].micro_batch_per_stage and degrees["pp"] > 1
    if by_stage and not (row.micro_batch or row.grad_accum):
        plans = [plan for plan in plans if plan.accumulation == plan.layout.pp * plan.virtual_stages] or plans
    # Interleaved schedules go round the stages, as many micro-batches at a time (megatron/core/pipeline_parallel).
    even = [plan for plan in plans if plan.schedule != "interleaved" or plan.accumulation % plan.layout.pp == 0]
    return even or plans, ""


def _data_axes(
    row: StepRow, dp: int, degrees: dict[str, int], devices_per_node: int, marks: list[str]
) -> list[tuple[dict[str, int], int]]:
    """Return the data axes' degrees and the ZeRO class, of every class that the row may have run.

    A table that states none leaves open what its program can do. Experts are spread over `dp_shard`, whatever the
    class.
    """
    text = row.zero_stage.lower()
    program = program_of(row.program, text)[0]
    third = 1 if program.gathers_once_in_pipelines and degrees["pp"] > 1 else 3
    if "fsdp+dp" in text:
        marks.append("copies beside shards: the best that fit")
        sizes = [size for size in _doublings(devices_per_node, dp) if dp % size == 0] or [dp]
        return [({"dp_shard": size, "dp_replicate": dp // size}, third) for size in sizes]
    if "hsdp" in text:
        return [(axes, third) for axes in _shard_groups(dp, degrees, devices_per_node, marks)]
    if text:
        stated = [_stated_axes(text, dp, degrees, marks)]
    elif dp * degrees["cp"] == 1:
        return [({}, 3)]
    else:
        classes = program.classes or (0,)
        marks.append("ZeRO class: the best that fits")
        stated = [_stated_axes(str(name), dp, degrees, marks) for name in classes]
    return [(axes, third if zero == 3 and "dp_shard" in axes else zero) for axes, zero in stated]


def _offloads(row: StepRow, marks: list[str]) -> list[str]:
    """Return what a row may have rested in host memory: nothing, or any of what its notes say is offloaded.

    A source that says so of a table as a whole does not say of which rows, and of activations a part may rest there; an
    optimizer whose states a row says are offloaded has them there. A few programs rest activations of sharded models
    there unless they are told otherwise.

    Example: "activations and optimizer states are offloaded to host memory (per-row settings not printed)" leaves four
    open, the same without what stands in brackets two.
    """
    notes = row.notes.lower()
    said = " ".join(found[2] for found in OFFLOADED.finditer(notes) if not found[1])
    named = [name for name in ("optimizer", "activations") if name.rstrip("s") in said]
    sharding = row.zero_stage.lower()
    if not named and "fsdp" in sharding and program_of(row.program, sharding)[0].rests_activations:
        named = ["activations"]
    if not named:
        return ["none"]
    both = ["all"] if len(named) > 1 else []
    if "optimizer" in named and not OF_A_TABLE.search(notes):
        marks += ["offload of activations: the best that fits"] if both else []
        return ["optimizer", *both]
    marks.append("offload: the best that fits")
    return ["none", *named, *both]


def _shard_groups(dp: int, degrees: dict[str, int], devices_per_node: int, marks: list[str]) -> list[dict[str, int]]:
    """Return the shards and copies that a row may mean by both: shards in a node, or in several where they do not fit.

    Example: of 1,280 devices in nodes of eight, shards over 8, 16, 32, 64, 128 or 256 of them.
    """
    least = math.gcd(dp, max(1, devices_per_node // (degrees["tp"] * degrees["cp"])))
    sizes = [size for size in _doublings(least, dp // 2) if dp % size == 0] or [least]
    if len(sizes) > 1:
        marks.append("devices of a group of shards: the best that fit")
    return [{"dp_shard": size, "dp_replicate": dp // size} for size in sizes]


def _doublings(least: int, most: int) -> Iterator[int]:
    """Yield least, 2 least, 4 least, ... up to most."""
    while least <= most:
        yield least
        least *= 2


def _stated_axes(text: str, dp: int, degrees: dict[str, int], marks: list[str]) -> tuple[dict[str, int], int]:
    """Return the data axes' degrees and the ZeRO class that a table's word for its sharding means."""
    group, copies = re.search(r"group (\d+)", text), re.search(r"\bdp=(\d+)", text)
    if "fsdp" in text and copies and dp % int(copies[1]) == 0:
        return {"dp_shard": dp // int(copies[1]), "dp_replicate": int(copies[1])}, 3
    if group:
        shard = math.gcd(dp, int(group[1]))
        return {"dp_shard": shard, "dp_replicate": dp // shard}, 1
    if "fsdp" in text or text.startswith("3"):
        if "offload" in text:
            marks.append("priced without offload")
        return {"dp_shard": dp}, 3
    if text.startswith("2"):
        return {"dp_shard": dp}, 2
    if text.startswith("1") or "dist_opt" in text:
        return {"dp_shard": dp}, 1
    if degrees["ep"] > 1:  # the mesh spreads experts over dp_shard, and what is dense is whole on every rank
        shard = math.lcm(degrees["ep"], degrees["cp"]) // degrees["cp"]
        return {"dp_shard": shard, "dp_replicate": dp // shard}, 0
    # Ranks that share a sequence hold the same weights; as copies go, they reduce once a step, as class 1 does.
    return {"dp_replicate": dp}, 0 if degrees["cp"] > 1 else 3


def schedules_of(row: StepRow, pp: int, layers: int, marks: list[str]) -> list[tuple[str, int]]:
    """Return the pipeline schedules that a row may have run, each with its stages per device.

    Stages per device that a table does not state are as many as divide the layers (Narayanan et al. 2021, section 2.2).
    Where it names no schedule either, a program that can interleave may have done so, unless the table states the other
    choices of a run: what it does not state then is what the program does unless told otherwise.
    """
    if pp == 1:
        return [("1f1b", 1)]
    name = row.pp_schedule.lower()
    if "gpipe" in name:
        return [("gpipe", row.vpp or 1)]
    if row.vpp:
        return [("interleaved" if row.vpp > 1 else "1f1b", row.vpp)]
    program, _ = program_of(row.program, row.zero_stage)
    several = [program.interleaved_stages] if program.interleaved_stages else _chunks(layers, pp)
    if "interleaved" in name or "dualpipe" in name:  # each device has a chunk of either end
        marks.append("stages per device: the best that fits")
        return [("interleaved", chunks) for chunks in several]
    if name:
        return [("1f1b", 1)]
    if program.interleaves and program.interleaved_stages:  # what it does unless told otherwise
        return [("interleaved", chunks) for chunks in several]
    if program.interleaves and not (row.recompute and (row.micro_batch or row.grad_accum)):
        marks.append("schedule: the best that fits")
        return [("1f1b", 1), *(("interleaved", chunks) for chunks in several if layers + ENDS >= pp * chunks)]
    marks.append("1F1B assumed")
    return [("1f1b", 1)]


def _chunks(layers: int, pp: int) -> list[int]:
    """Return the numbers of stages per device that cut so many layers evenly, the first and the last stage aside."""
    return [chunks for chunks in range(2, -(-layers // pp) + 1) if -layers % (pp * chunks) <= ENDS] or [2]


def _recompute(row: StepRow, program: Software, marks: list[str]) -> list[tuple[str, float]]:
    """Return the modes of recompute that a row may have run, each with its budget; [] for a mode that no plan has.

    Where a table states none, it is one of the program's usual ones, or some of the layers may be computed again:
    `--recompute-num-layers` of Megatron-LM, named policies of MaxText. So it is where a table says "selective" of a
    program that means by it some of the layers. A row that ran out of memory tells nothing of what fits: it is taken
    to have run the default, which of Megatron-LM and DeepSpeed is none (`--recompute-granularity`,
    `--checkpoint-activations`).
    """
    plain, usual = row.recompute.lower(), program.recomputes
    kept = part_kept(plain, -(-(row.layers or 1) // ((row.pp or 1) * (row.vpp or 1))))
    if kept is not None:
        return [("none" if kept == 1 else "budget" if kept else "full", kept if 0 < kept < 1 else 0.0)]
    if plain == "selective" and program.selective_blocks:
        marks.append("blocks computed again: the fewest that fit")
        return [("budget", part) for part in BUDGETS]
    if not plain and row.status == "oom" and program.master_weights:
        marks.append("recompute: none, which is the default")
        return [("none", 0.0)]
    if not plain:
        marks.append("recompute: the best that fits")
        if usual:
            return [(mode, 0.0) for mode in usual]
        return [("none", 0.0), ("selective", 0.0), ("full", 0.0), *(("budget", part) for part in BUDGETS)]
    if plain.startswith("mixed"):
        return []
    return [(plain if plain in ("none", "selective", "full") else "selective", 0.0)]


def _micro_batches(row: StepRow, batch: int, data_degree: int, marks: list[str]) -> list[int]:
    per_device = -(-batch // data_degree)
    if row.micro_batch and row.micro_batch > per_device:
        marks.append("micro-batch larger than a replica's part of the batch")
    if row.micro_batch:
        return [min(row.micro_batch, per_device)]
    if row.grad_accum:
        return [-(-per_device // row.grad_accum)]
    marks.append("micro-batch: the best that fits")
    sizes = (2**power for power in range(LARGEST_MICRO_BATCH.bit_length()))
    return [size for size in sizes if size <= per_device and per_device % size == 0] or [1]
