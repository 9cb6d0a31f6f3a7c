"""The norm of gradients is bit for bit torch's, and no gradient's norm is copied by a call of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.run.numerics.norm import norm_of


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [(10.0 ** (i % 5 - 2) * torch.randn(shape, generator=generator)).to(dtype) for i, shape in enumerate(shapes)]


SHAPES = [(3, 5), (7,), (), (64, 33), (1, 1, 2), (1000,)] * 9
CASES: dict[str, list[Tensor]] = {
    "none": [],
    "one": drawn((5, 4)),
    "many": drawn(*SHAPES),
    "fp64": drawn(*SHAPES, dtype=torch.float64),
    "bf16": drawn(*SHAPES, dtype=torch.bfloat16),
    "strides": [each.T for each in drawn((3, 5), (64, 33))],
    "two dtypes": [*drawn((3, 5), (7,)), *drawn((4,), dtype=torch.float64), *drawn((9,))],
    "complex": [torch.view_as_complex(each) for each in drawn((3, 2), (4, 5, 2))],
    "complex and real": [*drawn((3, 5)), torch.view_as_complex(drawn((4, 5, 2))[0])],
    "infinite": [*drawn((3, 5)), torch.tensor([torch.inf])],
    "not a number": [*drawn((3, 5)), torch.tensor([torch.nan])],
}


@pytest.mark.parametrize("case", CASES)
def test_the_norm_is_torchs(case: str) -> None:
    ours, theirs = norm_of(CASES[case]), torch.nn.utils.get_total_norm(CASES[case], error_if_nonfinite=False)
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    assert torch.equal(ours.nan_to_num(-1.0), theirs.nan_to_num(-1.0))


def test_the_norm_of_a_gradient_is_another_with_every_gradient() -> None:
    assert len({float(norm_of(drawn(*SHAPES[:count]))) for count in range(1, 9)}) == 8
