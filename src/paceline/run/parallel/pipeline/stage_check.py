"""Whether a user's model is the chain that it declares: stages in turn must give the gradients of the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.foreign_errors import is_of_machine
from paceline.plan.feasible.stages import stage_count
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.passes import AnyObjective, in_model_precision, sample_rows
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.parallel.pipeline.rng_state import random_state
from paceline.run.parallel.pipeline.split import Cut
from paceline.run.parallel.pipeline.stage_module import StageModule
from paceline.spec.plan import Plan
from paceline.task.models.chain import HandedOn

# In fp32, where the same sums in the same order give the same bits, but for sums of several gradients of one tensor,
# which come in another order; a capped logit is off by 1e-5.
RELATIVE = 1e-6
SMALL_GRADIENT = 1e-3  # of the largest: below, rounding of sums counts for more than RELATIVE


def check_chain(
    model: nn.Module,
    plan: Plan,
    objective: AnyObjective,
    micro: MicroBatch,
    device: torch.device,
    randomness: SampleRandomness,
) -> None:
    """Raise ConfigError where a model's stages in turn, on one micro-batch, do not give the model's loss and gradients.

    A forward pass may do more than hand hidden states from block to block: scale the embedding outside of it, add a
    skip connection around several blocks, or hand on a tensor without its gradient. Such a model would train without
    an error, and wrongly. Both run as in training: with dropout, of the same masks, and with modules in their modes.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    cut = Cut(model, plan)
    embeddings = dict(model.named_modules())
    try:
        with randomness.during(sample_rows(micro)):
            whole, _ = objective(model, in_model_precision(micro.data, plan))
        expected = _gradients(model, whole)
        _restore(buffers)
        # One after the other: the last one changes what an embedding does that the first one shares with it.
        modules = (
            StageModule(cut.stage(index), objective, plan, device, randomness, lambda data: data)
            for index in range(stage_count(plan))
        )
        try:
            chained = _chained(modules, micro, device)
        except ConfigError:  # which says itself what to do
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:  # of what is handed on
            if is_of_machine(error):  # a smaller micro-batch goes on, or another world
                raise
            raise _not_the_chain(model, f"{type(error).__name__}: {error}") from error
        found = _gradients_of(model)
    finally:
        _restore(buffers)
        model.zero_grad(set_to_none=True)
        for name in {shared.rpartition(".")[0] for shared in cut.shared}:
            embeddings[name].__dict__.pop("forward", None)  # what the last stage put there
    loss, expected_loss = float(chained.detach()), float(whole.detach())
    if not abs(loss - expected_loss) <= RELATIVE * abs(expected_loss):
        raise _not_the_chain(model, f"a loss of {loss:.6g}, the model {expected_loss:.6g}")
    floor = SMALL_GRADIENT * max((float(grad.norm()) for grad in expected.values()), default=0.0)
    for name, parameter in model.named_parameters():
        ours, theirs = (grads.get(name, torch.zeros_like(parameter)) for grads in (found, expected))
        size = max(float(theirs.norm()), floor)
        if not float((ours - theirs).norm()) <= 10 * RELATIVE * size:
            raise _not_the_chain(model, f"{name} a gradient of norm {float(ours.norm()):.6g}, the model "
                                 f"{float(theirs.norm()):.6g}")  # fmt: skip


def _chained(stages: Iterable[StageModule], micro: MicroBatch, device: torch.device) -> Any:
    """Return the loss of the stages in turn, and leave its gradients; losses that stages add on their way are in it."""
    made: list[tuple[Tensor | None, HandedOn]] = []  # (hidden states that came, what was handed on), by stage
    found: Any = None
    hidden: Tensor | None = None
    state: Tensor | None = None
    for stage in stages:
        found = stage.hand_on(micro, hidden, state)
        state = random_state(device)
        if isinstance(found, HandedOn):
            made.append((hidden, found))
            hidden = found.hidden.detach().requires_grad_(found.hidden.is_floating_point())  # as if it were sent
    total = found[0]
    if total.requires_grad:
        total.backward()
    for before, handed in reversed(made):
        grad = hidden.grad if hidden is not None else None
        outputs = [(handed.hidden, grad), (handed.added_loss, None)]
        reached = [(out, g) for out, g in outputs if out is not None and out.requires_grad]
        reached = [(out, g) for out, g in reached if g is not None or out is handed.added_loss]
        if reached:
            torch.autograd.backward([out for out, _ in reached], [g for _, g in reached])
        total = total + (0.0 if handed.added_loss is None else handed.added_loss.detach())
        hidden = before
    return total.detach()


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss, by parameter, and take them from the model."""
    if loss.requires_grad:
        loss.backward()
    found = _gradients_of(model)
    model.zero_grad(set_to_none=True)
    return found


def _gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


@torch.no_grad()
def _restore(buffers: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, kept in buffers:
        buffer.copy_(kept)


def _not_the_chain(model: nn.Module, told: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} is not the chain that its rules declare",
        f"its stages one after the other give {told}: its forward pass does more than hand hidden states from module "
        "to module",
        "move the rest into the modules of the chain, or pp = 1",
    )
