"""Plan: how a task runs on a cluster; and the constraints a spec may put on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.declared import Declared
from paceline.config.fields import HeldWord, option
from paceline.errors import ConfigError
from paceline.spec.layout import Layout, rows_of
from paceline.spec.sync import PLAIN, Sync, sync_of
from paceline.units import plural

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
RECOMPUTE = ("none", "selective", "budget", "full")  # from what keeps most to what keeps least
SAVED_KINDS = ("products", "attention")  # what selective recompute may keep
OFFLOAD = ("none", "optimizer", "activations", "all")
FROZEN = ("as-model", "spread")
GRADIENTS = ("shards", "whole")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
CP_METHODS = ("gather", "ring")
CONFIRMED = HeldWord(-1)  # what `micro_batch = "auto"` is held as
MOST_PARTS = 1_000_000  # alike, of a list of stages or ranks: one part a device
QUANTITIES = ("time", "memory", "money", "energy", "carbon")  # what a plan takes, and a goal minimises


@dataclass(frozen=True)
class GoalSpec(Declared, table="plan.goal"):
    """What the planner minimises: one quantity, or a weighted sum of several, each over the least that a plan takes."""

    name: str = option("time", "minimised alone, where no weight is set", choices=QUANTITIES)
    time: float = option(0.0, "weight of the time of a step", minimum=0.0)
    memory: float = option(0.0, "weight of the memory of the fullest device", minimum=0.0)
    money: float = option(0.0, "weight of the run's money", minimum=0.0)
    energy: float = option(0.0, "weight of the run's energy", minimum=0.0)
    carbon: float = option(0.0, "weight of the run's carbon", minimum=0.0)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every quantity that counts; they add up to 1."""
        stated = {name: getattr(self, name) for name in QUANTITIES if getattr(self, name) > 0}
        total = sum(stated.values())
        return {name: weight / total for name, weight in stated.items()} if stated else {self.name: 1.0}

    def __str__(self) -> str:
        weights = self.weights
        if len(weights) == 1:
            return next(iter(weights))
        return " + ".join(f"{weight:.3g} {name}" for name, weight in weights.items())


