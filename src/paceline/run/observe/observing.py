"""What a rank observes of a run beside its steps: the node, by the first rank of that node."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import torch

from paceline.run.observe.node import NodeSampler, SamplesOfFirst, SamplesOfOthers, node_name, sensors_of
from paceline.run.observe.sensors.sensor_reading import SeenRank
from paceline.run.process.world import World
from paceline.spec.run import RunSpec
from paceline.supervise.parent import NODE_VARIABLE
from paceline.system.this_machine import machine_here


class NodeWatch:
    """A rank's part in watching its node: one rank of each node has the sampler, and the others nothing."""

    def __init__(self, run: RunSpec, run_dir: Path, world: World, attempt: int, first: SamplesOfFirst) -> None:
        """`attempt` is the number of the start, as rank 0 knows it; `first` takes the first node's samples there.

        Every rank makes one: those of a node tell each other that they are on it.
        """
        self._sampler: NodeSampler | None = None
        if not run.observe.samples:
            return
        node = node_here()
        place = f"{machine_here()}-{os.environ.get(NODE_VARIABLE, '')}"  # the name may change meanwhile
        told = world.told_at(place, {"process": os.getpid(), "device": device_name(world.device)})[place]
        own = [SeenRank(rank, int(seen["process"]), str(seen["device"])) for rank, seen in told]
        is_first_here = own[0].rank == world.rank
        nodes = int(world.sum([float(is_first_here)])[0])
        number = world.share(attempt)
        if is_first_here:
            take = first if world.is_first else SamplesOfOthers(run_dir, number, node, run.group_read)
            self._sampler = NodeSampler(node, own, sensors_of(own), take, run.observe.every, nodes, run.observe.detail)
            weakref.finalize(self, self._sampler.stop)  # of a run that is dropped before its end
            self._sampler.start()

    def stepped(self, step: int) -> None:
        """Note how many steps are done."""
        if self._sampler is not None:
            self._sampler.step = step

    def close(self) -> None:
        """Take a last sample, and end."""
        if self._sampler is not None:
            self._sampler.close()


def node_here() -> str:
    """Return the name of this rank's node: its machine's, with a number where a run has several nodes."""
    number = os.environ.get(NODE_VARIABLE)
    return node_name() if number is None else f"{node_name()}-node{number}"


def device_name(device: torch.device) -> str:
    """Return the UUID of a GPU as its driver's tools have it; empty for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
