"""A training loop on one rank, held against one device step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.errors import ConfigError, PacelineError
from paceline.run.loop.step import CLIP_EPS
from paceline.run.process.world import World
from paceline.spec.plan import Plan
from paceline.spec.proof.records import FirstDifference
from paceline.task.models.held import whole_of
from paceline.verify.compare.difference import Difference, wide
from paceline.verify.compare.measures import number_differences, tensor_differences
from paceline.verify.loops.gradients import GradientsTaken
from paceline.verify.loops.mistakes import FITS, SAY_SO, MicroBatches, named_loss, named_mistake, sampled
from paceline.verify.loops.reference import Batches, LoopReference, weights_of
from paceline.verify.loops.unwrapped import inner_of, named, not_called
from paceline.verify.reference.steps import ReferenceStep
from paceline.verify.rounding.conditioning import beyond_tolerance

Found = TypeVar("Found")
OBJECTIVE = (
    "the objective fails on one device",
    "given the model's copy and a batch on the CPU, it",
    "objective(model, batch) that returns the loss as a sum, and how many items it counts",
)
UPDATES = (
    "the update fails on one device",
    "what optimizer= has made of the parameters of the model's copy",
    "optimizer=, which makes of the parameters that it is given what the loop updates its own with",
)


BUFFERS = (
    "buffer {name} is not one device's when step {step} begins: ranks move it by their own rows, or the step moves it"
    " beside the forward pass, of which one device knows nothing. A value that the step itself keeps belongs outside of"
    " the model, where the objective reads it"
)
HOOKS = (
    "{name} has a hook (register_hook) that its copy on one device lacks, and so has other gradients there: where it"
    " belongs to the model, such as a mask, plain=module, whose parameters have it; one of the loop, such as a division"
    " by the number of ranks, may be what is wrong"
)


CLIPPED_EACH = "the gradient of every parameter is one device's, times a number of its own below one"


class HeldLoop:
    """A loop on one of its ranks, held against one device step by step; `mistake` is what it does wrong, on rank 0."""

    def __init__(
        self,
        model: nn.Module,
        weights: dict[str, nn.Parameter],
        world: World,
        plan: Plan,
        reference: LoopReference,
        updates: bool,
    ) -> None:
        self._model = model
        self.reference, self._gradients = reference, GradientsTaken(weights)
        self.mistake: str | None = None
        self._weights, self._world, self._plan, self._updates = weights, world, plan, updates
        self._start = weights_of(reference.module)
        self._frozen = frozenset(name for name, weight in weights.items() if not weight.requires_grad)
        self._parts: MicroBatches | None = None  # of the step that has begun, on rank 0
        self._last_seen: torch.Tensor | None = None
        self._buffers_apart: dict[int, str] = {}  # by the step that begins so, on rank 0

    def against(self, number: int, step: Callable[[], object], together: Batches) -> list[Difference]:
        """Make a step of the loop and return how far it is from one device's, in order of cause. Every rank calls it.

        `together` are the step's micro-batches of all parts, on rank 0.
        """
        self._begin(number, together)
        with self._gradients.during():
            told = step()
        world, layout = self._world, self._plan.layout
        gradients = self._gradients.of_step(number)
        whole = {name: whole_of(gradient) for name, gradient in gradients.items()}
        seen = sampled(whole, named(self.reference.module))
        frozen = self._frozen_now(number)
        expected = world.share(self._on_first(lambda: self.reference.finish(frozen), *UPDATES))
        reported = loss_told(told)
        mistake = None
        if self._parts is not None and self.mistake is None and not frozen:
            plain = seen / clipped_to(expected)
            mistake = _mistake(plain, self._last_seen, reported, expected.loss, self._parts, self._plan.precision)
        self._last_seen = seen
        losses = list[Difference]()
        if any(each is not None for each in world.gather(reported)):  # a loop may tell it on rank 0 alone
            ours = expected.loss if reported is None else reported
            losses = number_differences({"loss": ours}, {"loss": expected.loss}, number, world, expected.reach)
        found = tensor_differences("gradients", gradients, expected.gradients, number, world, layout)
        if not self._updates:
            self.mistake = self.mistake or mistake
            load_weights(self.reference.module, self._weights)
            return losses + found
        after = {name: weight for name, weight in self._weights.items() if name in self._start}
        weights = tensor_differences("weights", after, expected.weights, number, world, layout, self._start)
        apart = any(not each.copies_agree for each in beyond_tolerance(found, self._plan.precision))
        if apart and layout.dp_shard == 1 and self._is_right([*losses, *weights]):
            # Those who share out an update reduce gradients in it, as a sum or as a mean: until then each has its own.
            summed = self._summed(gradients, expected.gradients)
            for divisor in (world.size, 1):
                reduced = {name: gradient / divisor for name, gradient in summed.items()}
                of_all = tensor_differences("gradients", reduced, expected.gradients, number, world, layout)
                if self._is_right(of_all):
                    found, mistake = of_all, None
        wrong = beyond_tolerance(found, self._plan.precision)
        if len(wrong) > 1 and not mistake and all(d.is_scaled and d.ratio < 1 and d.copies_agree for d in wrong):
            mistake = f"{CLIPPED_EACH}: {SAY_SO}"
        self.mistake = self.mistake or mistake
        return losses + found + weights

    def _is_right(self, found: Iterable[Difference]) -> bool:
        return not beyond_tolerance(found, self._plan.precision)

    def _summed(
        self, gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the sum over all ranks of gradients that are whole on each. Every rank calls it."""
        found = {}
        for name, known in expected.items():
            total = wide(gradients.get(name, torch.zeros_like(known))).to(self._world.device).contiguous()
            self._world.add_up(total)
            found[name] = torch.view_as_complex(total) if known.is_complex() else total
        return found

    def mistake_of(self, first: FirstDifference) -> str | None:
        """Return what the loop does wrong where it first differs, on rank 0; None where nothing known explains it."""
        name = self._buffers_apart.get(first.step) if first.quantity == "loss" else None
        if first.quantity == "gradients" and (hooked := _hooked(self._weights, self.reference.module)):
            hooks = HOOKS.format(name=hooked)
            return f"{self.mistake}; or {hooks}" if self.mistake else hooks
        return self.mistake or (BUFFERS.format(name=name, step=first.step) if name else None)

    def _begin(self, number: int, together: Batches) -> None:
        """Compute the gradients of one device, on rank 0, before the loop makes its step."""
        if self._world.is_first and (apart := buffers_apart(self._model, self.reference.module)):
            self._buffers_apart[number] = apart[0]
        with not_called(self._model):
            self._parts = self._on_first(lambda: self.reference.begin(together, self._plan.precision), *OBJECTIVE)

    def _on_first(self, compute: Callable[[], Found], *told: str) -> Found | None:
        """Return what rank 0 computes, there, and None elsewhere. Every rank calls it.

        Every rank raises what rank 0 raises: none waits for one that is gone.
        """
        found, failed, cause = None, None, None
        if self._world.is_first:
            try:
                found = compute()
            except Exception as error:  # whatever the user's objective or optimizer raises
                failed, cause = _as_told(error, *told), error
        failed = self._world.share(failed)
        if failed is not None:
            raise failed from cause
        return found

    def _frozen_now(self, number: int) -> frozenset[str]:
        """Return what the loop has frozen since the start, as loops do in turn.

        Raises ConfigError for what was frozen then and is trained now: the reference's optimizer has no such weight.
        """
        frozen = frozenset(name for name, weight in self._weights.items() if not weight.requires_grad)
        if thawed := sorted(self._frozen - frozen):
            raise ConfigError(
                f"parameter {thawed[0]} is trained in step {number}, and was frozen when the proof began",
                "one device's optimizer is made of what is trained at the start",
                "requires_grad = True for all that any step trains, before verify_loop; the step may freeze it again",
            )
        return frozen - self._frozen


