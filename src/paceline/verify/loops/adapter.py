"""The proof for a loop of your own, or another framework's: any `step(batch) -> loss`, under torchrun.

    def objective(model, batch):            # the loss as a sum, and how many items it counts
        tokens, labels = batch
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        return loss, (labels != -100).sum()

    result = paceline.verify_loop(step, ddp_model, my_batches, objective=objective, optimizer=torch.optim.AdamW)
    if not result.equal:
        raise SystemExit(result.text)

Every rank calls `verify_loop` with its own model, step and batches. Rank 0 takes the batches of all ranks together
through `objective` on one device; gradients must be those of the sum over all items divided by their number.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.config.called import argument, checked_call
from paceline.errors import ConfigError
from paceline.run.process.world import World, drain
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.spec.proof.records import LoopProof
from paceline.task.models.copied import copied
from paceline.verify.compare.diagnosis import traits_of
from paceline.verify.compare.difference import Difference
from paceline.verify.compare.layout import first_difference
from paceline.verify.compare.measures import tensor_differences
from paceline.verify.compare.tolerance import larger
from paceline.verify.loops.buffers import FAMILY as OF_A_RANK
from paceline.verify.loops.buffers import BuffersOfRanks
from paceline.verify.loops.compared_loop import HeldLoop, load_weights, require_whole_weights
from paceline.verify.loops.hooks import WeightHooks
from paceline.verify.loops.pieces import AnyObjective, require_different
from paceline.verify.loops.reference import Batches, LoopReference, Maker, weights_of
from paceline.verify.loops.unwrapped import inner_of, named
from paceline.verify.loops.waiting_ranks import told_where_ranks_wait
from paceline.verify.reached.causes import NO_SUM
from paceline.verify.rounding.conditioning import beyond_rounding, beyond_tolerance
from paceline.verify.rounding.verdict import ILL_CONDITIONED, loop_text, verdict_of

LoopStep = Callable[[Any], Any]
COMPARED = ("loss", "gradients", "weights")
NAMED = (NO_SUM.family, OF_A_RANK)  # which say by themselves what is wrong
DTYPES = {torch.float32: "fp32", torch.float64: "fp64"}


MODULE = {"named_parameters __call__": "a torch.nn.Module"}


@checked_call(
    step=argument("object", called=True), model=argument("object", objects=MODULE),
    batches=argument("object", objects={"__len__ __getitem__": "a list of batches"}),
    plain=argument("object", optional=True, objects=MODULE), objective=argument("object", called=True),
    optimizer=argument("object", optional=True, called=True), split=argument("object", optional=True, called=True),
    clip_norm=argument("number", minimum=0.0), part=argument("whole", optional=True, minimum=0),
)  # fmt: skip
def verify_loop(
    step: LoopStep,
    model: nn.Module,
    batches: Sequence[object],
    *,
    objective: AnyObjective,
    plain: nn.Module | None = None,
    optimizer: Maker | None = None,
    clip_norm: float = 0.0,
    part: int | None = None,
    split: Callable[[object], Sequence[object]] | None = None,
) -> LoopProof:
    """Run `step` on each batch and return whether it computes what one device does, on every rank alike.

    Where its `verdict` is "ill-conditioned", what misses a tolerance is no farther off than rounding moves one device
    (conditioning.py): `equal` is None in fp32, and fp64 can tell. `mistake` says in words what the loop does instead,
    where a known mistake explains its gradient or the loss that it reports; `text` says all of it in a line.

    - `step(batch)` makes one update of `model` and returns the loss per item over all ranks, or None to leave it out.
      Gradients are those that an optimizer of torch's takes; where none updates the model's own parameters, the step
      must leave them as it used them: `zero_grad` belongs at its beginning then.
    - `batches` are this rank's own, one per step. Ranks that read the same ones (of one tensor-parallel group) say so
      by an equal `part`; by default every rank is a part of its own.
    - `objective(model, batch)` returns the loss as a sum and the number of items it counts.
    - `split(batch)` returns the micro-batches of a batch, where the loop takes it in several.
    - `plain` is a module of the same parameter names for rank 0 to compute on; by default a copy of the model without
      wrappers, which a sharded model cannot give. It gets the model's weights.
    - `optimizer` makes the reference's optimizer, or a tuple of optimizers and of schedules of their rates, which step
      in this order; how far weights have moved since the start is then compared too. Without it only losses and
      gradients are, each step from the model's own weights. `clip_norm` clips the reference's gradients.

    Where rows see each other, as in contrast with gathered negatives, `objective.coupled = "batch"` has one device take
    the rows of all ranks in one piece. Parameters may be plain or DTensors, in fp32 or fp64. Dropout must be off: its
    masks differ by rank. Raises ConfigError for what cannot be compared, and VerificationFailed, on every rank, where
    all ranks wait for each other for ever (processes of one machine that compute on its CPU, Linux).
    """
    world = _world(model)
    with told_where_ranks_wait(world):
        proven = _proven(step, model, batches, objective, plain, optimizer, clip_norm, part, split, world)
    return dataclasses.replace(proven, text=loop_text(proven))


def _proven(
    step: LoopStep,
    model: nn.Module,
    batches: Sequence[object],
    objective: AnyObjective,
    plain: nn.Module | None,
    optimizer: Maker | None,
    clip_norm: float,
    part: int | None,
    split: Callable[[object], Sequence[object]] | None,
    world: World,
) -> LoopProof:
    """Run the loop beside one device and return what `verify_loop` does, without its text."""
    began, weights = time.perf_counter(), named(model)
    dtype = _dtype(weights)
    plan = Plan(_layout(weights, world), precision=dtype)
    single = _single(model, plain)
    require_whole_weights(single, weights, world)
    load_weights(single, weights)
    start = tensor_differences("initial", weights, world.share(weights_of(single)), 0, world, plan.layout)
    _require_batches(batches)
    traits = traits_of(single)
    hooks = WeightHooks({} if plain is None else named(plain))
    reference = LoopReference(single, objective, optimizer, clip_norm, hooks)
    held = HeldLoop(model, weights, world, plan, reference, optimizer is not None)
    buffers = BuffersOfRanks(model, world)
    found = list[Difference]()
    for number, batch in enumerate(batches, start=1):
        together = _batches(batch, part, world, number)
        found += held.against(number, functools.partial(step, batch), _cut(together, split, world))
    wrong, rounding = beyond_rounding(found, dtype, held.reference.again() if world.is_first else None, world)
    if wrong and (apart := beyond_tolerance(start, dtype)):  # a loop that brings weights together first is right
        wrong, found = [*apart, *wrong], [*start, *found]
    first = first_difference(wrong, found, plan, traits) or world.share(held.reference.not_a_sum)
    first = first or buffers.apart(dtype, len(batches))
    verdict = verdict_of(first, rounding)
    return LoopProof(
        # No loop can be run in another precision from here: whether it is right where fp32 cannot tell stays open.
        equal=None if verdict == ILL_CONDITIONED and dtype != "fp64" else first is None,
        verdict=verdict,
        dtype=dtype,
        steps=len(batches),
        seconds=time.perf_counter() - began,
        differences=_largest(d for d in found if d.quantity in COMPARED),
        first_difference=first,
        ill_conditioned=rounding,
        mistake=None if first is None else world.share(None if first.family in NAMED else held.mistake_of(first)),
    )


def _require_batches(batches: Sequence[object]) -> None:
    if not len(batches):
        raise ConfigError(
            "there is no batch to prove the loop with", "of no step every loop is right", "one for each step"
        )


def _cut(parts: list[object], split: Callable[[object], Sequence[object]] | None, world: World) -> Batches:
    """Return the micro-batches of every part on rank 0, which alone computes them."""
    return [split(each) if split else [each] for each in parts] if world.is_first else []


def _largest(found: Iterable[Difference]) -> dict[str, float | None]:
    """Return the largest difference of each quantity, None for one that was not compared."""
    worst: dict[str, float | None] = dict.fromkeys(COMPARED)
    for difference in found:
        known = worst[difference.quantity]
        worst[difference.quantity] = difference.relative if known is None else larger(known, difference.relative)
    return worst


def _world(model: nn.Module) -> World:
    device = next(iter(model.parameters())).device
    if not dist.is_initialized():
        return World(0, 1, 0, device)
    atexit.unregister(drain)
    atexit.register(drain)  # the group is the script's own: it may leave it, or leave it to the end
    return World(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), device)


def _dtype(weights: Mapping[str, nn.Parameter]) -> str:
    numbers = [p.dtype for p in weights.values() if p.is_floating_point() or p.is_complex()]
    dtypes = {dtype.to_real() for dtype in numbers}
    if len(dtypes) == 1 and (dtype := dtypes.copy().pop()) in DTYPES:
        return DTYPES[dtype]
    raise ConfigError(
        f"parameters in {', '.join(sorted(map(str, dtypes)))} cannot be compared",
        "coarser precisions need tolerances that hide mistakes",
        "model.double() or model.float() for the proof",
    )


def _layout(weights: Mapping[str, nn.Parameter], world: World) -> Layout:
    """Return a layout that says which ranks hold copies: all of them, or none where parameters are in shards."""
    sharded = any(isinstance(parameter, DTensor) for parameter in weights.values())
    return Layout(dp_shard=world.size) if sharded else Layout(dp_replicate=world.size)


def _single(model: nn.Module, plain: nn.Module | None) -> nn.Module:
    """Return the module for the reference, on the CPU."""
    if plain is not None:
        return copied(plain).to("cpu", dtype=next(iter(model.parameters())).dtype).train(model.training)
    inner = inner_of(model)
    if any(isinstance(parameter, DTensor) for parameter in inner.parameters()):
        raise ConfigError(
            "a sharded model cannot be copied to one device",
            "its parameters are DTensors",
            "plain=module, built like the model and not sharded",
        )
    return copied(inner).to("cpu")


def _batches(batch: Any, part: int | None, world: World, number: int) -> list[object]:
    """Return the batches of all parts, each once, in the order of the parts."""
    parts = world.gather((part, batch))
    if world.size > 1 and all(own is None for own, _ in parts):
        require_different([held for _, held in parts], number)
    parts = [(rank if own is None else own, held) for rank, (own, held) in enumerate(parts)]
    return [held for _, held in sorted(dict(parts).items())]
