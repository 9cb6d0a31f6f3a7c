"""A profile as plain data: for files, journals and other processes; and the key by which a task is known again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from paceline.spec.profile import BlockProfile, Fill, ModelProfile, TensorLimits

LISTS = ("open_axes", "expert_widths", "routed_groups")  # JSON knows no tuples
# What keys of tasks that are trained as a whole do not name: older runs are known by keys without them.
LATER = {"frozen_parameters": 0, "narrow_parameters": 0, "packed_parameters": 0, "packed_layers": 0,
         "unpacked_elements": 0, "forward_only_parameters": 0, "unpacks": 0.0, "unpacks_again": 0.0,
         "backward_products": 2.0, "routed_flops": 0.0, "largest_weight": 0,
         "routed_groups": (), "plain_operators": 0}  # fmt: skip


def pack_profile(profile: ModelProfile) -> dict[str, Any]:
    """Return the profile as plain data. Blocks of one shape are written once: `chain` holds [name, shape]."""
    places: dict[BlockProfile, int] = {}
    chain = [
        [block.name, places.setdefault(dataclasses.replace(block, name=""), len(places))] for block in profile.blocks
    ]
    rest = dataclasses.asdict(dataclasses.replace(profile, blocks=()))
    return {**rest, "blocks": [dataclasses.asdict(shape) for shape in places], "chain": chain}


def unpack_profile(record: dict[str, Any]) -> ModelProfile:
    """Return the profile that `pack_profile` made plain."""
    shapes = [_block(shape) for shape in record["blocks"]]
    blocks = tuple(dataclasses.replace(shapes[place], name=name) for name, place in record["chain"])
    limits = record.get("tensor_limits")
    limits = _limits(limits) if limits else None
    rest = {name: value for name, value in record.items() if name != "chain"}
    texts = {name: tuple(record.get(name, ())) for name in ("remarks", "drawing", "grouped")}
    fills = tuple(Fill(**each) for each in record.get("fills", ()))
    return ModelProfile(**{**rest, "blocks": blocks, "tensor_limits": limits, **texts, "fills": fills})


# What follows from the others, and no key names.
DERIVED = ("last_flops", "unaligned_flops", "unaligned_backward_flops")


def task_key(profile: ModelProfile, optimizer: str) -> str:
    """Return what a task is known by in what was learnt: the hash of its model's blocks, a sample and the optimizer.

    The same model on other data, with another batch or for more steps is the same task: a step of it costs the same.
    Batches of a budget of tokens are another task than full rows: earlier runs of them were priced as full ones.
    """
    shapes = pack_profile(profile)
    counted = {name: shapes[name] for name in ("blocks", "chain", "tokens_per_sample")}
    if profile.fills:
        counted["fills"] = True
    counted["blocks"] = [{name: value for name, value in block.items() if LATER.get(name) != value
                          and name not in DERIVED} for block in counted["blocks"]]  # fmt: skip
    return hashlib.sha256(json.dumps([counted, optimizer], sort_keys=True).encode()).hexdigest()[:16]


def _block(record: dict[str, Any]) -> BlockProfile:
    return BlockProfile(**{**record, **{name: tuple(record.get(name, ())) for name in LISTS}})


def _limits(record: dict[str, Any]) -> TensorLimits:
    splits = record.get("splits") or [record["smallest_split"]]  # the smallest alone, in older journals
    return TensorLimits(record["counts"], tuple(splits), tuple(record["widths"]), record["splits_sequence"])