def _as_told(error: Exception, what: str, where: str, advice: str) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    return ConfigError(what, f"{where} raises {type(error).__name__}: {error}", advice)


def loss_told(told: object) -> float | None:
    """Return the loss that a step returned: a number, a tensor of one, or either under "loss"; None where it has none.

    Raises ConfigError for anything else.
    """
    found = told["loss"] if isinstance(told, Mapping) and "loss" in told else told
    try:
        found = found.detach() if isinstance(found, torch.Tensor) else found
        return None if found is None else float(found)  # type: ignore[arg-type]  # what it is shows here
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"the step returned {type(told).__name__}, which is no loss",
            "what it returns is compared with one device's loss per item",
            "the loss per item over all ranks, or None to leave it out",
        ) from None


def _hooked(weights: Mapping[str, nn.Parameter], single: nn.Module) -> str:
    """Return the name of a parameter that has a hook on its gradient, and has none in the reference; "" where none."""
    known = named(single)
    return next(
        (name for name, weight in weights.items() if weight._backward_hooks and not known[name]._backward_hooks), ""
    )


def buffers_apart(model: nn.Module, other: nn.Module) -> list[str]:
    """Return the names of buffers that have other values in two modules, of those that both have whole."""
    known = dict(other.named_buffers())
    both = [(name, held, known[name]) for name, held in inner_of(model).named_buffers() if name in known]
    return [
        name
        for name, ours, theirs in both
        if not isinstance(ours, DTensor)
        and (ours.shape != theirs.shape or not torch.allclose(ours.cpu().to(theirs.dtype), theirs, equal_nan=True))
    ]


