"""How equal is equal. Written down once; a layout that misses these is wrong, not unlucky.

A difference is relative: the norm of (layout - reference) over the norm of the reference, per tensor, where a tensor's
norm counts as at least FLOOR times that of all tensors of its kind together, since rounding noise in a gradient that is
zero by construction (a key's bias under softmax) is not a difference.
"""

from __future__ import annotations

FLOOR = 1e-4

# quantity -> dtype -> largest relative difference allowed
TOLERANCES = {
    "loss": {"fp64": 1e-12, "fp32": 1e-5},
    "weight": {"fp64": 0.0, "fp32": 0.0},
    "gradients": {"fp64": 1e-10, "fp32": 1e-4},
    "grad_norm": {"fp64": 1e-10, "fp32": 1e-5},
    "weights": {"fp64": 1e-10, "fp32": 1e-4},
    "buffers": {"fp64": 1e-10, "fp32": 1e-4},
}
QUANTITIES = tuple(TOLERANCES)


def tolerance(quantity: str, dtype: str) -> float:
    """Return the largest relative difference at which a quantity counts as equal."""
    return TOLERANCES[quantity][dtype]
