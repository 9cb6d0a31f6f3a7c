"""Mistakes that others made with mixtures of experts, each planted into the running system under one axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from planted import Patch, Planted
from torch.distributed.tensor import DTensor

from paceline.run.loop import routing
from paceline.run.loop.routing import RouterWatch
from paceline.run.loop.step import Stepper
from paceline.run.parallel import apply, tensor
from paceline.run.parallel.context import zigzag
from paceline.run.parallel.data.sharding import ShardedGradients
from paceline.run.parallel.data.unshared_experts import UnsharedExperts
from paceline.run.parallel.expert.all_to_all import AllToAll
from paceline.run.parallel.pipeline import stage_module
from paceline.run.process.world import World
from paceline.task.models.moe import MoEDecoder

# ---- the expert axis -------------------------------------------------------------------------------------------------


def scaled_expert_gradients(patch: Patch, world: World) -> None:
    finish = ShardedGradients.finish

    def divided(self: ShardedGradients) -> None:
        finish(self)
        for name, parameter in self._model.named_parameters():
            if ".experts." in name and isinstance(parameter.grad, DTensor):
                parameter.grad.to_local().div_(2)  # by the data-parallel degree of the dense weights

    patch.setattr(ShardedGradients, "finish", divided)
    hand_over = UnsharedExperts.hand_over

    def divided_alone(self: UnsharedExperts) -> None:
        hand_over(self)
        for weight in self._leaves:
            if isinstance(weight.grad, DTensor):
                weight.grad.to_local().div_(2)

    patch.setattr(UnsharedExperts, "hand_over", divided_alone)


def norm_of_the_dense_group(patch: Patch, world: World) -> None:
    copies = Stepper._copies_of

    def wrong(self: Stepper, parameter: torch.Tensor) -> int:
        return copies(self, parameter) * (self.plan.layout.ep if parameter.dim() >= 3 else 1)

    patch.setattr(Stepper, "_copies_of", wrong)


def counts_doubled(patch: Patch, world: World) -> None:
    collect = RouterWatch.collect

    def twice(self: RouterWatch, ran: torch.nn.Module) -> None:
        collect(self, ran)
        collect(self, ran)

    patch.setattr(RouterWatch, "collect", twice)


def bias_of_one_ranks_load(patch: Patch, world: World) -> None:
    take = RouterWatch.take
    original = routing.bias_step
    local: list[torch.Tensor] = []

    def taken(self: RouterWatch) -> torch.Tensor:
        mine = take(self)
        local[:] = list(mine.view(self.model.config.routed_layers, -1)[:, :-2])
        return mine

    patch.setattr(RouterWatch, "take", taken)
    patch.setattr(routing, "bias_step", lambda bias, counts, rate: original(bias, local.pop(0), rate))


def rows_in_the_senders_order(patch: Patch, world: World) -> None:
    dispatch = AllToAll.dispatch

    def unsorted(self: AllToAll, rows: torch.Tensor, counts: torch.Tensor) -> Any:
        received, held, (order, *sizes) = dispatch(self, rows, counts)
        return received[order], held, (torch.arange(len(order)), *sizes)

    patch.setattr(AllToAll, "dispatch", unsorted)


# ---- the other axes --------------------------------------------------------------------------------------------------


def router_gradient_of_one_tensor_rank(patch: Patch, world: World) -> None:
    split = tensor.split_layers

    def without(*args: Any, **rest: Any) -> list[str]:
        return [name for name in split(*args, **rest) if ".gate." not in name]

    patch.setattr(apply, "split_layers", without)


def balance_from_every_tensor_rank(patch: Patch, world: World) -> None:
    patch.setattr(tensor.Region, "once", lambda self, x: x)


def counted_by_every_tensor_rank(patch: Patch, world: World) -> None:
    finish = RouterWatch.finish

    def without_tp(self: RouterWatch, *args: Any) -> Any:
        alone = dataclasses.replace(self.plan, layout=dataclasses.replace(self.plan.layout, tp=1))
        return finish(dataclasses.replace(self, plan=alone), *args)

    patch.setattr(RouterWatch, "finish", without_tp)


def balance_of_the_last_stage_alone(patch: Patch, world: World) -> None:
    class Dropped:
        apply = staticmethod(lambda hidden, loss: hidden)

    patch.setattr(stage_module, "_WithLoss", Dropped)


def mean_over_a_stages_own_layers(patch: Patch, world: World) -> None:
    added = MoEDecoder._added_loss

    def of_the_stage(self: MoEDecoder, told: dict[int, Any], labels: torch.Tensor) -> torch.Tensor | None:
        found = added(self, told, labels)
        return None if found is None else found * self.config.routed_layers / len(told)

    patch.setattr(MoEDecoder, "_added_loss", of_the_stage)


def biases_by_the_place_in_a_stage(patch: Patch, world: World) -> None:
    by_place = routing.routers_by_place
    patch.setattr(routing, "routers_by_place", lambda model: dict(enumerate(by_place(model).values())))


def balance_of_each_ranks_part(patch: Patch, world: World) -> None:
    patch.setattr(apply, "balance_shared_sequences", lambda model, group: None)


def filling_is_routed_and_counted(patch: Patch, world: World) -> None:
    patch.setitem(zigzag.PADDING, "real", 1)


EXPERT_PROOFS = [
    Planted("expert gradients", "experts' gradients are divided by the degree of the dense weights", "experts",
            scaled_expert_gradients, "gradients", "gradient scale", "layers.0.mlp.experts"),
    Planted("gradient norm", "the norm takes experts for copies on all ranks", "experts",
            norm_of_the_dense_group, "grad_norm", "gradient norm", "grad_norm"),
    Planted("router statistics", "every micro-batch is counted twice, as recompute would", "experts",
            counts_doubled, "router", "router statistics", "layers.0.mlp.gate"),
    Planted("router statistics", "selection biases follow the load of one rank", "experts",
            bias_of_one_ranks_load, "buffers", "router statistics", "e_score_correction_bias"),
    Planted("token dispatch", "tokens reach their experts in the senders' order", "experts",
            rows_in_the_senders_order, "router", "router statistics", "layers.1.mlp.gate"),
    Planted("router gradient", "a router's gradient is not summed over tensor ranks", "experts, tensor",
            router_gradient_of_one_tensor_rank, "gradients", "gradient normalisation", "mlp.gate.weight"),
    Planted("auxiliary loss", "every tensor rank adds the gradient of the balance loss", "experts, tensor",
            balance_from_every_tensor_rank, "gradients", "gradient normalisation"),
    Planted("router statistics", "every tensor rank counts the tokens that all of them route", "experts, tensor",
            counted_by_every_tensor_rank, "router", "router statistics", "layers.0.mlp.gate", "the tp degree 2"),
    Planted("auxiliary loss", "the balance loss of stages before the last has no gradient", "experts, stages",
            balance_of_the_last_stage_alone, "gradients", "gradient normalisation", "embed_tokens"),
    Planted("auxiliary loss", "the balance loss is a mean over a stage's own layers", "experts, stages",
            mean_over_a_stages_own_layers, "loss", "labels", "loss"),
    Planted("router statistics", "biases of a later stage follow the first stage's load", "experts, stages, bias",
            biases_by_the_place_in_a_stage, "buffers", "router statistics", "layers.1.mlp.gate"),
    Planted("auxiliary loss", "each rank balances its part of a shared sequence alone", "experts, shared sequences",
            balance_of_each_ranks_part, "loss", "forward pass", "loss"),
    Planted("padding and label masks", "what fills up a sequence is counted as routed", "experts, shared by three",
            filling_is_routed_and_counted, "router", "router statistics", "layers.0.mlp.gate"),
]  # fmt: skip
