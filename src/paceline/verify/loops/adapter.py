"""The proof for a loop of your own, or another framework's: any `step(batch) -> loss`, under torchrun.

    def objective(model, batch):            # the loss as a sum, and how many items it counts
        tokens, labels = batch
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
        return loss, (labels != -100).sum()

    result = paceline.verify_loop(step, ddp_model, my_batches, objective=objective, optimizer=torch.optim.AdamW)
    if not result["equal"]:
        raise SystemExit(result["mistake"])

Every rank calls `verify_loop` with its own model, step and batches. Rank 0 takes the batches of all ranks together
through `objective` on one device; gradients must be those of the sum over all items divided by their number.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError, VerificationFailed
from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.verify.compare.diagnosis import traits_of
from paceline.verify.compare.difference import Difference, number_differences, tensor_differences
from paceline.verify.compare.layout import first_difference
from paceline.verify.compare.tolerance import larger
from paceline.verify.loops.mistakes import FITS, MicroBatches, named_loss, named_mistake, sampled
from paceline.verify.rounding.conditioning import beyond_tolerance

Step = Callable[[Any], Any]
Objective = Callable[[nn.Module, Any], tuple[torch.Tensor, Any]]
PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # what DDP, torch.compile and FSDP1 put before names
DTYPES = {torch.float32: "fp32", torch.float64: "fp64"}


def verify_loop(
    step: Step,
    model: nn.Module,
    batches: Sequence[Any],
    *,
    objective: Objective,
    plain: nn.Module | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    clip_norm: float = 0.0,
    part: int | None = None,
    split: Callable[[Any], Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Run `step` on each batch and return whether it computes what one device does, on every rank alike.

    The result is {equal, dtype, steps, seconds, differences, first_difference, mistake}; `mistake` says in words what
    the loop does instead, where a known mistake explains its gradient or the loss that it reports.

    - `step(batch)` makes one update of `model` and returns the loss per item over all ranks, or None to leave it out.
      It must leave the gradients as it used them: `zero_grad` belongs at its beginning.
    - `batches` are this rank's own, one per step. Ranks that read the same ones (of one tensor-parallel group) say so
      by an equal `part`; by default every rank is a part of its own.
    - `objective(model, batch)` returns the loss as a sum and the number of items it counts.
    - `split(batch)` returns the micro-batches of a batch, where the loop takes it in several.
    - `plain` is a module of the same parameter names for rank 0 to compute on; by default a copy of the model without
      wrappers, which a sharded model cannot give. It gets the model's weights.
    - `optimizer` makes the reference's optimizer, and updated weights are compared. Without it only losses and
      gradients are, each step from the model's own weights. `clip_norm` clips the reference's gradients.

    Parameters may be plain or DTensors, in fp32 or fp64. Dropout must be off: its masks differ by rank. Raises
    ConfigError for what cannot be compared.
    """
    began = time.perf_counter()
    world, weights = _world(model), _named(model)
    dtype = _dtype(weights)
    plan = Plan(_layout(weights, world), precision=dtype)
    single = _single(model, plain)
    _load(single, weights)
    traits, ours = traits_of(single), list(dict.fromkeys(name for name, _ in single.named_parameters()))
    updates = optimizer([p for p in single.parameters() if p.requires_grad]) if optimizer else None
    found: list[Difference] = []
    mistake: str | None = None
    last_seen: torch.Tensor | None = None
    for number, batch in enumerate(batches, start=1):
        together = _batches(batch, part, world)
        told = step(batch)
        gradients = _gradients(weights, number)
        seen = sampled(
            {name: _whole(gradient) for name, gradient in gradients.items()}, dict(single.named_parameters())
        )
        expected, parts = None, MicroBatches()
        if world.is_first:
            cut = [split(batch) if split else [batch] for batch in together]
            expected, parts = _reference_step(single, objective, cut, updates, clip_norm)
        loss, expected_gradients, expected_weights = _from_first_rank(expected, world)
        if told is not None:
            found += number_differences({"loss": float(told)}, {"loss": loss}, number, world)
        found += tensor_differences("gradients", gradients, expected_gradients, number, world, plan.layout)
        if updates is not None:
            after = {name: weight for name, weight in weights.items() if name in ours}
            found += tensor_differences("weights", after, expected_weights, number, world, plan.layout)
        else:
            _load(single, weights)
        if world.is_first and mistake is None:
            mistake = _mistake(seen, last_seen, told, loss, parts, dtype)
        last_seen = seen
    worst: dict[str, float] = {"loss": math.nan, "gradients": math.nan, "weights": math.nan}
    for difference in found:
        known = worst[difference.quantity]
        worst[difference.quantity] = difference.relative if math.isnan(known) else larger(known, difference.relative)
    first = first_difference(beyond_tolerance(found, dtype), found, plan, traits)
    return {
        "equal": first is None,
        "dtype": dtype,
        "steps": len(batches),
        "seconds": time.perf_counter() - began,
        "differences": {name: None if math.isnan(value) else value for name, value in worst.items()},
        "first_difference": first,
        "mistake": None if first is None else _from_first_rank(mistake, world),
    }


