"""The process groups of a world, and the meshes of layouts over them: each is made once, and all wait equally long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.spec.layout import Layout

COLLECTIVE_TIMEOUT = timedelta(minutes=10)

Partition = tuple[tuple[int, ...], ...]  # the ranks of a world in parts of equal size, every rank in one of them


class Groups:
    """The groups that a world has made so far. They live as long as the world: a plan that comes back finds its own.

    Every rank of the world asks for the same groups in the same order.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Partition, str], dist.ProcessGroup] = {}
        self._meshes: dict[tuple[Layout, str], Mesh] = {}

    def of(self, partition: Partition, purpose: str = "") -> dist.ProcessGroup:
        """Return the group of this rank's part; that of the whole world where it is one part without a purpose.

        A group with a purpose is on the host alone (gloo), and nothing else is sent on it.
        """
        if not purpose and len(partition) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        key = (partition, purpose)
        if key not in self._made:
            backend, own = "gloo" if purpose else None, dist.get_rank()
            for ranks in partition:
                group = dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT, backend=backend, group_desc=purpose)
                if own in ranks:
                    self._made[key] = group
        return self._made[key]

    def mesh(self, layout: Layout, device: str) -> Mesh:
        """Return the mesh of a layout. Equal ones must be one object: torch keeps meshes in its caches of operators."""
        if (layout, device) not in self._meshes:
            self._meshes[layout, device] = Mesh(layout, device, self)
        return self._meshes[layout, device]

    def close(self) -> None:
        """Destroy all groups. Every rank calls it; no tensor that is spread over a mesh can be used afterwards."""
        self._meshes.clear()
        if self._made:
            dist.barrier()  # a peer may still be connecting to a group that this rank has long made
        while self._made:
            dist.destroy_process_group(self._made.popitem()[1])


class Mesh:
    """The ranks of a world along the axes of a layout: pp, dp_replicate, fsdp and tp, those of degree one included.

    `fsdp` is dp_shard x cp: the ranks that share one copy's state, whichever of the two makes them.
    """

    def __init__(self, layout: Layout, device: str, groups: Groups) -> None:
        self.layout, self._device, self._groups = layout, device, groups
        self._axes = {
            "pp": layout.pp,
            "dp_replicate": layout.dp_replicate,
            "fsdp": layout.dp_shard * layout.cp,
            "tp": layout.tp,
        }
        self._mesh = self._over(self._axes)

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the part of the mesh along one or several axes."""
        return self._mesh[axes]

    def get_group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one along the axis alone."""
        return self._mesh.get_group(axis)

    def get_local_rank(self, axis: str) -> int:
        """Return this rank's place along the axis."""
        return self._mesh.get_local_rank(axis)

    @cached_property
    def context(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequences. Every rank asks for it, as for all that follow."""
        axes = {"outer": self.layout.pp * self.layout.dp_replicate * self.layout.dp_shard, "cp": self.layout.cp}
        return self._groups.of(_parts({**axes, "tp": self.layout.tp}, ("cp",)))

    @cached_property
    def data(self) -> dist.ProcessGroup:
        """The ranks that read different rows of one batch, in the order of the rows."""
        assert self.layout.cp == 1, "ranks that share sequences read the same rows"
        return self._groups.of(_parts(self._axes, ("dp_replicate", "fsdp")))

    @cached_property
    def copy(self) -> dist.ProcessGroup:
        """The ranks that hold this rank's copy of the model."""
        return self._groups.of(_parts(self._axes, ("pp", "fsdp", "tp")))

    @cached_property
    def experts(self) -> DeviceMesh:
        """The mesh (pp, dp_replicate, expert_shard, ep, tp), in which `fsdp` is split in two.

        Neighbours of `fsdp` form an `ep` group: they exchange the most.
        """
        split = {"expert_shard": self._axes["fsdp"] // self.layout.ep, "ep": self.layout.ep}
        outer = {axis: self._axes[axis] for axis in ("pp", "dp_replicate")}
        return self._over({**outer, **split, "tp": self._axes["tp"]})

    def _over(self, axes: dict[str, int]) -> DeviceMesh:
        ranks = torch.arange(math.prod(axes.values())).view(tuple(axes.values()))
        groups = [self._groups.of(_parts(axes, (axis,))) for axis in axes]
        return DeviceMesh.from_group(groups, self._device, ranks, mesh_dim_names=tuple(axes))


def _parts(axes: dict[str, int], along: Sequence[str]) -> Partition:
    """Return the ranks in parts that differ along some axes alone, in the order of those axes."""
    ranks = torch.arange(math.prod(axes.values())).view(tuple(axes.values()))
    names = list(axes)
    last = ranks.permute([names.index(axis) for axis in names if axis not in along] + [names.index(a) for a in along])
    return tuple(map(tuple, last.reshape(-1, math.prod(axes[axis] for axis in along)).tolist()))
