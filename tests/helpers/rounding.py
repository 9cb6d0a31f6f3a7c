"""How far two right answers may lie apart: bounds that follow from the format and the optimizer, in one place.

Two programs that add the same numbers in another order, with other kernels or on another CPU, differ by rounding. How
much is known beforehand. With u the unit roundoff of the format (half its eps: 1.1e-16 in fp64, 6e-8 in fp32):

- A sum of n products, in any order, is off by at most n u times the sum of the products' sizes (N. Higham, "Accuracy
  and Stability of Numerical Algorithms", 2nd ed., equations 3.5 and 4.4). That is relative to the sizes of what is
  added, not to the result: an element that is small because its terms cancel has the same absolute error as a large
  one. So differences are held against the largest element of a tensor, never against each element's own size. n counts
  the operations on the longest way through the computation: the inner dimensions of its matrix products, added up.
- Adam moves a weight by lr m / (sqrt(v) + eps). The derivative of that by the gradient is at most lr / eps, and the
  move itself at most about lr, so an error e in gradients gives an error of at most lr min(1, e / eps) in the weight,
  at each step. In fp32 that is most of a whole update for a gradient near eps: updates are compared in fp64.

Whatever can be computed in fp64 is compared in fp64: mistakes are of the size of the numbers, rounding is 1e-13 of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Operations on the longest way through a step of the small models here: inner dimensions below 64, at most 256 tokens
# in the sum of a weight's gradient, fewer than ten layers, forward and backward.
SMALL_MODEL_OPERATIONS = 10_000
FP64 = SMALL_MODEL_OPERATIONS * 2.0**-53  # relative, of losses and norms in fp64: 1.1e-12
# After steps of Adam the weights differ, and what is computed with them by as much; see `adam_error`.
FP64_TRAINED = 1e-8
# Of a loss in bf16, relative, a few updates long: that of a token is off by some units of roundoff, of either sign, and
# the mean over a hundred tokens and more by less than one.
MEAN_LOSS_BF16 = 2.0**-9


def roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a format: the largest relative error of one operation."""
    return torch.finfo(dtype).eps / 2


def adam_error(lr: float, eps: float, steps: int, gradient_error: float) -> float:
    """Return how far weights may lie apart after steps of Adam whose gradients are off by `gradient_error`."""
    return steps * lr * min(1.0, gradient_error / eps)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, operations: int, name: str = "", scale: float = 0.0) -> None:
    """Assert that tensors of one shape differ by the rounding of so many operations, in `theirs` format, at most.

    `scale` is the size of what was added up, where that may cancel in the whole tensor.
    """
    assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
    bound = operations * roundoff(theirs.dtype) * max(scale, float(theirs.detach().abs().max()))
    found = float((ours.detach().double() - theirs.detach().double()).abs().max())
    assert found <= bound, f"{name or 'tensors'} differ by {found:.2g}, rounding gives {bound:.2g} at most"


def assert_curves_close(ours: Sequence, theirs: Sequence, relative: float = FP64_TRAINED) -> None:
    """Assert that numbers, or rows of numbers, agree to a relative difference, each with the one at its place."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(mine, other, strict=True) if isinstance(mine, Sequence) else [(mine, other)]
        for a, b in pairs:
            assert abs(a - b) <= relative * abs(b), f"at {at}: {a!r} instead of {b!r}, off by {abs(a / b - 1):.2g}"
