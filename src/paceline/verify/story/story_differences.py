"""What of a run is held against one device: what a start restored, every step, and what the journal says of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.run.loop.loader import StepBatch
from paceline.run.loop.step import StepStats
from paceline.run.loop.training import Training
from paceline.run.process.world import World
from paceline.spec.journal.kinds import SelectionRecord
from paceline.spec.journal.reading import read_journal, read_kind
from paceline.spec.journal.records.decided import GLOBAL_BATCH
from paceline.task.models.unfilled import not_kept
from paceline.verify.compare.difference import Difference, together
from paceline.verify.compare.measures import (
    number_differences,
    sample_differences,
    tensor_differences,
    turn_differences,
)
from paceline.verify.compare.routing import measured_loads, measured_routing, told_differences
from paceline.verify.reference.passes import moments_of
from paceline.verify.story.evaluated import ITEMS, LOSS
from paceline.verify.story.plans import CANDIDATES, CHOSEN, Act
from paceline.verify.story.reference import Passed, evaluation_differences, growth_differences, in_the_journal

Tensors = dict[str, torch.Tensor]

NUMBERS = ("weight", "loss", "grad_norm", "lr")  # of a step; each has the same name in the journal


def restored_differences(training: Training, saved: Passed, act: Act) -> list[Difference]:
    """Return how far a start is, before its first step, from the device after the step that was saved."""
    position = {"position": float(training.progress.position)}
    step = {"position": float(training.progress.step)}
    return [
        *number_differences(position, {"position": float(act.position(act.begins))}, act.saved, act.world),
        *number_differences(step, {"position": float(act.saved)}, act.saved, act.world),
        *_state_differences(training, saved, act),
    ]


def step_differences(
    training: Training, batch: StepBatch, stats: StepStats, passed: Passed, act: Act, run_dir: Path
) -> list[Difference]:
    """Return how far a step that the run has just made is from the device's, in order of cause."""
    layout, world, number = act.plan.layout, act.world, passed.number
    # What the run was given, not what another reader of the same rule would be given.
    read = [(micro.position, micro.ids.tolist()) for micro in batch.micro_batches if micro.counts]
    first = act.position(number)
    told = {name: float(getattr(stats, name)) for name in NUMBERS}
    return [
        sample_differences(read, passed.step.ids, first, number, world, layout),
        *_selection(run_dir, passed, world),
        *together(measured_loads(stats.router, passed.step.router, number, layout), world),
        *number_differences(told, _numbers(passed), number, world, passed.step.reach),
        *_turns(stats.turns, passed, world),
        *together(measured_routing(stats.router, passed.step.routing, number), world),
        *_state_differences(training, passed, act),
    ]


def _selection(run_dir: Path, passed: Passed, world: World) -> list[Difference]:
    """Return how far the run's choice among the samples that it read is from the device's, by its own record of it.

    Of the places that either chose it is the part that the other did not.
    """
    chosen, number = passed.step.selected, passed.number
    if chosen is None:
        return []
    records = read_kind(run_dir, SelectionRecord) if world.is_first else []
    told = world.share(next(((r.chosen, r.loss) for r in records if r.step == number), None))
    mask, loss = told or ("0", None)
    bits = f"{int(mask, 16):0{4 * len(mask)}b}"
    ours, theirs = {at for at, bit in enumerate(bits) if bit == "1"}, set(chosen.places)
    apart = sorted(ours ^ theirs)
    first = float(apart[0]) if apart else 0.0
    share, ratio = len(apart) / len(ours | theirs), len(ours) / len(theirs)
    mean = number_differences(
        {CANDIDATES: math.nan if loss is None else loss}, {CANDIDATES: chosen.loss}, number, world
    )
    return [
        Difference("samples", CHOSEN, number, 0, share, ratio, first, first),
        *(dataclasses.replace(each, quantity="loss") for each in mean),
    ]


def _turns(told: Mapping[str, object], passed: Passed, world: World) -> list[Difference]:
    """Return how far the numbers of several objectives are from the device's."""
    quantities, expected = ("weight", "loss", "grad_norm"), passed.step.turns
    return [each for name in quantities for each in turn_differences(told, expected, passed.number, world, name)]


