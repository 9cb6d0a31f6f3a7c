"""How fast the machine is beside measured plans, in the probe's own terms: a training step that the probe timed too.

The host of a virtual machine may take a third of its speed away for a minute without a word, and a forecast stands on
a probe of another minute. A row that was measured then says nothing of the forecaster. So a fixed step, of no task of
the grid, takes turns with the plans; where it takes another time than in the probe, probe and plans are measured again.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

STEADY = 0.1  # part by which the fixed step may take more or less than in the probe
TRIES = 3  # of a probe and the plans of one task; then they are kept, and told
REPEATS = 3  # of the fixed step in a turn


class FixedStep:
    """The smaller calibration step of a probe, in fp32."""

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


def pace_of(cluster: Any, fixed_seconds: Sequence[float]) -> float:
    """Return how long the fixed step took beside plans over what it took the probe: 1.3 is a slower machine.

    NaN where nothing was probed.
    """
    steps = [step for step in cluster.device.calibration if step.precision == "fp32"] if fixed_seconds else []
    if not steps:
        return math.nan
    return statistics.median(fixed_seconds) / min(steps, key=lambda step: step.width).seconds


def is_steady(pace: float) -> bool:
    """Return whether rows of this pace were measured on the machine that was probed."""
    return not abs(pace - 1) > STEADY
