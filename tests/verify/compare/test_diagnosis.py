"""Likely causes: one is named where the numbers single it out, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.run.process.world import World
from paceline.spec.layout import Layout
from paceline.spec.plan import Plan
from paceline.verify.compare.diagnosis import Diagnosis, Traits, diagnose
from paceline.verify.compare.measures import tensor_differences

ALONE = World(0, 1, 0, torch.device("cpu"))
NAMES = [f"layers.{index}.weight" for index in range(12)]
Tensors = dict[str, torch.Tensor]
TRAITS = Traits(False, False, frozenset({"norm.weight", "last.weight"}), frozenset())


def diagnosed(quantity: str, ours: Tensors, reference: Tensors) -> Diagnosis:
    found = tensor_differences(quantity, ours, reference, 1, ALONE, Layout())
    wrong = [d for d in found if d.relative > 1e-10]
    return diagnose(wrong, len(found), Plan(Layout(dp_replicate=2)), TRAITS)


def of_two_ranks(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Diagnosis:
    """Return what is said of gradients of two ranks that come together in some other way than by their sum."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.randn(40, 30, dtype=torch.float64, generator=generator)

    common = {name: draw() for name in NAMES}
    parts = [{name: common[name] + 2 * draw() for name in NAMES} for _ in range(2)]
    pairs = {name: (parts[0][name], parts[1][name]) for name in NAMES}
    return diagnosed(
        "gradients", {n: change(a, b) for n, (a, b) in pairs.items()}, {n: a + b for n, (a, b) in pairs.items()}
    )


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().double()


def test_gradients_that_are_rounded_are_called_so() -> None:
    assert of_two_ranks(lambda a, b: rounded(a) + rounded(b)).family == "half-reduced precision"
    assert of_two_ranks(lambda a, b: rounded(rounded(a) + rounded(b))).family == "half-reduced precision"


@pytest.mark.parametrize("off", [0.001, 0.005, 0.02])
def test_ranks_that_are_weighed_wrongly_are_not_called_rounded(off: float) -> None:
    assert of_two_ranks(lambda a, b: a + (1 + off) * b).family == "gradient normalisation"


def updates(decay: float, names: tuple[str, ...] = ("norm.weight", "last.weight")) -> tuple[Tensors, Tensors]:
    """Return changes of norms that start at one, with weight decay of some of them, and the reference's."""
    generator = torch.Generator().manual_seed(0)
    moved = {name: 1e-2 * torch.randn(16, dtype=torch.float64, generator=generator) for name in TRAITS.vectors}
    return {name: change - decay * (name in names) for name, change in moved.items()}, moved


def test_weight_decay_is_named_where_vectors_shrink_alike_and_not_where_they_do_not() -> None:
    assert "weight decay" in diagnosed("weights", *updates(1e-3)).likely
    for ours, reference in (updates(-1e-3), updates(1e-3, ("norm.weight",))):
        told = diagnosed("weights", ours, reference)
        assert "weight decay" not in told.likely and "norm.weight" in told.likely


def test_loads_name_a_degree_or_none() -> None:
    loads = {"gate": torch.tensor([10.0, 20.0, 30.0])}
    assert "dp_replicate degree 2" in diagnosed("router", {"gate": 2 * loads["gate"]}, loads).likely
    told = diagnosed("router", {"gate": torch.tensor([11.0, 20.0, 30.0])}, loads).likely
    assert "recompute" not in told and "times" not in told