def journal_differences(run_dir: Path, passed: Passed, act: Act) -> list[Difference]:
    """Return how far the newest records of the journal are from the device's step: numbers, samples, evaluation."""
    world, number = act.world, passed.number
    newest: dict[str, dict[str, Any]] = {}
    if world.is_first:
        records = list(read_journal(run_dir))
        newest = {record["kind"]: record for record in records}
        of_batch = (record["evidence"] for record in records if record.get("what") == GLOBAL_BATCH)
        grown = (evidence for evidence in of_batch if evidence)
        newest[GLOBAL_BATCH] = next((each for each in grown if each.get("step") == number), {})
    newest = world.share({kind: newest.get(kind, {}) for kind in ("step", "evaluation", GLOBAL_BATCH)})
    step, evaluation = newest["step"], newest["evaluation"]
    told = {name: _number(step, name) for name in NUMBERS}
    turns = {name: SimpleNamespace(**turn) for name, turn in step.get("turns", {}).items()}
    apart = number_differences(told, _numbers(passed), number, world, passed.step.reach)
    apart += _turns(turns, passed, world)
    apart += growth_differences(newest[GLOBAL_BATCH], passed.growth, number, world)
    apart += told_differences(step.get("router") or {}, passed.step, number, world)
    found = [in_the_journal(difference) for difference in apart]
    if step.get("sample_ids") != passed.step.ids:
        apart_ids = Difference("samples", "ids", number, 0, 1.0, 1.0, math.nan, math.nan)
        found.append(in_the_journal(apart_ids))
    evaluated = {LOSS: _number(evaluation, "loss"), ITEMS: _number(evaluation, "weight")}
    evaluated |= {name: float(value) for name, value in (evaluation.get("metrics") or {}).items()}
    if evaluation.get("step") != number:
        evaluated = {}
    return [*found, *evaluation_differences(evaluated, passed.evaluation, number, world, passed.step.reach)]


def _numbers(passed: Passed) -> dict[str, float]:
    return {name: passed.rate if name == "lr" else getattr(passed.step, name) for name in NUMBERS}


def _number(record: dict[str, Any], name: str) -> float:
    """Return a number of a record, in which one that is not finite is spelt as text; NaN where there is none."""
    return float(record.get(name, math.nan))


def _state_differences(training: Training, passed: Passed, act: Act) -> list[Difference]:
    """Return how far weights, buffers and the optimizer's moments are from the device's."""
    model, step, where = training.model, passed.step, (passed.number, act.world, act.plan.layout)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves weights gathered; the run goes on with the shards
    ours, expected = _alike(moments_of(model, training.optimizer), step.moments, act.world)
    buffers, caches = dict(model.named_buffers()), _caches(model, step.buffers, act.world)
    known = {name: value for name, value in step.buffers.items() if name not in caches}
    return [
        *tensor_differences("weights", dict(model.named_parameters()), step.weights, *where, passed.start),
        *tensor_differences(
            "buffers", {n: b for n, b in buffers.items() if n not in caches}, known, *where, passed.start
        ),
        *tensor_differences("moments", ours, expected, *where),
    ]


def _caches(model: nn.Module, expected: Tensors, world: World) -> set[str]:
    """Return the buffers that no checkpoint holds and that are of another size here: tables that grow as needed.

    A start makes them anew, and what of them matters shows in the losses that follow.
    """
    held = dict(model.named_buffers())
    own = not_kept(model) if held else []
    return set(world.union(n for n in own if n in expected and held[n].shape != expected[n].shape))


def _alike(ours: Tensors, expected: Tensors, world: World) -> tuple[Tensors, Tensors]:
    """Return the moments that both optimizers know by the same names, as AdamW and SGD all of theirs.

    A rule may keep the books under names of its own, or quantised; what is lost of those shows in the next update. What
    the run's optimizer holds of weights that never got a gradient is none of the device's.
    """
    known = set().union(*world.gather({name.rpartition(".")[2] for name in ours}))
    compared = {
        name: value
        for name, value in expected.items()
        if value.is_floating_point() and name.rpartition(".")[2] in known
    }
    return {name: value for name, value in ours.items() if name in compared}, compared
