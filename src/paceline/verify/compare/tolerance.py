"""How equal is equal. Written down once; a layout that misses these is wrong, not unlucky.

A difference is relative: the norm of (layout - reference) over the norm of the reference, per tensor, where a tensor's
norm counts as at least FLOOR times that of all tensors of its kind together (moments of one key are of one kind), since
rounding noise in a gradient that is zero by construction (a key's bias under softmax) is not a difference. For samples
it is the part of them that differs. Of weights it is the change since the start that is compared, relative to its own
size: against large weights any change is small. Nor does a norm of weights or buffers count as more than how far all of
them have moved together. What a weight loses by being stored, up to a unit in its last place a step, is none.
"""

from __future__ import annotations

import math

FLOOR = 1e-4
REACH = 0.01  # of what a loss would change by with weights of twice their size, that a loss counts as at least

# quantity -> dtype -> largest relative difference allowed; in order of cause, which is the order of the report.
TOLERANCES = {
    "whole batch": {"fp64": 1e-10, "fp32": 1e-5},  # the same batch cut in pieces; in fp32 where fp64 is not known
    "position": {"fp64": 0.0, "fp32": 0.0},  # where a resumed run goes on, in samples
    "samples": {"fp64": 0.0, "fp32": 0.0},
    "initial": {"fp64": 0.0, "fp32": 0.0},
    "weight": {"fp64": 0.0, "fp32": 0.0},
    "router": {"fp64": 0.0, "fp32": 0.0},  # tokens per expert
    "loss": {"fp64": 1e-12, "fp32": 1e-5},
    "gradients": {"fp64": 1e-10, "fp32": 1e-4},
    "grad_norm": {"fp64": 1e-10, "fp32": 1e-5},
    "lr": {"fp64": 1e-12, "fp32": 1e-12},  # a number of Python's in both
    "weights": {"fp64": 1e-10, "fp32": 1e-4},
    "buffers": {"fp64": 1e-10, "fp32": 1e-4},
    "moments": {"fp64": 1e-10, "fp32": 1e-4},  # what the optimizer keeps for a weight
    "evaluation": {"fp64": 1e-12, "fp32": 1e-5},
}
QUANTITIES = tuple(TOLERANCES)
DTYPES = ("fp32", "fp64")  # the tolerances of coarser ones would hide mistakes
WITHOUT_SIZE = ("dtype", "decision")  # of the check in low precision (low.py): right or wrong, without a size


def tolerance(quantity: str, dtype: str) -> float:
    """Return the largest relative difference at which a quantity counts as equal."""
    return TOLERANCES[quantity][dtype]


def larger(a: float, b: float) -> float:
    """Return the larger of two relative differences, of which one that is not a number is the largest."""
    return a if math.isnan(a) or a >= b else b
