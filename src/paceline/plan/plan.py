"""Plan: how a task runs on a cluster; and the constraints a spec may put on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config.fields import option
from paceline.plan.layout import Layout

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
CP_METHODS = ("gather", "ring")


@dataclass(frozen=True)
class PlanSpec:
    """The `[plan]` table of a spec. What is left unset ("auto" or 0) is the planner's choice; the rest binds it."""

    dp_replicate: int = option(0, "copies of the model (0: planner's choice)", minimum=0)
    dp_shard: int = option(0, "devices that share one copy's state (0: planner's choice)", minimum=0)
    cp: int = option(0, "devices that share one sequence (0: planner's choice)", minimum=0)
    tp: int = option(0, "devices that share one layer's matrices (0: planner's choice)", minimum=0)
    pp: int = option(0, "pipeline stages (0: planner's choice)", minimum=0)
    ep: int = option(0, "devices that share one layer's experts (0: planner's choice)", minimum=0)
    zero: int = option(
        0,
        "ZeRO memory class of dp_shard: 1 shards optimizer state, 2 also gradients, 3 also weights (0: any)",
        minimum=0,
        maximum=3,
    )
    micro_batch: int = option(0, "samples per forward pass on a device (0: planner's choice)", minimum=0)
    recompute: str = option("auto", "activation checkpointing", choices=("auto", *RECOMPUTE))
    precision: str = option(
        "auto", "dtype of forward and backward; weights and optimizer state stay fp32", choices=("auto", *PRECISIONS)
    )
    compile: bool = option(False, "compile each block with torch.compile")
    schedule: str = option("auto", "order in which a pipeline runs micro-batches", choices=("auto", *SCHEDULES))
    virtual_stages: int = option(0, "pipeline stages per device (0: 2 where interleaved, else 1)", minimum=0)
    stages: str = option("", 'blocks of each pipeline stage, such as "3+2" (empty: split by cost)')
    cp_method: str = option(
        "gather", "how keys reach the ranks that share a sequence: all at once, or in a ring", choices=CP_METHODS
    )
    goal: str = option("time", "what the planner minimises", choices=("time", "memory", "money", "energy"))


@dataclass(frozen=True)
class Plan:
    """A layout and everything else that decides what `run/` builds. Made by the planner, never changed in place."""

    layout: Layout = option(factory=Layout)
    zero: int = 3  # ZeRO class of the dp_shard axis: 1, 2 or 3
    micro_batch: int = 1  # samples per forward pass on a device
    accumulation: int = 1  # micro-batches per step on a device
    batch_samples: int = 1  # samples per step over all devices: the task's global batch
    recompute: str = "none"  # none, selective, full
    precision: str = "fp32"  # fp32, bf16, fp16, fp64
    compile: bool = False
    schedule: str = "1f1b"  # of the pipeline: gpipe, 1f1b, interleaved, zero-bubble
    virtual_stages: int = 1  # pipeline stages per device
    stages: tuple[int, ...] = ()  # blocks of every pipeline stage, in order; empty: as even as can be
    cp_method: str = "gather"  # gather, ring: how keys reach the ranks that share a sequence

    def __str__(self) -> str:
        parts = [str(self.layout)]
        if self.layout.state_degree > 1:
            parts.append(f"ZeRO-{self.zero}")
        if self.layout.pp > 1:
            split = f", blocks {stages_text(self.stages)}" if self.stages else ""
            parts.append(f"{self.schedule}, {self.layout.pp * self.virtual_stages} stages{split}")
        if self.layout.cp > 1 and self.cp_method != "gather":
            parts.append(f"{self.cp_method} attention")
        parts.append(f"micro-batch {self.micro_batch} x {self.accumulation} accumulation")
        parts.append(self.precision)
        parts.append("no recompute" if self.recompute == "none" else f"{self.recompute} recompute")
        return " · ".join([*parts, *(["compiled"] if self.compile else [])])


def plan_from_dict(data: dict[str, Any]) -> Plan:
    """Return the plan that `dataclasses.asdict` took apart."""
    return Plan(**{**data, "layout": Layout(**data["layout"]), "stages": tuple(data.get("stages", ()))})


def stages_text(stages: tuple[int, ...]) -> str:
    """Return how blocks are spread over stages, runs of equal ones joined: "31+3x32+31"."""
    runs: list[list[int]] = []
    for blocks in stages:
        if runs and runs[-1][1] == blocks:
            runs[-1][0] += 1
        else:
            runs.append([1, blocks])
    return "+".join(f"{count}x{blocks}" if count > 1 else str(blocks) for count, blocks in runs)