@dataclass(frozen=True)
class PlanSpec(Declared, table="plan"):
    """The `[plan]` table of a spec. What is left unset ("auto" or 0) is the planner's choice; the rest binds it."""

    dp_replicate: int = option(0, "copies of the model (0: planner's choice)", minimum=0)
    dp_shard: int = option(0, "devices that share one copy's state (0: planner's choice)", minimum=0)
    cp: int = option(0, "devices that share one sequence (0: planner's choice)", minimum=0)
    tp: int = option(0, "devices that share one layer's matrices (0: planner's choice)", minimum=0)
    pp: int = option(0, "pipeline stages (0: planner's choice)", minimum=0)
    ep: int = option(0, "devices that share one layer's experts (0: planner's choice)", minimum=0)
    zero: int = option(
        0,
        "ZeRO memory class of dp_shard: 1 shards optimizer state, 2 also gradients, 3 also weights; asks for a layout "
        "that shards, where the devices and the other axes leave one (0: any)",
        minimum=0,
        maximum=3,
    )
    gradients: str = option(
        "auto",
        "what a device holds of gradients between the micro-batches of a step, of state that is sharded: its shards, "
        "reduced in every one (ZeRO-2 and 3), or whole ones, reduced once a step (ZeRO-1 and 3)",
        choices=("auto", *GRADIENTS),
    )
    micro_batch: int = option(
        0,
        "samples per forward pass on a device (0: planner's choice; auto: that choice, confirmed by a few steps in "
        "processes that end before the run begins, and made smaller where a run's memory gets short)",
        minimum=0,
        words={"auto": CONFIRMED},
    )
    rows: str = option(
        "", 'samples of the global batch that each data rank reads, such as "3x10+2" (empty: as even as can be)'
    )
    recompute: str = option("auto", "activation checkpointing", choices=("auto", *RECOMPUTE))
    recompute_save: tuple[str, ...] = option(
        SAVED_KINDS, "what selective recompute keeps: outputs of products, of attention", choices=SAVED_KINDS
    )
    recompute_budget: float = option(
        0.0,
        "part of the activation bytes of the repeated blocks that recompute = budget keeps (0: planner's choice)",
        minimum=0.0,
        maximum=1.0,
    )
    offload: str = option(
        "auto", "what rests in host memory (auto: nothing, unless no plan fits without)", choices=("auto", *OFFLOAD)
    )
    frozen: str = option(
        "auto",
        "where the weights of a frozen teacher or reference, and those in four bits, rest: as the trained model's do, "
        "or spread over all ranks that read different samples and gathered block by block (auto: what serves the goal)",
        choices=("auto", *FROZEN),
    )
    precision: str = option(
        "auto", "dtype of forward and backward; weights and optimizer state stay fp32", choices=("auto", *PRECISIONS)
    )
    compile: bool = option(False, "compile each block with torch.compile, but those that draw random numbers")
    schedule: str = option("auto", "order in which a pipeline runs micro-batches", choices=("auto", *SCHEDULES))
    virtual_stages: int = option(0, "pipeline stages per device (0: 2 where interleaved, else 1)", minimum=0)
    stages: str = option(
        "", 'blocks of each pipeline stage, such as "3+2"; asks for a pipeline, where one can be had (empty: by cost)'
    )
    cp_method: str = option(
        "gather", "how keys reach the ranks that share a sequence: all at once, or in a ring", choices=CP_METHODS
    )
    expert_slots: float = option(
        0.0,
        "slots that each rank of `ep` sends every other one for rows of its experts, as a multiple of the most rows "
        "seen: the host waits for no exchange, and a step with more rows is made again (0: exactly the rows there are)",
        minimum=0.0,
    )
    sync: Any = option(factory=Sync, doc="how copies of the model stay in step")
    goal: Any = option(factory=GoalSpec, doc="what the planner minimises")
    deadline: float | None = option(
        None, "longest time the run may take, failures included where they are known", quantity="duration", above=0.0
    )
    budget_usd: float | None = option(None, "most the run may cost, in USD", above=0.0)
    memory_risk: float = option(
        0.1, "largest chance of running out of memory that a plan may have", above=0.0, maximum=0.5
    )

    def refuse_contradictions(self) -> None:
        """Raise ConfigError for fewer slots than the rows that were seen: every step would be made again."""
        if 0 < self.expert_slots < 1:
            raise ConfigError(
                f"plan.expert_slots = {self.expert_slots:g}",
                "fewer slots than the rows that were seen would have every step made again",
                "plan.expert_slots = 1.5, or 0 for an exact exchange",
            )

    @property
    def confirms(self) -> bool:
        """Whether the micro-batch is confirmed by a probe, and may change during the run."""
        return self.micro_batch == CONFIRMED

    @property
    def asked_micro_batch(self) -> int:
        """The micro-batch that the spec settles; 0 where it settles none."""
        return max(0, self.micro_batch)


