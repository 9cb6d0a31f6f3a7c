"""What the ranks of tests share: imported once, by the process that they are forked from. It starts no thread.

Each rank would otherwise import it again: 0.6 s of computing for our own modules, and more for torch's.
"""

from __future__ import annotations

import gc

import torch._dynamo  # of which DTensor's first use would import it
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel  # noqa: F401

import paceline.launch.run
import paceline.launch.worker
import paceline.run.loop.training
import paceline.verify.compare.in_a_group
import paceline.verify.process.checks
import paceline.verify.process.worker  # noqa: F401
from paceline.cluster.here.collector import keep_for_good

gc.collect()
keep_for_good()  # or every rank's collections would go through all of it, and so copy it