@torch.no_grad()
def load_weights(single: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Copy the model's weights into the reference's module. Every rank calls it."""
    held = named(single)
    if set(held) != set(weights):
        odd = sorted(set(held) ^ set(weights))[0]
        raise ConfigError(
            f"parameter {odd} is only in one of the model and its plain copy",
            "they are compared by name",
            "plain=module with the parameter names of the model",
        )
    for name, parameter in weights.items():
        held[name].copy_(whole_of(parameter))


def require_whole_weights(single: nn.Module, weights: Mapping[str, nn.Parameter], world: World) -> None:
    """Raise ConfigError on every rank where one of them holds another shape of a weight than one device does."""
    held = named(single)
    odd = [
        (name, list(parameter.shape), list(held[name].shape))
        for name, parameter in weights.items()
        if name in held and parameter.shape != held[name].shape
    ]
    for rank, found in enumerate(world.gather(odd[:1])):
        for name, ours, whole in found:
            raise ConfigError(
                f"parameter {name} has the shape {ours} on rank {rank}, and {whole} on one device",
                "a rank holds a part of it, and nothing says which one: FullyShardedDataParallel keeps flat parts, and"
                " so may experts or columns that a program has spread by hand",
                "DTensors, which say so: torch.distributed.fsdp.fully_shard, or distribute_tensor for what is spread by"
                " hand; plain=module, if its shapes are not those of the model",
            )


def clipped_to(expected: ReferenceStep) -> float:
    """Return the factor by which one device has clipped a step's gradients; 1.0 where it has not."""
    if not expected.clip_norm:
        return 1.0
    return min(1.0, expected.clip_norm / (expected.grad_norm + CLIP_EPS))


def _mistake(
    seen: torch.Tensor, before: torch.Tensor | None, told: float | None, loss: float, parts: MicroBatches, dtype: str
) -> str | None:
    """Return the mistake that this step shows, None where it is right or nothing known explains it."""
    named = named_mistake(seen, before, parts, dtype)
    if named == "" and told is not None and not math.isclose(told, loss, rel_tol=FITS[dtype]):
        return named_loss(told, parts, dtype)
    return named or None
