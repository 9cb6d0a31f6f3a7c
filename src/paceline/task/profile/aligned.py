"""Products whose operands' rows do not begin at multiples of 16 bytes in precisions of two bytes. Imports no torch.

Such rows keep a product off a GPU's matrix units (NVIDIA, Matrix Multiplication Background User's Guide, section 4.1).
Of x[tokens, inner] W[outer, inner]^T the forward pass reads rows of `inner` elements; both products of the backward
pass also read the gradient [tokens, outer]. So a head over a vocabulary of 50,257 has a fast forward pass alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ALIGNED_ELEMENTS = 8  # of two bytes


def is_aligned(*widths: int) -> bool:
    """Return whether rows of all these widths begin at multiples of 16 bytes."""
    return all(width % ALIGNED_ELEMENTS == 0 for width in widths)


def unaligned_flops(products: Iterable[tuple[int, int]], tokens: float) -> dict[str, Any]:
    """Return the fields of a block for its products (inner, outer): FLOPs of those that are not aligned in each pass.

    Example: (768, 50257) is none of the forward pass and one of the backward pass, (12, 768) one of both.
    """
    products = list(products)
    forward = sum(inner * outer for inner, outer in products if not is_aligned(inner))
    backward = sum(inner * outer for inner, outer in products if not is_aligned(inner, outer))
    return {"unaligned_flops": 2.0 * tokens * forward, "unaligned_backward_flops": 2.0 * tokens * backward}
