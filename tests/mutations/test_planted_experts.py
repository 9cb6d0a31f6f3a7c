"""Mistakes that others made with experts, planted into the running system: the proof catches each and names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed import run_ranks
from tests_shared import SEQ_LEN, VOCAB, decoder_task, plan_of
from torch.distributed.tensor import DTensor

from paceline.plan.layout import Layout
from paceline.run import routing
from paceline.run.parallel.data import ShardedGradients
from paceline.run.parallel.expert import AllToAll
from paceline.run.routing import RouterWatch
from paceline.run.step import Stepper
from paceline.run.world import join_world
from paceline.task.task import ModelSpec
from paceline.verify.compare import compare

Patch = pytest.MonkeyPatch


def scaled_expert_gradients(patch: Patch) -> None:
    finish = ShardedGradients.finish

    def divided(self: ShardedGradients) -> None:
        finish(self)
        for name, parameter in self._model.named_parameters():
            if ".experts." in name and isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().div_(2)  # by the data-parallel degree of the dense weights

    patch.setattr(ShardedGradients, "finish", divided)


def norm_of_the_dense_group(patch: Patch) -> None:
    copies = Stepper._copies_of

    def wrong(self: Stepper, parameter: torch.Tensor) -> int:
        return copies(self, parameter) * (self.plan.layout.ep if parameter.dim() == 3 else 1)

    patch.setattr(Stepper, "_copies_of", wrong)


def counts_doubled(patch: Patch) -> None:
    collect = RouterWatch.collect

    def twice(self: RouterWatch) -> None:
        collect(self)
        collect(self)

    patch.setattr(RouterWatch, "collect", twice)


def bias_of_one_ranks_load(patch: Patch) -> None:
    take = RouterWatch.take
    original = routing.bias_step
    local: list[torch.Tensor] = []

    def taken(self: RouterWatch) -> list[float]:
        mine = take(self)
        local[:] = list(torch.tensor(mine).view(len(self._routers), -1)[:, :-2])
        return mine

    patch.setattr(RouterWatch, "take", taken)
    patch.setattr(routing, "bias_step", lambda bias, counts, rate: original(bias, local.pop(0), rate))


def rows_in_the_senders_order(patch: Patch) -> None:
    dispatch = AllToAll.dispatch

    def unsorted(self: AllToAll, rows: torch.Tensor, counts: torch.Tensor) -> Any:
        received, held, (order, *sizes) = dispatch(self, rows, counts)
        return received[order], held, (torch.arange(len(order)), *sizes)

    patch.setattr(AllToAll, "dispatch", unsorted)


PLANTED: list[tuple[Callable[[Patch], None], str, str, str]] = [
    (scaled_expert_gradients, "gradients", "layers.0.mlp.experts", ""),
    (norm_of_the_dense_group, "grad_norm", "grad_norm", "gradient norm"),
    (counts_doubled, "router", "layers.0.mlp.gate", "router statistics"),
    (bias_of_one_ranks_load, "buffers", "e_score_correction_bias", "router statistics"),
    (rows_in_the_senders_order, "router", "layers.1.mlp.gate", "router statistics"),
]


def prove_all() -> list[dict[str, Any]]:
    """Return the proofs with each mistake planted, and the last one with none. Every rank calls it."""
    world = join_world("cpu", threads=1)
    model = ModelSpec("moe-2m", hidden=16, layers=2, heads=2, kv_heads=1, ffn=8, experts=4, vocab=VOCAB, balance="bias")
    task = decoder_task(model=model)
    plan = plan_of(Layout(dp_shard=2, ep=2), batch=7)
    proofs = []
    for plant in [*(plant for plant, *_ in PLANTED), lambda patch: None]:
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            proofs.append(compare(task, plan, world, task.data, SEQ_LEN, 2))
    return proofs


def test_planted_mistakes_with_experts_are_caught_and_named() -> None:
    *planted, control = run_ranks(prove_all, 2)[0]
    assert control["equal"], control["first_difference"]
    for (plant, quantity, tensor, family), proof in zip(PLANTED, planted, strict=True):
        first = proof["first_difference"]
        assert first is not None, plant.__name__
        assert (first["quantity"], tensor in first["name"]) == (quantity, True), (plant.__name__, first)
        assert family in first["family"], (plant.__name__, first)
