"""What communication costs a training step on CPUs beyond its collectives: of a sharded unit, and between layers.

Collectives by themselves are timed between products of plain torch (collectives.py). In a training step more is paid
for each: hooks of FSDP2 run in Python, parts are copied together and apart, autograd waits, and the threads that move
bytes share the cores with those that compute, while the next layer is already on its way. None of it follows from a
rate, and all of it follows the processor. So the step of a small model is timed three ways, in turns: as it is, with
every layer a unit of FSDP2, and with a gather before and a reduce-scatter after every layer. Some of what a unit adds
is there however little it computes, so the first two are timed on a few tokens as well, and there also a pass that
keeps its gradients, as all micro-batches but the last do where gradients are reduced once a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.cluster.probe.block import FEW_TOKENS, build_block
from paceline.cluster.probe.records import StepTimes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from paceline.cluster.probe.rank import Rank

LAYERS, HIDDEN, FFN, HEADS, SEQUENCE = 4, 128, 384, 4, 128
# In each pass; of steps on a few tokens, which take some milliseconds and of which a part is looked for, more.
ROUNDS, SHORT_ROUNDS, TRIAL_ROUNDS = 5, 15, 2
KEPT_PASSES = 3
MOVES = 4  # of a layer: a gather and a reduce-scatter in each pass
# Products of this width between two collectives: some milliseconds of one thread, as between two layers of a step.
WORK_WIDTH, WORK_PRODUCTS = 256, 12


def computing() -> Callable[[], None]:
    """Return what a rank computes before each collective that a probe times."""
    import torch

    square = torch.ones(WORK_WIDTH, WORK_WIDTH)

    def work() -> None:
        for _ in range(WORK_PRODUCTS):
            torch.mm(square, square)

    return work


def step_times(rank: Rank) -> StepTimes | None:
    """Return the seconds of a forward and backward pass plain, sharded, and with collectives between layers.

    None of accelerators, which have queues of their own for collectives, and of a rank without peers.
    """
    import torch

    if rank.kind != "cpu" or rank.ranks == 1:
        return None
    rows = 2 * rank.ranks
    inputs = torch.randn(rows, SEQUENCE, HIDDEN)
    plain = build_block(HIDDEN, FFN, HEADS, LAYERS, rank.device)
    sharded, moved = _shards(rank), _with_moves(rank)
    few, keeping = inputs[:1, :FEW_TOKENS].contiguous(), _shards(rank, gathers_again=False)
    calls = {
        "plain": _step(plain, inputs),
        "sharded": _step(sharded, inputs),
        "moved": _step(moved, inputs[:: rank.ranks].contiguous()),
        "work": computing(),
    }
    short = {
        "plain": _step(plain, few),
        "sharded": _step(sharded, few),
        "once": _step(keeping, few),
        "kept": _step(keeping, few, KEPT_PASSES),
    }
    took = _medians(rank, calls, ROUNDS)
    briefly = _medians(rank, short, SHORT_ROUNDS)
    parameters = sum(parameter.numel() for parameter in plain.parameters())
    return {
        "plain_seconds": took["plain"],
        "sharded_seconds": took["sharded"],
        "moved_seconds": took["moved"],
        "work_seconds": took["work"],
        "few_plain_seconds": briefly["plain"],
        "few_sharded_seconds": briefly["sharded"],
        "few_kept_seconds": (briefly["kept"] - briefly["once"]) / KEPT_PASSES,
        "units": LAYERS,
        "unit_bytes": 4 * parameters // LAYERS,
        "moves": MOVES * LAYERS,
        "move_bytes": inputs.numel() * 4,
    }


def _medians(rank: Rank, calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call; all take turns, so that what else runs here hits all alike."""
    samples = rank.samples_in_turns(list(calls.values()), TRIAL_ROUNDS if rank.trial else rounds, meets=True)
    return {name: statistics.median(passed) for name, (passed, _) in zip(calls, samples, strict=True)}


def _step(model: nn.Module, inputs: torch.Tensor, kept: int = 0) -> Callable[[], None]:
    """Return a step: `kept` passes that keep gradients and gathered weights, then one whose gradients are reduced."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        for number in range(kept + 1):
            if kept:
                _reduce(model, number == kept)
            model(inputs).square().mean().backward()

    return step


def _reduce(model: nn.Module, reduces: bool) -> None:
    """Let the next pass reduce its gradients and let go of whole weights, or keep both."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(reduces)
    model.set_reshard_after_backward(reduces)


def _shards(rank: Rank, *, gathers_again: bool = True) -> nn.Module:
    """Return the model with every layer a unit of FSDP2, gradients summed as a run sums.

    Weights are gathered in both passes, or in the forward pass alone.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, rank.kind)
    model = build_block(HIDDEN, FFN, HEADS, LAYERS, rank.device)
    for unit in (*model.children(), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=gathers_again and unit is not model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def _with_moves(rank: Rank) -> nn.Module:
    """Return the model with the rows of all ranks gathered before every layer, and summed and scattered after it."""
    import torch
    import torch.distributed as dist
    from torch import nn

    def gather(part: torch.Tensor) -> torch.Tensor:
        whole = part.new_empty(rank.ranks * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous())
        return whole

    def scatter(whole: torch.Tensor) -> torch.Tensor:
        part = whole.new_empty(whole.shape[0] // rank.ranks, *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole.contiguous())
        return part

    class Crossing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor, gathers: bool) -> torch.Tensor:
            ctx.gathers = gathers
            return gather(rows) if gathers else scatter(rows)

        @staticmethod
        def backward(ctx: Any, by_rows: torch.Tensor) -> tuple[torch.Tensor, None]:
            return scatter(by_rows) if ctx.gathers else gather(by_rows), None

    class Moving(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, part: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = Crossing.apply(self.layer(Crossing.apply(part, True)) / rank.ranks, False)
            return moved

    layers = build_block(HIDDEN, FFN, HEADS, LAYERS, rank.device).children()
    return nn.Sequential(*(Moving(layer) for layer in layers))
