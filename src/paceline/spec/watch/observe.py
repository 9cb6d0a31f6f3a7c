"""ObserveSpec: the `[run.observe]` table of a spec. What is read of machines, ranks and weights while a run trains."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.declared import Declared
from paceline.config.fields import option
from paceline.units import Amount


@dataclass(frozen=True)
class ObserveSpec(Declared, table="run.observe"):
    """What the journal and the folder of logs hold beside the steps."""

    samples: bool = option(True, "sample the node's processors, memory, network, disks and devices while it trains")
    every: float = option(10.0, "the time between two samples of a node", quantity="duration", above=0.0)
    detail: bool = option(False, "keep the numbers of every rank of the node, and not of those alone that stand out")
    health: bool = option(
        True, "measure gradients, updates and activations of each block now and then, and tell what stands out"
    )
    health_every: Amount = option(
        Amount(100, "steps"), "steps between two of these measurements", quantity="amount", units=("steps",)
    )
    logs: bool = option(True, "keep what ranks print, one file for each rank, in the run's folder `logs`")
    log_limit: int = option(
        16 * 2**20, "most bytes of one file of logs; a full one is set aside and a new one begun", quantity="bytes",
        minimum=4096,
    )  # fmt: skip
    log_files: int = option(2, "how many full files of logs are kept for each rank", minimum=0)
    log_ranks: int = option(
        8, "most ranks whose every line is printed; of more, those of rank 0 are, and the rest is in their logs",
        minimum=1,
    )  # fmt: skip