@dataclass(frozen=True)
class Plan:
    """A layout and everything else that decides what `run/` builds. Made by the planner, never changed in place."""

    layout: Layout = option(factory=Layout)
    zero: int = 3  # ZeRO class of the dp_shard axis: 1, 2 or 3
    micro_batch: int = 1  # samples per forward pass on a device
    accumulation: int = 1  # micro-batches per step on a device
    batch_samples: int = 1  # samples per step over all devices: the task's global batch
    recompute: str = "none"  # none, selective, budget, full
    precision: str = "fp32"  # fp32, bf16, fp16, fp64
    compile: bool = False
    schedule: str = "1f1b"  # of the pipeline: gpipe, 1f1b, interleaved, zero-bubble
    virtual_stages: int = 1  # pipeline stages per device
    stages: tuple[int, ...] = ()  # blocks of every pipeline stage, in order; empty: as even as can be
    cp_method: str = "gather"  # gather, ring: how keys reach the ranks that share a sequence
    recompute_save: tuple[str, ...] = SAVED_KINDS  # what selective recompute keeps
    recompute_budget: float = 0.0  # of recompute = budget: the part of the repeated blocks' activation bytes kept
    recompute_blocks: tuple[str, ...] = ()  # of recompute = budget: the mode of every repeated block, in order
    offload: str = "none"  # none, optimizer, activations, all: what rests in host memory
    frozen: str = "as-model"  # as-model, spread: where models that only go forward, and weights in four bits, rest
    sync: Sync = PLAIN  # how copies stay in step
    bucket_bytes: int = 25 * 2**20  # of gradients that copies sum at a time
    state_bucket_bytes: int = 128 * 2**20  # of optimizer state in host memory that visits the device at a time
    logits_elements: int = 2**27  # of logits that the built-in loss holds at a time
    rows: tuple[int, ...] = ()  # samples of every batch that each data rank reads, in order; empty: as even as can be
    # Of class 3: whether gradients stay whole between micro-batches, as they always do in class 1 and never in class 2.
    whole_gradients: bool = False
    expert_slots: float = 0.0  # for each rank of `ep`, as a multiple of the most rows seen; 0: rows travel exactly

    def rows_of(self, data_rank: int, samples: int = 0) -> range:
        """Return the rows of a global batch that a data rank reads; of a batch of `samples` in the same proportion."""
        return rows_of(samples or self.batch_samples, self.layout.data_degree, data_rank, self.rows)

    @property
    def reduces_once(self) -> bool:
        """Whether shards get their gradients once a step, from whole ones, and not in every micro-batch."""
        return self.zero == 1 or self.whole_gradients

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state rests in host memory."""
        return self.offload in ("optimizer", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether what blocks keep for the backward pass rests in host memory until then."""
        return self.offload in ("activations", "all")

    def recompute_of(self, block: int) -> str:
        """Return how a repeated block is recomputed: none, selective or full."""
        return self.recompute_blocks[block] if self.recompute == "budget" else self.recompute

    def recompute_share(self, *modes: str) -> float:
        """Return the part of the repeated blocks that are recomputed in one of these modes."""
        if self.recompute != "budget":
            return float(self.recompute in modes)
        return sum(mode in modes for mode in self.recompute_blocks) / max(1, len(self.recompute_blocks))

    def __str__(self) -> str:
        parts = [str(self.layout)]
        if self.layout.state_degree > 1:
            parts.append(self.class_text)
        if self.layout.pp > 1:
            split = f", blocks {counts_text(self.stages)}" if self.stages else ""
            parts.append(f"{self.schedule}, {self.layout.pp * self.virtual_stages} stages{split}")
        if self.layout.cp > 1 and self.cp_method != "gather":
            parts.append(f"{self.cp_method} attention")
        if self.layout.ep > 1 and self.expert_slots:
            parts.append(f"expert slots x {self.expert_slots:g}")
        parts.append(f"micro-batch {self.micro_batch} x {self.accumulation} accumulation")
        if self.rows:
            parts.append(f"rows {counts_text(self.rows)}")
        parts.append(self.precision)
        parts.append(self._recompute_text())
        if self.offload != "none":
            held = {"optimizer": "optimizer state", "activations": "activations"}
            parts.append(f"{held.get(self.offload, 'optimizer state and activations')} in host memory")
        if self.frozen == "spread":
            parts.append("frozen weights spread")
        if not self.sync.is_plain:
            parts.append(str(self.sync))
        return " · ".join([*parts, *(["compiled"] if self.compile else [])])

    @property
    def class_text(self) -> str:
        """Which class shards are of, and what of gradients is whole that the class does not say: "ZeRO-3"."""
        return f"ZeRO-{self.zero}" + (", whole gradients" if self.whole_gradients else "")

    def _recompute_text(self) -> str:
        if self.recompute == "none":
            return "no recompute"
        text = f"{self.recompute} recompute"
        if self.recompute == "budget":
            counts = {mode: self.recompute_blocks.count(mode) for mode in RECOMPUTE}
            blocks = ", ".join(f"{count} {mode}" for mode, count in counts.items() if count)
            text += f" {self.recompute_budget:g}" + (f" ({blocks})" if blocks else "")
        kept = self.recompute_save != SAVED_KINDS and self.recompute in ("selective", "budget")
        return text + (f", keeping {' and '.join(self.recompute_save)}" if kept else "")


