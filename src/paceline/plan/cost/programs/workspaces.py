"""What libraries of products ask torch's allocator for, whatever is trained: part of what it has given out.

A forecast counts it as the process's runtime, which a table leaves out that writes down what torch has allocated.
"""

from __future__ import annotations

import re

from paceline.plan.cost.constants import family_of

MIB = 2**20

# cuBLAS has a handle for every thread that calls it: the one that goes forward, and autograd's. Of each it is given
# :4096:2:16:8, on Hopper and Blackwell :4096:8, as it also must be for results that are the same every time
# (`parseChosenWorkspaceSize` of torch's CublasHandlePool.cpp; torch.use_deterministic_algorithms; read 2026-11-27).
HANDLES = 2
SMALL, LARGE = (2 * 4096 + 8 * 16) / 1024 * MIB, 8 * 4096 / 1024 * MIB
DETERMINISTIC = re.compile(r"deterministic-mode=true")
# Transformer Engine's own (`get_cublas_workspace_size_bytes` of its module/base.py).
OF_LAYERS = {"ampere": 4 * MIB, "hopper": 32 * MIB, "blackwell": 32 * MIB}


def workspace_bytes(device: str, notes: str, transformer_engine: bool) -> float:
    """Return the bytes that products' workspaces hold on a device of a generation that it is known of, else 0.

    Example: 16.25 MiB on an A100, 64 where results are the same every time, and 4 more with Transformer Engine.
    """
    family = family_of(device)
    if family not in OF_LAYERS:
        return 0.0
    same = DETERMINISTIC.search(notes.lower())
    each = LARGE if same or family != "ampere" else SMALL
    return HANDLES * each + (OF_LAYERS[family] if transformer_engine else 0.0)
