"""The plans that a table's row may have run: its layout in Paceline's terms, and every choice that it leaves open.

| as tables print it | as planned here |
|---|---|
| ZeRO-0, plain data parallel | `dp_replicate` |
| ZeRO-1, distributed optimizer | `dp_shard`, class 1 |
| ZeRO-2; ZeRO-3, FSDP | `dp_shard`, class 2; class 3 |
| HSDP | `dp_shard` over a node, `dp_replicate` over the nodes |
| ZeRO-1 in groups of k | `dp_shard` of k, class 1, `dp_replicate` |
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

from paceline.backtest.schema import StepRow
from paceline.plan.feasible.split import split_by_cost
from paceline.spec.layout import Layout, accumulation_for
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile

DEFAULT_BATCH_TOKENS = 2**20  # of a step, where a table states neither a batch nor what it is made of
PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "fp8"}
SPLIT_BY_COST = ("nanotron",)  # `get_block_compute_costs` of its models weighs layers and head
LARGEST_MICRO_BATCH = 64


def precision_of(text: str, marks: list[str]) -> str:
    """Return the precision behind names such as amp_bf16, te-fp8 or bf16-true; bf16 where none is stated."""
    found = next((name for sign, name in PRECISIONS.items() if sign in text.lower()), "")
    if not found:
        marks.append("bf16 assumed" if not text else f"precision {text} taken as bf16")
    return found or "bf16"


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
    whole = degrees["ep"]
    degrees["ep"] = math.gcd(whole, degrees["dp"] * degrees["cp"])
    if degrees["ep"] != whole:  # Megatron-LM also spreads experts over tp; here tp splits each of them instead
        if degrees["tp"] % (whole // degrees["ep"]):
            return None, "ep does not divide dp x cp x tp"
        marks.append("experts split by tp instead of spread over it")
    return degrees, ""


def batch_of(row: StepRow, dp: int, marks: list[str]) -> int:
    """Return the sequences of a global batch: as stated, as micro-batches add up to, or of a million tokens."""
    if row.global_batch:
        return row.global_batch
    if row.micro_batch and row.grad_accum:
        return row.micro_batch * row.grad_accum * dp
    samples = max(1, round(DEFAULT_BATCH_TOKENS / (row.seq_len or 1) / dp)) * dp
    marks.append(f"global batch of {DEFAULT_BATCH_TOKENS:,} tokens assumed")
    return samples


def stages_of(source: str, profile: ModelProfile, count: int) -> tuple[int, ...]:
    """Return the layers of each of so many stages, () with too few layers or one stage.

    Frameworks deal out layers evenly where they can, whatever embedding and head cost; a few split by cost.
    """
    layers = profile.repeated_blocks
    if count == 1 or layers < count:
        return ()
    if layers % count or any(name in source for name in SPLIT_BY_COST):
        return split_by_cost(profile, count)
    return (layers // count,) * count


def plans_of(
    row: StepRow,
    degrees: dict[str, int],
    batch: int,
    schedule: tuple[str, int],
    stages: tuple[int, ...],
    devices_per_node: int,
    marks: list[str],
) -> tuple[list[Plan], str]:
    """Return every plan that the row may have run: one, or several where it leaves choices open; else the reason."""
    placed, zero = _data_axes(row, degrees["dp"], degrees, devices_per_node, marks)
    if placed.get("dp_shard", 1) * degrees["cp"] % degrees["ep"]:  # groups smaller than those of the experts
        placed = {"dp_shard": degrees["dp"]}
    layout = Layout(**placed, cp=degrees["cp"], tp=degrees["tp"], pp=degrees["pp"], ep=degrees["ep"])
    recompute = _recompute(row.recompute, marks)
    if not recompute:
        return [], "recompute of some layers only"
    base = Plan(
        layout=layout,
        zero=zero,
        batch_samples=batch,
        precision=precision_of(row.precision, marks),
        compile=bool(row.compile),
        schedule=schedule[0],
        virtual_stages=schedule[1],
        stages=stages,
    )
    micro_batches = _micro_batches(row, batch, layout.data_degree, marks)
    return [
        replace(
            base, micro_batch=micro, accumulation=accumulation_for(batch, layout.data_degree, micro), recompute=mode
        )
        for micro, mode in itertools.product(micro_batches, recompute)
    ], ""


def _data_axes(
    row: StepRow, dp: int, degrees: dict[str, int], devices_per_node: int, marks: list[str]
) -> tuple[dict[str, int], int]:
    """Return the data axes' degrees and the ZeRO class. Experts are spread over `dp_shard`, whatever the class."""
    text = row.zero_stage.lower()
    group = re.search(r"group (\d+)", text)
    if "hsdp" in text:
        shard = math.gcd(dp, max(1, devices_per_node // (degrees["tp"] * degrees["cp"])))
        return {"dp_shard": shard, "dp_replicate": dp // shard}, 3
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
    if not text:
        marks.append("plain data parallel assumed" if dp > 1 else "no sharding assumed")
    if degrees["ep"] > 1:  # the mesh spreads experts over dp_shard; ZeRO-1 is the class that shards least
        shard = math.lcm(degrees["ep"], degrees["cp"]) // degrees["cp"]
        return {"dp_shard": shard, "dp_replicate": dp // shard}, 1
    return {"dp_replicate": dp}, 3


def schedule_of(row: StepRow, pp: int, marks: list[str]) -> tuple[str, int]:
    """Return the pipeline schedule and the stages per device."""
    if pp == 1:
        return "1f1b", 1
    chunks = row.vpp or 1
    name = row.pp_schedule.lower()
    if "interleaved" in name and not row.vpp:
        chunks = 2
        marks.append("2 stages per device assumed")
    if not name and chunks == 1:
        marks.append("1F1B assumed")
    return ("gpipe" if "gpipe" in name else "interleaved" if chunks > 1 else "1f1b"), chunks


def _recompute(text: str, marks: list[str]) -> tuple[str, ...]:
    """Return the modes of recompute that a row may have run; () for a mode that no plan has."""
    plain = text.lower()
    if not plain:
        marks.append("recompute: the planner's choice")
        return ("none", "selective", "full")
    if plain.startswith("mixed"):
        return ()
    return (plain if plain in ("none", "selective", "full") else "selective",)


def _micro_batches(row: StepRow, batch: int, data_degree: int, marks: list[str]) -> list[int]:
    per_device = -(-batch // data_degree)
    if row.micro_batch:
        return [min(row.micro_batch, per_device)]
    if row.grad_accum:
        return [-(-per_device // row.grad_accum)]
    marks.append("micro-batch: the planner's choice")
    sizes = (2**power for power in range(LARGEST_MICRO_BATCH.bit_length()))
    return [size for size in sizes if size <= per_device and per_device % size == 0] or [1]
