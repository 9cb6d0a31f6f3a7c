"""Many plans at once, as columns: one array for each thing that plans of a search differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.spec.layout import MESH_ORDER, Layout, data_rank_paces, group_of, holds_shards, rows_of
from paceline.spec.plan import RECOMPUTE, SCHEDULES, Plan

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
AXES = (*MESH_ORDER, "ep")


@dataclass(frozen=True)
class Columns:
    """Plans of one task and precision. Arrays have one entry per plan; the rest holds for all of them.

    `recompute` and `schedule` are places in RECOMPUTE and SCHEDULES, `split` a place in `splits`, which lists the
    blocks of every pipeline stage; -1 is a plan without a pipeline. `settled` is a place in `blocks`, which lists the
    mode of recompute of every repeated block; -1 is a plan whose `recompute` and `budget` decide on them.
    """

    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    pp: Ints
    ep: Ints
    zero: Ints
    whole_gradients: Ints  # 1 or 0
    micro_batch: Ints
    accumulation: Ints
    recompute: Ints
    budget: Floats
    settled: Ints
    schedule: Ints
    virtual_stages: Ints
    split: Ints
    splits: tuple[tuple[int, ...], ...]
    blocks: tuple[tuple[str, ...], ...]
    common: Plan  # what every plan has in common: the fields of COMMON
    paces: tuple[float, ...] = ()  # of the cluster's devices, where they differ

    def __len__(self) -> int:
        return len(self.dp_replicate)

    @property
    def precision(self) -> str:
        """The dtype of forward and backward of every plan."""
        return self.common.precision

    @cached_property
    def data_degree(self) -> Ints:
        """Groups of devices that read different samples."""
        return self.dp_replicate * self.dp_shard

    @cached_property
    def state_degree(self) -> Ints:
        """Devices that one copy's state is sharded over."""
        return self.dp_shard * self.cp

    @property
    def held_degree(self) -> Ints:
        """Devices that one copy's state is divided over: the same, but of class 0, where each holds all of it.

        No plan of ours is of class 0: it is what others call plain copies, over ranks that share a sequence or experts.
        """
        return np.where(self.zero > 0, self.state_degree, 1)

    @cached_property
    def is_sharded(self) -> Flags:
        """Whether weights are held in shards: see `holds_shards`."""
        sharded: Flags = holds_shards(self._degrees)
        return sharded

    @cached_property
    def reduces_once(self) -> Flags:
        """Whether shards get their gradients once a step: see `Plan.reduces_once`."""
        once: Flags = (self.zero == 1) | (self.whole_gradients == 1)
        return once

    @cached_property
    def device_samples(self) -> Ints | Floats:
        """Samples per step on the device with the largest part of the batch.

        Where devices differ, on the one that takes longest: as many as the slowest kind would compute in that time.
        """
        batch, rows = self.common.batch_samples, self.common.rows
        if not self.paces:
            return np.full(len(self), max(rows)) if rows else -(-batch // self.data_degree)
        layouts = np.stack([self.data_degree, self.cp, self.tp, self.pp], axis=1)
        each, which = np.unique(layouts, axis=0, return_inverse=True)
        longest = []
        for degree, cp, tp, pp in each.tolist():
            paces = data_rank_paces(Layout(dp_shard=degree, cp=cp, tp=tp, pp=pp), self.paces)
            longest.append(max(len(rows_of(batch, degree, at, rows)) * pace for at, pace in enumerate(paces)))
        return np.array(longest, dtype=np.float64)[which.reshape(-1)]

    def group(self, axis: str) -> tuple[Ints, Ints]:
        """Return (size, ranks from one member to the next) of every plan's groups along an axis."""
        return group_of(self._degrees, axis)

    @property
    def _degrees(self) -> dict[str, Ints]:
        return {name: getattr(self, name) for name in AXES}

    def recomputes(self, *modes: str) -> Flags:
        """Return whether a plan's recompute is one of those named."""
        return np.isin(self.recompute, [RECOMPUTE.index(mode) for mode in modes])

    def scheduled(self, *names: str) -> Flags:
        """Return whether a plan's pipeline schedule is one of those named."""
        return np.isin(self.schedule, [SCHEDULES.index(name) for name in names])

    def take(self, chosen: object) -> Columns:
        """Return the plans that an index, a slice or a mask chooses."""
        return replace(self, **{name: getattr(self, name)[chosen] for name in ARRAYS})

    def joined(self, others: Columns) -> Columns:
        """Return these plans and others taken from among their like: splits and settled modes must be the same."""
        assert (self.splits, self.blocks, self.common) == (others.splits, others.blocks, others.common)
        arrays: dict[str, Any] = {name: np.concatenate([getattr(self, name), getattr(others, name)]) for name in ARRAYS}
        return replace(self, **arrays)

    def with_budgets(self, budgets: Sequence[float]) -> Columns:
        """Return every plan with each of these memory budgets in place of its recompute; equal ones once."""
        plans = self.take(np.repeat(np.arange(len(self)), len(budgets)))
        asked = replace(
            plans,
            recompute=np.full(len(plans), RECOMPUTE.index("budget")),
            budget=np.tile(np.array(budgets, dtype=np.float64), len(self)),
            settled=np.full(len(plans), -1),
        )
        _, first = np.unique(np.stack([getattr(asked, name) for name in ARRAYS], axis=1), axis=0, return_index=True)
        return asked.take(np.sort(first))

    def plan(self, index: int) -> Plan:
        """Return one plan in full."""
        split, settled = int(self.split[index]), int(self.settled[index])
        return replace(
            self.common,
            layout=Layout(**{axis: int(getattr(self, axis)[index]) for axis in AXES}),
            zero=int(self.zero[index]),
            whole_gradients=bool(self.whole_gradients[index]),
            micro_batch=int(self.micro_batch[index]),
            accumulation=int(self.accumulation[index]),
            recompute=RECOMPUTE[self.recompute[index]],
            recompute_budget=float(self.budget[index]),
            recompute_blocks=self.blocks[settled] if settled >= 0 else (),
            schedule=SCHEDULES[self.schedule[index]],
            virtual_stages=int(self.virtual_stages[index]),
            stages=self.splits[split] if split >= 0 else (),
        )


ARRAYS = tuple(field.name for field in fields(Columns) if field.name not in ("splits", "blocks", "common", "paces"))
COMMON = ("precision", "compile", "batch_samples", "cp_method", "recompute_save", "offload", "frozen", "sync",
          "rows", "expert_slots")  # fmt: skip


def columns_of(plans: Sequence[Plan], paces: tuple[float, ...] = ()) -> Columns:
    """Return plans that agree in the fields of COMMON as columns. Their splits must be given."""
    common = plans[0]
    assert all(getattr(plan, name) == getattr(common, name) for plan in plans for name in COMMON)
    splits = tuple(dict.fromkeys(plan.stages for plan in plans if plan.layout.pp > 1))
    blocks = tuple(dict.fromkeys(plan.recompute_blocks for plan in plans if _is_settled(plan)))

    def column(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    return Columns(
        **{axis: column([getattr(plan.layout, axis) for plan in plans]) for axis in AXES},
        **{
            name: column([getattr(plan, name) for plan in plans])
            for name in ("zero", "whole_gradients", "micro_batch", "accumulation", "virtual_stages")
        },
        recompute=column([RECOMPUTE.index(plan.recompute) for plan in plans]),
        budget=np.array([plan.recompute_budget for plan in plans], dtype=np.float64),
        settled=column([blocks.index(plan.recompute_blocks) if _is_settled(plan) else -1 for plan in plans]),
        schedule=column([SCHEDULES.index(plan.schedule) for plan in plans]),
        split=column([splits.index(plan.stages) if plan.layout.pp > 1 else -1 for plan in plans]),
        splits=splits,
        blocks=blocks,
        common=common,
        paces=paces,
    )


def _is_settled(plan: Plan) -> bool:
    return plan.recompute == "budget" and bool(plan.recompute_blocks)
