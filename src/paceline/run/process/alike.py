"""What a user's modules find as they are imported is alike in all processes, and so is what they leave behind."""

from __future__ import annotations

import random

import numpy as np


def begin_alike() -> None:
    """Have the global generators of Python and numpy begin as on all other ranks, and in every start; torch's do.

    A module may draw as it is imported: which features it leaves out, say. Called before the user's modules are.
    """
    random.seed(0)
    np.random.seed(0)
