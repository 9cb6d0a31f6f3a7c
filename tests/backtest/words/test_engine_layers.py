"""Layers of Transformer Engine: which rows have them, and how long a host takes to start them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from backtest_examples import LLAMA, case_of

from paceline.backtest.price import software_of
from paceline.backtest.words.engine import has_engine_layers
from paceline.plan.cost.sheet import PricedTask
from paceline.plan.cost.time.compute import host_starts

YOUNG = replace(LLAMA, program="megatron-lm", accelerator="H100-80GB", zero_stage="1", notes="")


@pytest.mark.parametrize(
    ("changes", "has"),
    [
        ({}, True),
        ({"accelerator": "A100-80GB"}, False),
        ({"accelerator": "A100-80GB", "notes": "core_r0.16.0"}, True),
        ({"accelerator": "A100-80GB", "notes": "commit be85fc5d, torch 2.10"}, True),
        ({"accelerator": "A100-80GB", "notes": "torch 2.1"}, False),
        ({"accelerator": "A100-80GB", "precision": "te bf16"}, True),
        ({"accelerator": "A100-80GB", "program": "pytorch", "notes": "layers of Transformer Engine"}, True),
        ({"notes": "grouped products of Transformer Engine", "program": "pytorch-fsdp2"}, False),
        ({"notes": "local modules of Megatron-Core"}, False),
        ({"notes": "--transformer-impl local"}, False),
        ({"notes": "without Transformer Engine"}, False),
        ({"program": "nemo"}, True),
        ({"program": "nemo-automodel"}, False),
        ({"program": "megatron-deepspeed"}, False),
        ({"program": "pytorch-fsdp2"}, False),
        ({"accelerator": "B200", "program": "megatron_lm"}, True),
        ({"accelerator": "MI300X"}, False),
    ],
)
def test_which_rows_have_layers_of_transformer_engine(changes: dict[str, object], has: bool) -> None:
    assert has_engine_layers(replace(YOUNG, **changes)) is has  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("notes", "program", "slow"),
    [
        ("", "megatron-lm", True),
        ("no CUDA graphs", "megatron-lm", True),
        ("CUDA graphs of whole layers", "megatron-lm", False),
        ("local layers", "megatron-lm", False),
        ("", "megatron-bridge", True),
        ("", "nemo", False),
    ],
)
def test_layers_take_a_host_longer_to_start_unless_a_graph_holds_them(notes: str, program: str, slow: bool) -> None:
    """A layer starts 1.75 times as long, what is no layer (embedding, head, loss) as long as ever."""
    case = case_of(YOUNG, notes=notes, program=program)
    software = software_of(case)
    assert software.engine_layers is slow

    def operators(engine: bool) -> float:
        priced = PricedTask(
            case.profile, case.cluster, case.batch_samples, 1, software=replace(software, engine_layers=engine)
        )
        return float(np.sum(host_starts(priced.sheet(case.plans[0])).operators[0]))

    layers = sum(block.operators for block in case.profile.blocks if block.recomputable)
    assert operators(True) - operators(False) == pytest.approx(0.75 * layers)
