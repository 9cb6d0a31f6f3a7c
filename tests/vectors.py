"""Whether this CPU, as torch sees it, has the vector instructions that its compiler's code needs."""

from __future__ import annotations

import pytest
import torch

# torch 2.13's inductor writes calls of at::vec into kernels which it then compiles without that namespace.
needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's compiler writes C++ that does not compile on a CPU without vector instructions",
)
