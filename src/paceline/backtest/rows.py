"""A table's row as a case to forecast: model, cluster, the plans it may have run, and what it measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from paceline.backtest.layout import (
    ENDS,
    batch_of,
    degrees_of,
    experts_of,
    plans_of,
    schedules_of,
    stages_of,
)
from paceline.backtest.machine import Machines, over_sockets
from paceline.backtest.row_measurement import memory_kind, not_training, step_seconds, time_excluded
from paceline.backtest.schema import StepRow
from paceline.backtest.shape import shape_of
from paceline.backtest.words.adapters import adapter_of, beside_inputs
from paceline.backtest.words.plausible import contradiction, impossible
from paceline.backtest.words.settings import precision_of, recompute_of, sharding_of
from paceline.plan.cost.programs.known import program_of
from paceline.plan.flops import flops_per_sample
from paceline.spec.cluster import Cluster
from paceline.spec.plan import Plan
from paceline.spec.profile import ModelProfile
from paceline.task.profile.adapters import adapted_transformer
from paceline.task.profile.transformer import TransformerShape

# What rows of a scaling series have in common: all that a table states of a run but its devices and what they took. Of
# the data axis a table states the degree, which goes with the devices.
ALIKE = ("source_ref", "program", "model", "layers", "hidden", "seq_len", "accelerator", "precision", "tp", "sp", "pp",
         "vpp", "pp_schedule", "cp", "ep", "zero_stage", "recompute", "attention_kernel", "compile")  # fmt: skip
NULL_CONVENTION = "model"  # of the null's MFU: what is computed without recompute, attention whole


@dataclass(frozen=True)
class Case:
    """What a row is forecast from, and what it measured.

    `plans` has several entries where the row leaves choices open: the forecast is that of the planner's choice among
    them. `marks` are what was assumed. `step_seconds` is None where the row's time is not scored, for the reason in
    `time_excluded`.
    """

    row: StepRow
    profile: ModelProfile
    cluster: Cluster
    plans: tuple[Plan, ...]
    sequence_parallel: bool  # whether what tp does not split is split over the sequence
    marks: tuple[str, ...]
    flops_per_step: float  # in the null's convention
    step_seconds: float | None
    time_excluded: str
    memory_bytes: float | None
    memory_kind: str

    @property
    def batch_samples(self) -> int:
        """The sequences of a global batch."""
        return self.plans[0].batch_samples

    @property
    def is_open(self) -> bool:
        """Whether the row leaves open in which micro-batches it ran, or what it computed again."""
        several = {(plan.recompute, plan.recompute_budget) for plan in self.plans}
        return len({plan.micro_batch for plan in self.plans}) > 1 or (not self.row.recompute and len(several) > 1)

    @property
    def group(self) -> tuple[object, ...]:
        """What rows have in common among which a layout is chosen."""
        row = self.row
        machine = (row.accelerator, row.n_devices, row.precision)
        return (row.source, row.model, row.layers, row.hidden, row.seq_len, *machine, self.batch_samples)


def with_one_micro_batch(cases: Sequence[Case]) -> list[Case]:
    """Return the cases, those of a scaling series with the micro-batches alone that all of its rows may have run.

    A series, rows of one place in a source that differ in their devices alone, shows what more devices do, so a
    micro-batch that it leaves open is one for all of its rows.

    Example: 256 sequences on 64 devices may run in micro-batches of 1, 2 and 4, on 256 devices in those of 1 alone: a
    table of both ran micro-batches of 1.
    """
    series: dict[Hashable, list[int]] = {}
    for place, case in enumerate(cases):
        series.setdefault(_series(case.row, place), []).append(place)
    found = list(cases)
    for places in series.values():
        if len({cases[place].cluster.devices for place in places}) < 2:
            continue
        common = set.intersection(*({plan.micro_batch for plan in cases[place].plans} for place in places))
        for place in places:
            kept = tuple(plan for plan in cases[place].plans if plan.micro_batch in common)
            if kept:
                found[place] = replace(cases[place], plans=kept)
    return found


def _series(row: StepRow, place: int) -> Hashable:
    """Return what the rows of a series have in common; of a row that states its micro-batch, its own place."""
    if row.micro_batch or row.grad_accum or not row.source_ref:
        return place
    return tuple(getattr(row, name) for name in ALIKE)


class Reader:
    """Makes cases of rows. Remembers clusters and stages, since the rows of a table share them."""

    def __init__(self) -> None:
        self.machines = Machines()
        self._splits: dict[tuple[str, TransformerShape, int, int], tuple[int, ...]] = {}

    def case(self, row: StepRow) -> tuple[Case | None, str]:
        """Return the row's case, or None with the reason for which it cannot be scored."""
        reason = (row.problem and f"unreadable: {row.problem}") or not_training(row)
        if reason:
            return None, reason
        if row.status not in ("ok", "oom", "failed"):
            return None, f"status {row.status}"
        if not row.n_devices:
            return None, "the number of devices is not stated"
        if reason := contradiction(row):
            return None, reason
        marks, devices = list[str](), row.n_devices
        adapter, attention_only, reason = adapter_of(row, marks)
        if reason:
            return None, reason
        if adapter is not None and row.experts:  # each rank has all of them, frozen
            row = replace(row, ep=row.ep or 1)
        row = replace(row, zero_stage=sharding_of(row.zero_stage, marks), recompute=recompute_of(row.recompute))
        shape, assumed = shape_of(row)
        if shape is None:
            return None, assumed[0]
        marks += assumed
        assumed_program = program_of(row.program, row.zero_stage)[1]
        marks += [assumed_program] if assumed_program else []
        between = f"{row.inter_bw}, sockets" if over_sockets(row.notes) else row.inter_bw
        cluster, assumed = self.machines.cluster(row.accelerator, devices, row.devices_per_node, row.intra_bw, between)
        if cluster is None:
            return None, assumed[0]
        plans, reason = self._plans(row, shape, cluster, marks)
        if reason:
            return None, reason
        marks += assumed
        if adapter is None:
            return self._measured(row, shape, shape.profile(), cluster, tuple(plans), marks)
        inputs_only = beside_inputs(row)
        profile = adapted_transformer(shape, adapter, attention_only=attention_only, inputs_only=inputs_only)
        if profile.packed_parameters:  # FSDP has shards of them too, gathered as they rest
            plans = [replace(plan, frozen="spread") if plan.layout.dp_shard > 1 else plan for plan in plans]
        return self._measured(row, shape, profile, cluster, tuple(plans), marks)

    def _plans(
        self, row: StepRow, shape: TransformerShape, cluster: Cluster, marks: list[str]
    ) -> tuple[list[Plan], str]:
        """Return every plan that the row may have run, or the reason for which it can have run none."""
        degrees, reason = degrees_of(row, marks)
        if degrees is None:
            return [], reason
        precision, reason = precision_of(row.precision, marks)
        if reason:
            return [], reason
        if not row.precision and precision not in cluster.device.matmul_flops:
            precision = "fp16"  # chips older than bf16 have no other sixteen bits
        batch = batch_of(row, degrees["dp"], marks)
        schedules = []
        for name, chunks in schedules_of(row, degrees["pp"], shape.layers, marks):
            stages, reason = self._stages(row, shape, degrees["pp"] * chunks, ENDS if chunks > 1 else 0)
            if not reason:
                schedules.append((name, chunks, stages))
        if not schedules:
            return [], reason
        plans: list[Plan] = []
        for spread in experts_of(row, degrees, marks):
            found, reason = plans_of(row, spread, batch, schedules, cluster.devices_per_node, precision, marks)
            plans += found
        return plans, "" if plans else reason

    def _stages(self, row: StepRow, shape: TransformerShape, count: int, ends: int) -> tuple[tuple[int, ...], str]:
        """Return the layers of each pipeline stage, () without a pipeline; the reason where there are too few."""
        key = (row.program, shape, count, ends)
        if key not in self._splits:
            in_order = program_of(row.program, row.zero_stage)[0].fills_stages
            self._splits[key] = stages_of(in_order, shape.profile(), count, ends)
        stages = self._splits[key]
        return stages, "fewer layers than pipeline stages" if count > 1 and not stages else ""

    def _measured(
        self,
        row: StepRow,
        shape: TransformerShape,
        profile: ModelProfile,
        cluster: Cluster,
        plans: tuple[Plan, ...],
        marks: list[str],
    ) -> tuple[Case | None, str]:
        """Return the case with what the row measured; the reason where it measured nothing that can be scored."""
        precision, batch = plans[0].precision, plans[0].batch_samples
        counted = replace(shape, flash=True, window=0, text_tokens=0).profile()  # conventions know no masks
        peak = cluster.device.peak_flops.get(precision, float("nan"))
        excluded = time_excluded(row)
        seconds, reason = step_seconds(row, counted, batch, peak, marks) if row.status == "ok" else (None, row.status)
        if seconds and not excluded:
            reason = impossible(shape, batch, cluster.devices, seconds, peak)
            seconds = None if reason else seconds
        memory = row.measured_memory_gib * 2**30 if row.measured_memory_gib and row.status == "ok" else None
        if row.status == "ok" and memory is None and (seconds is None or excluded):
            return None, excluded or reason
        case = Case(
            row=row,
            profile=profile,
            cluster=cluster,
            plans=plans,
            sequence_parallel=row.sp != 0,
            marks=(),
            flops_per_step=batch * flops_per_sample(counted, NULL_CONVENTION),
            step_seconds=None if excluded else seconds,
            time_excluded=excluded or reason,
            memory_bytes=memory,
            memory_kind=memory_kind(row, marks) if memory else "device",
        )
        return replace(case, marks=tuple(dict.fromkeys(marks))), ""
