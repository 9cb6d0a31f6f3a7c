"""One pipeline stage as torch's schedules call it: by the number of a micro-batch, with what the stage before sent.

The batch itself is not sent around: every rank of a pipeline reads the same rows. What travels is hidden states, padded
to the step's largest micro-batch because torch's receive buffers have one shape; only the real rows are computed.
Random states travel too where the model draws any: a later stage goes on where the one before stopped, as one device
would. What the objective draws before it calls the model is drawn on every stage, alike.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.errors import ConfigError
from paceline.run.loop.loader import MicroBatch
from paceline.run.loop.passes import AnyObjective, in_model_precision, sample_rows
from paceline.run.numerics.precision import COMPUTE_DTYPES, MASTER_DTYPES, widen_outputs
from paceline.run.numerics.randomness.mode import SampleRandomness
from paceline.run.numerics.randomness.shares import SampleRows
from paceline.run.parallel.entry import call
from paceline.run.parallel.pipeline.rng_state import beside_random_state, random_state, restore_random_state
from paceline.run.parallel.pipeline.split import Stage
from paceline.spec.plan import Plan
from paceline.task.models.chain import HandedOn
from paceline.task.sums import as_sum


class _Ended(BaseException):
    """Ends an objective on a stage that is not the last, where the model has said what the next stage needs."""

    def __init__(self, handed_on: HandedOn) -> None:
        super().__init__()
        self.handed_on = handed_on


class _WithLoss(torch.autograd.Function):
    """Hidden states as they are. In the backward pass the loss that the stage adds gets its gradient too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return hidden.detach()  # the same numbers; torch detaches outputs in place, which a view forbids

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=ctx.device)


