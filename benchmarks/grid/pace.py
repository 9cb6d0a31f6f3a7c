"""How fast the machine is beside measured plans, in the probe's own terms: a training step that the probe timed too.

The host of a virtual machine may take a third of its speed away for a minute without a word, and a forecast stands on
a probe of another minute. A row that was measured then says nothing of the forecaster. So a fixed step, of no task of
the grid, takes turns with the plans; where it takes another time than in the probe, probe and plans are measured again.
What ranks wait for has a speed of its own: plans of which half is waiting once took twice their time beside a fixed
step that took its own. So an all-reduce after computing, timed as the probe times it, takes turns with them too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, cast

STEADY = 0.1  # part by which the fixed step may take more or less than in the probe
# By how much of itself an all-reduce may take more than in the probe, or the probe's more than it: two of its times are
# a third apart on a quiet machine.
STEADY_WAITS = 0.5
WAITED_BYTES = 2**22  # of that all-reduce: the smaller size of the probe's
TRIES = 3  # of a probe and the plans of one task; then they are kept, and told
REPEATS = 3  # of the fixed step in a turn


class FixedStep:
    """The smaller calibration step of a probe, in fp32, and an all-reduce after computing."""

    kind, trial = "cpu", False

    def __init__(self, world: Any) -> None:
        import torch

        from paceline.cluster.probe.block import build_block, training_step
        from paceline.cluster.probe.worker import BLOCK_LAYERS, CPU_BLOCKS

        hidden, ffn, heads, rows, sequence = CPU_BLOCKS[0]
        self.world = world
        module = build_block(hidden, ffn, heads, BLOCK_LAYERS, world.device)
        self.step = training_step(module, torch.randn(rows, sequence, hidden, device=world.device))
        self.step()

    def seconds(self) -> float:
        """Return the least seconds of a few steps that all ranks make at once, on the slowest rank."""
        taken = []
        for _ in range(REPEATS):
            self.world.wait()
            begin = time.perf_counter()
            self.step()
            taken.append(time.perf_counter() - begin)
        return float(self.world.maximum([min(taken)])[0])

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank."""
        return float(self.world.maximum([float(condition)])[0]) > 0

    def wait_seconds(self) -> float:
        """Return what an all-reduce of WAITED_BYTES adds to computing, on the slowest rank; 0 for one rank."""
        import torch
        import torch.distributed as dist

        from paceline.cluster.probe.collectives import SELDOM, time_in_step

        if self.world.size == 1:
            return 0.0
        whole = torch.zeros(WAITED_BYTES // 4)
        added: Any = time_in_step(cast("Any", self), lambda: dist.all_reduce(whole), SELDOM)
        return float(self.world.maximum([added["seconds"]])[0])


def pace_of(cluster: Any, fixed_seconds: Sequence[float]) -> float:
    """Return how long the fixed step took beside plans over what it took the probe: 1.3 is a slower machine.

    NaN where nothing was probed.
    """
    steps = [step for step in cluster.device.calibration if step.precision == "fp32"] if fixed_seconds else []
    if not steps:
        return math.nan
    return statistics.median(fixed_seconds) / min(steps, key=lambda step: step.width).seconds


def pace_of_waits(cluster: Any, wait_seconds: Sequence[float]) -> float:
    """Return how long the all-reduce took beside plans over what the probe's rates say; NaN where nothing waits."""
    if cluster.devices == 1 or not wait_seconds:
        return math.nan
    link, ranks = cluster.links[0], cluster.devices
    moved = 2 * (ranks - 1) / ranks * WAITED_BYTES
    probed = (ranks - 1) * link.latency_seconds.value + moved / link.collective_bytes_per_second["all_reduce"]
    return float(statistics.median(wait_seconds) / probed)


def is_steady(pace: float, waits: float = math.nan) -> bool:
    """Return whether rows of this pace were measured on the machine that was probed."""
    return not (abs(pace - 1) > STEADY or waits > 1 + STEADY_WAITS or waits < 1 / (1 + STEADY_WAITS))