def failure_of(result: Mapping[str, Any]) -> VerificationFailed:
    """Return the error for a step that is not equal to one device's."""
    first = result["first_difference"]
    return VerificationFailed(
        "the step does not compute the numbers of one device",
        f"{first['quantity']} of {first['name']} at step {first['step']} on rank {first['rank']} differs by"
        f" {first['relative']:.1e} (ratio {first['ratio']:.6g}); "
        + (f"likely cause: {result['mistake'] or first['likely']}"),
        "look at what first_difference names",
    )


def _world(model: nn.Module) -> World:
    device = next(iter(model.parameters())).device
    if not dist.is_initialized():
        return World(0, 1, 0, device)
    return World(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), device)


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names without what wrappers put before them."""
    named = {}
    for name, parameter in model.named_parameters():
        for prefix in PREFIXES:
            name = name.replace(prefix, "")
        named[name] = parameter
    return named


def _dtype(weights: Mapping[str, nn.Parameter]) -> str:
    dtypes = {parameter.dtype for parameter in weights.values()}
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
        return copy.deepcopy(plain).to("cpu", dtype=next(iter(model.parameters())).dtype).train(model.training)
    inner: nn.Module = model
    while wrapped := [child for name, child in inner.named_children() if f"{name}." in PREFIXES]:
        (inner,) = wrapped
    if any(isinstance(parameter, DTensor) for parameter in inner.parameters()):
        raise ConfigError(
            "a sharded model cannot be copied to one device",
            "its parameters are DTensors",
            "plain=module, built like the model and not sharded",
        )
    return copy.deepcopy(inner).to("cpu")


@torch.no_grad()
def _load(single: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Copy the model's weights into the reference's module. Every rank calls it."""
    held = dict(single.named_parameters())
    if set(held) != set(weights):
        odd = sorted(set(held) ^ set(weights))[0]
        raise ConfigError(
            f"parameter {odd} is only in one of the model and its plain copy",
            "they are compared by name",
            "plain=module with the parameter names of the model",
        )
    for name, parameter in weights.items():
        held[name].copy_(_whole(parameter))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be in shards in one piece. Every rank calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _batches(batch: Any, part: int | None, world: World) -> list[Any]:
    """Return the batches of all parts, each once, in the order of the parts."""
    parts = world.gather((world.rank if part is None else part, batch))
    return [held for _, held in sorted(dict(parts).items())]


def _gradients(weights: Mapping[str, nn.Parameter], number: int) -> dict[str, torch.Tensor]:
    gradients = {name: parameter.grad for name, parameter in weights.items() if parameter.grad is not None}
    if not gradients:
        raise ConfigError(
            f"no parameter has a gradient after step {number}",
            "the step sets them to None at its end",
            "optimizer.zero_grad() at the beginning of the step",
        )
    return gradients


def _reference_step(
    single: nn.Module,
    objective: Objective,
    batches: Sequence[Sequence[Any]],
    updates: torch.optim.Optimizer | None,
    clip_norm: float,
) -> tuple[tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]], MicroBatches]:
    """Return (loss per item, gradients, updated weights) of a step on all parts' micro-batches, and what each gave."""
    single.zero_grad(set_to_none=True)
    named, parts = dict(single.named_parameters()), MicroBatches()
    last = sampled({}, named)
    for rank, micro_batches in enumerate(batches):
        for batch in micro_batches:
            loss, weight = objective(single, _on_cpu(batch))
            loss.backward()
            now = sampled({name: p.grad for name, p in named.items() if p.grad is not None}, named)
            parts.losses.append(float(loss.detach()))
            parts.weights.append(float(weight))
            parts.ranks.append(rank)
            parts.gradients.append(now - last)
            last = now
    total = sum(parts.weights)
    trained = {name: p for name, p in named.items() if p.grad is not None}
    for parameter in trained.values():
        assert parameter.grad is not None
        parameter.grad /= total
    if clip_norm:
        nn.utils.clip_grad_norm_(list(trained.values()), clip_norm)
    gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    if updates is not None:
        updates.step()
    after = {name: p.detach().clone() for name, p in named.items()}
    return (sum(parts.losses) / total, gradients, after), parts


def _mistake(
    seen: torch.Tensor, before: torch.Tensor | None, told: Any, loss: float, parts: MicroBatches, dtype: str
) -> str | None:
    """Return the mistake that this step shows, None where it is right or nothing known explains it."""
    named = named_mistake(seen, before, parts, dtype)
    if named == "" and told is not None and not math.isclose(float(told), loss, rel_tol=FITS[dtype]):
        return named_loss(float(told), parts, dtype)
    return named or None


def _on_cpu(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, batch)


def _from_first_rank(item: Any, world: World) -> Any:
    """Return rank 0's item on every rank."""
    box = [item]
    if world.size > 1:
        dist.broadcast_object_list(box, src=0, device=world.device if world.device.type == "cuda" else None)
    return box[0]