class StageModule(nn.Module):
    """Runs a stage on one micro-batch after the other and adds up what the last stage finds."""

    def __init__(
        self,
        stage: Stage,
        objective: AnyObjective,
        plan: Plan,
        device: torch.device,
        randomness: SampleRandomness,
        take_part: Callable[[Any], Any],
        after_forward: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__()
        self._after_forward = after_forward  # called for micro-batches that count: routers are watched here
        self.part = stage.module
        self._stage, self.objective, self._plan = stage, objective, plan
        self._device, self._randomness, self._take_part = device, randomness, take_part
        self._state: Tensor | None = None  # random state at the end of the stage before
        self._incoming: Tensor | None = None
        self._running, self._calls = False, 0
        parameters = inspect.signature(type(self.part).forward).parameters
        self._by_name = "inputs_embeds" in parameters  # a Hugging Face model takes hidden states beside tokens
        # First of all hooks: sharding must see the hidden states, whose gradients it waits for.
        self.part.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        if stage.is_last:
            widen_outputs(self.part, COMPUTE_DTYPES[plan.precision], MASTER_DTYPES[plan.precision])
        self.part.register_forward_hook(self._leave)
        self.begin((), 1.0, 0, relays=False)

    def begin(self, micro_batches: Sequence[MicroBatch], down: float, rows: int, relays: bool) -> None:
        """Prepare a step; `rows` are those of its largest micro-batch, `relays` says whether random numbers travel."""
        self._micro_batches, self._down, self._rows, self._relays = micro_batches, down, rows, relays
        self._backwards = 0
        self.loss_total: Any = 0.0  # of a stage before the last, what its own blocks add to the loss
        self.weight_total: Any = 0.0

    def forward(self, *received: Tensor, index: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run micro-batch `index`, int64 [1]; return the loss to go back from, or what the next stage needs.

        `received` is empty on the first stage, else hidden states [rows, ...] and, where they travel, random states.
        """
        micro = self._micro_batches[int(index)]
        rows = sample_rows(micro, lambda step: step)
        hidden = received[0][: rows_in(micro)] if received else None
        if hidden is not None and len(received) > 1:
            hidden = beside_random_state(hidden, received[1])
        with self._randomness.during(rows):
            found = self._run(micro, hidden, received[1] if len(received) > 1 else None)
        down = self._down if micro.counts else 0.0
        if isinstance(found, HandedOn):
            loss_sum, weight = found.added_loss, 0.0
            out = found.hidden if loss_sum is None else _WithLoss.apply(found.hidden, loss_sum * down)
            out = self._padded(out)
        else:
            loss_sum, weight = as_sum(found, self.objective)
            out = loss_sum * down
        if micro.counts:
            if loss_sum is not None:
                self.loss_total = self.loss_total + loss_sum.detach().double()
            self.weight_total = self.weight_total + weight
            if self._after_forward is not None:
                self._after_forward(self.part)
        if out.requires_grad:
            out.register_hook(functools.partial(self._before_backward, rows))
        return (out, random_state(self._device)) if self._relays and not self._stage.is_last else out

    def run(self, micro: MicroBatch, hidden: Tensor | None, state: Tensor | None = None) -> Any:
        """Run the stage's part of the objective: (loss sum, weight) on the last stage, else hidden states.

        `state` is the random state at the end of the stage before, where it matters.
        """
        found = self.hand_on(micro, hidden, state)
        return found.hidden if isinstance(found, HandedOn) else found

    def hand_on(self, micro: MicroBatch, hidden: Tensor | None, state: Tensor | None) -> Any:
        """Run the stage's part of the objective: (loss sum, weight) on the last stage, else all that it hands on."""
        with self._randomness.during(sample_rows(micro)):
            return self._run(micro, hidden, state)

    def _run(self, micro: MicroBatch, hidden: Tensor | None, state: Tensor | None) -> Any:
        self._incoming, self._running, self._calls, self._state = hidden, True, 0, state
        objective = self.objective if micro.objective is None else micro.objective
        try:
            return call(objective, self.part, self._take_part(in_model_precision(micro.data, self._plan)))
        except _Ended as ended:
            return ended.handed_on
        finally:
            self._incoming, self._running = None, False

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the hidden states in the place of the model's input."""
        if not self._running:
            refuse_call(module)
        self._calls += 1
        if self._calls > 1:
            raise ConfigError(
                "the objective calls the model more than once for a micro-batch",
                "in a pipeline the model's parts run on different devices, once each",
                "one call of the model on the whole batch, or pp = 1",
            )
        if self._state is not None:
            self._randomness.check()
            restore_random_state(self._state, self._device)
            self._randomness.went_on()
        if self._incoming is None:
            return None
        if self._by_name:
            rest = {name: value for name, value in kwargs.items() if name != "input_ids"}
            return args[1:], {**rest, "inputs_embeds": self._incoming}
        if args:
            return (self._incoming, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): self._incoming}

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stage.is_last:
            hidden = getattr(output, "logits", output)
            raise _Ended(output if isinstance(output, HandedOn) else HandedOn(hidden, None))

    def _padded(self, hidden: Tensor) -> Tensor:
        """Return hidden states with rows of zeros up to the largest micro-batch's."""
        missing = self._rows - hidden.shape[0]
        return torch.cat([hidden, hidden.new_zeros(missing, *hidden.shape[1:])]) if missing else hidden.contiguous()

    def _before_backward(self, rows: SampleRows, grad: Tensor) -> None:
        """Tell the stage's gradients of its next backward pass, and whose random numbers are drawn again in it."""
        self._randomness.turn_to(rows)
        self._backwards += 1
        assert self._stage.gradients is not None
        self._stage.gradients.before_micro_batch(last=self._backwards == len(self._micro_batches))


def refuse_call(module: nn.Module, *_: Any) -> None:
    """Raise ConfigError: the user called a model of which this rank holds some stages."""
    raise ConfigError(
        f"{type(module).__name__} was called outside of a step, and this rank has a part of it",
        "its other layers are on other pipeline stages",
        "run.evaluate() for the loss on held-out data, `paceline export` for the whole weights, or pp = 1",
    )


def rows_in(micro: MicroBatch) -> int:
    """Return the rows of a micro-batch: the first dimension of its tensors."""
    return next(leaf.shape[0] for leaf in tree_leaves(micro.data) if isinstance(leaf, Tensor) and leaf.dim())
