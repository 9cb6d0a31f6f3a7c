"""Whether a user's model is the chain that it declares: its stages, one after the other, must give its own loss."""

from __future__ import annotations

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.plan.plan import Plan
from paceline.plan.stages import stage_count
from paceline.run.loader import MicroBatch
from paceline.run.parallel.pipeline import Cut
from paceline.run.passes import Objective, in_model_precision, sample_rows
from paceline.run.randomness.mode import SampleRandomness
from paceline.run.rng_state import random_state
from paceline.run.stage_module import StageModule

RELATIVE = 1e-6  # in fp32, where the same sums in the same order give the same bits; a capped logit is off by 1e-5


def check_chain(
    model: nn.Module,
    plan: Plan,
    objective: Objective,
    micro: MicroBatch,
    device: torch.device,
    randomness: SampleRandomness,
) -> None:
    """Raise ConfigError where a model's stages in turn, on one micro-batch, do not give the loss of the whole model.

    A forward pass may do more than hand hidden states from block to block: scale the embedding outside of it, or add a
    skip connection around several blocks. Such a model would train without an error, and wrongly.
    """
    cut, was_training = Cut(model, plan), model.training
    embeddings = dict(model.named_modules())
    model.eval()
    try:
        with torch.no_grad():
            with randomness.during(sample_rows(micro)):
                whole, _ = objective(model, in_model_precision(micro.data, plan))
            found = state = None
            for index in range(stage_count(plan)):
                stage = cut.stage(index)
                stage.module.eval()
                found = StageModule(stage, objective, plan, device, randomness, lambda data: data).run(
                    micro, found, state
                )
                state = random_state(device)
    finally:
        model.train(was_training)
        for name in {shared.rpartition(".")[0] for shared in cut.shared}:
            embeddings[name].__dict__.pop("forward", None)  # what the last stage put there
    assert found is not None
    chained = float(found[0])
    if abs(chained - float(whole)) > RELATIVE * abs(float(whole)):
        raise ConfigError(
            f"{type(model).__name__} is not the chain that its rules declare",
            f"its stages one after the other give a loss of {chained:.6g}, the model {float(whole):.6g}: its forward"
            " pass does more than hand hidden states from module to module",
            "move the rest into the modules of the chain, or pp = 1",
        )
