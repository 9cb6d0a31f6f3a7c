"""What a rank's process imports of torch before its first step, whichever layout it is of."""

from __future__ import annotations

# The process that ranks are forked from imports all of it (session/standby.py), and a probe does, so that what it says
# a process holds before any tensor is what a rank's does: half as much again as torch alone (2.13 on Linux).
TORCH_OF_A_RANK = (
    "torch._dynamo",  # of which DTensor's first use would import it
    "torch.distributed.checkpoint",  # of which a DTensor that is cut would
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",  # of which stages would
    "torch.distributed.tensor.debug",  # which a rank needs when it loses a peer
)
# What Paceline's own modules add to that in a rank. A probe runs without them; tests/cluster/here/test_imported.py
# holds it against a process that imports them.
OWN_BYTES = 16 * 2**20