def plan_from_dict(data: dict[str, Any]) -> Plan:
    """Return the plan that `dataclasses.asdict` took apart."""
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    sync = sync_of(data.get("sync", {}))  # an earlier release knew none
    return Plan(**{**data, **lists, "layout": Layout(**data["layout"]), "sync": sync})


def classes_of(zero: int, gradients: str) -> tuple[tuple[int, bool], ...]:
    """Return the (ZeRO class, whether it has whole gradients on top) that `plan.zero` and `plan.gradients` leave.

    Raises ConfigError for a class whose gradients cannot be held so.
    """
    every = ((1, False), (2, False), (3, False), (3, True))
    of_class = [one for one in every if zero in (0, one[0])]
    kept = tuple(one for one in of_class if gradients == "auto" or (one[0] == 1 or one[1]) == (gradients == "whole"))
    if not kept:
        other = 1 if gradients == "whole" else 2
        because = f"ZeRO-{zero} holds {'shards' if zero == 2 else 'whole ones'} between micro-batches"
        raise ConfigError(
            f"plan.gradients = '{gradients}' with plan.zero = {zero}",
            because,
            f"plan.zero = {other}, which is the same otherwise",
        )
    return kept


def counts_text(counts: Sequence[int]) -> str:
    """Return how blocks are spread over stages, or rows over ranks, runs of equal ones joined: "31+3x32+31"."""
    runs: list[list[int]] = []
    for each in counts:
        if runs and runs[-1][1] == each:
            runs[-1][0] += 1
        else:
            runs.append([1, each])
    return "+".join(f"{times}x{each}" if times > 1 else str(each) for times, each in runs)


def parse_stages(text: str) -> tuple[int, ...]:
    """Return the blocks of every stage from "31+3x32+31". Raises ConfigError for what is no such list."""
    return _parse_counts(text, "plan.stages", "it lists the blocks of every pipeline stage")


def parse_rows(text: str) -> tuple[int, ...]:
    """Return the samples of every data rank from "3x10+2". Raises ConfigError for what is no such list."""
    return _parse_counts(text, "plan.rows", "it lists the samples that each data rank reads of a global batch")


def _parse_counts(text: str, name: str, because: str) -> tuple[int, ...]:
    """Return the counts that `counts_text` says; () for an empty text."""
    counts: list[int] = []
    for part in text.replace(" ", "").split("+") if text.strip() else []:
        times, _, count = part.rpartition("x")
        is_count = count.isdecimal() and (not times or (times.isdecimal() and 0 < int(times) <= MOST_PARTS))
        if not is_count:
            raise ConfigError(f"{name} = '{text}' is no split", because, '"3+2x4+3"')
        counts += [int(count)] * int(times or 1)
    return tuple(counts)


def rows_refusal(plan: Plan) -> str | None:
    """Return why the rows that a plan gives its data ranks do not make up its global batch, or None."""
    degree = plan.layout.data_degree
    if not plan.rows:
        return None
    if len(plan.rows) != degree:
        return f"rows = {counts_text(plan.rows)} are those of {plural(len(plan.rows), 'data rank')}, and {degree} read"
    if sum(plan.rows) != plan.batch_samples or min(plan.rows) < 0:
        return f"rows = {counts_text(plan.rows)} are {sum(plan.rows)} of a global batch of {plan.batch_samples} samples"
    return None
