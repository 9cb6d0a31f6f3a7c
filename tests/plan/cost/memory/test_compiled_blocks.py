"""What a compiled block keeps with its products: what torch's partitioner saves of the block that is built."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from plan_examples import cluster, opened
from torch.autograd.graph import saved_tensors_hooks

from paceline.plan.cost.model_parts import MODES
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.software import PACELINE
from paceline.run.memory.recompute import checkpoint_block
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.task.models.decoder import Decoder
from paceline.task.models.init import initialise
from paceline.task.models.shape import DecoderConfig
from paceline.task.profile.decoder import profile_decoder

ROWS, SEQ = 2, 48
CONFIG = DecoderConfig("b", 64, 2, 4, 2, 16, 160, vocab=97, tied=False)


def partitioned_bytes() -> int:
    """Return the bytes that a layer saves where torch's partitioner decides, weights and rotary tables aside."""
    torch.compiler.reset()
    model = Decoder(CONFIG)
    initialise(model, seed=0)
    layer = model.to(torch.bfloat16).layers[0]
    checkpoint_block(layer, "selective", compiled=True)
    compiled = torch.compile(layer.forward, backend="aot_eager_decomp_partition")
    kept: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr(), tensor.shape] = tensor
        return tensor

    def forward(*given: object, **named: object) -> object:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return compiled(*given, **named)

    layer.forward = forward  # type: ignore[method-assign]
    model(torch.zeros(ROWS, SEQ, dtype=torch.int64))
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    own = [each for each in kept.values() if each.data_ptr() not in weights]
    tables = 2 * SEQ * CONFIG.head_dim * 2
    return sum(each.numel() * each.element_size() for each in own) - tables


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_block_keeps_what_the_partitioner_saves(compiled: bool) -> None:
    software = PACELINE if compiled else dataclasses.replace(PACELINE, partitions=False)
    model = opened(profile_decoder(CONFIG, SEQ))
    chosen = Plan(Layout(), 3, ROWS, 1, ROWS, "selective", "bf16", compile=True)
    sheet = PricedTask(model, cluster(1, "cuda"), ROWS, 1, software=software).sheet(chosen)
    layer = int(np.flatnonzero(sheet.context.shapes.repeated)[0])
    kept = ROWS * sheet.kept_bytes[MODES.index("selective"), 0, layer]
    last = 0 if compiled else 2 * ROWS * SEQ * CONFIG.hidden
    assert kept == partitioned_bytes() + last, "but the result of the last product, which no gradient reads"
