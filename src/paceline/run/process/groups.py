"""The process groups of a world, and the meshes of layouts over them: each is made once, and all wait equally long."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.run.process.sockets import noted, shut_connections
from paceline.spec.layout import Layout

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
MESHED = 256  # ranks of the largest world in which each is connected to each other for saves
ON_DEMAND = "TORCH_GLOO_LAZY_INIT"  # read by torch where a group of gloo's is made; `new_group` has no option for it
DATA_MESH_AXES = ("dp_replicate", "fsdp")  # which the one axis `data` of a mesh of its own stands for

MemberRanks = tuple[int, ...]  # the ranks of one group


class Groups:
    """The groups that a world has made so far. They live as long as the world: a plan that comes back finds its own.

    A rank makes the groups that it is in and no others, so that their number is that of the axes, whatever the world's.
    Every rank of the world makes one at the same moment: the parts that they ask for hold each rank once. Under NCCL
    torch makes them by splitting the world's communicator, which waits for every rank of the world.
    """

    def __init__(self) -> None:
        self._made: dict[MemberRanks, dist.ProcessGroup] = {}
        self._meshes: dict[tuple[Layout, str], Mesh] = {}
        self._beside: dist.ProcessGroup | None = None

    def of(self, part: MemberRanks) -> dist.ProcessGroup:
        """Return the group of some ranks, this rank among them; of all ranks the world's own group."""
        assert dist.group.WORLD is not None
        if len(part) == dist.group.WORLD.size():
            return dist.group.WORLD
        if part not in self._made:
            # Local: or each rank would call this for every group of the world, and wait for all ranks each time.
            with noted(dist.get_backend()):
                group = dist.new_group(list(part), timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            self._made[part] = group
        return self._made[part]

    def meet(self, *parts: MemberRanks) -> None:
        """Meet all ranks of the world, where one of these groups is yet to be made. Every rank calls it.

        Whose peer has died is told so here, at once: in a group that is made it would wait for the dead one's address.
        """
        assert dist.group.WORLD is not None
        size = dist.group.WORLD.size()
        if any(len(part) != size and part not in self._made for part in parts):
            dist.barrier()

    def beside(self, timeout: timedelta) -> dist.ProcessGroup:
        """Return a gloo group of all ranks for what goes on beside training. Every rank asks for it at one moment.

        What shared a group with training would wait for training, and training for it. gloo connects every rank to
        every other, a descriptor each, in worlds of up to `MESHED` ranks; in larger ones those that talk to each other.
        """
        if self._beside is None:
            assert dist.group.WORLD is not None
            dist.barrier()  # as in `meet`
            on_demand = dist.group.WORLD.size() > MESHED
            with noted("gloo"), _connected_on_demand(on_demand):
                made = dist.new_group(backend="gloo", timeout=max(timeout, COLLECTIVE_TIMEOUT))
                assert isinstance(made, dist.ProcessGroup)
                if on_demand:
                    _connect(made)
            self._beside = made
        return self._beside

    def drop_beside(self) -> None:
        """Forget the group of `beside`, in which a rank failed: who asks next gets a new one. Every rank calls it."""
        if self._beside is not None:
            self._beside.abort()
            self._beside = None

    def has_mesh(self, layout: Layout, device: str) -> bool:
        """Return whether the mesh of a layout is made."""
        return (layout, device) in self._meshes

    def mesh(self, layout: Layout, device: str) -> Mesh:
        """Return the mesh of a layout. Equal ones must be one object: torch keeps meshes in its caches of operators."""
        if (layout, device) not in self._meshes:
            self._meshes[layout, device] = Mesh(layout, device, self)
        return self._meshes[layout, device]

    def forget(self) -> None:
        """Let go of all groups, which are aborted: nobody is waited for."""
        self._meshes.clear()
        self._made.clear()
        self._beside = None

    def close(self) -> None:
        """Destroy all groups. Every rank calls it; no tensor that is spread over a mesh can be used afterwards.

        Nor can groups be made: torch would give them the names, and the addresses, of those that are gone.
        """
        self._meshes.clear()
        if self._made or self._beside is not None:
            dist.barrier()  # a peer may still be connecting to a group that this rank has long made
        if self._beside is not None:
            dist.destroy_process_group(self._beside)
            self._beside = None
        while self._made:
            dist.destroy_process_group(self._made.popitem()[1])


def abort_groups() -> None:
    """End all process groups of this process without waiting for anybody, and forget what torch has kept of them.

    Collectives that wait for a dead peer end with an error; peers that wait for this rank see that it has gone.
    """
    if not dist.is_initialized():
        return
    dist.distributed_c10d._abort_process_group()  # torch has no public name for it
    shut_connections()
    # Equal meshes are one to torch's caches: operators of the next world would get meshes of groups that are gone.
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        for module, name in (
            (debug, "_clear_sharding_prop_cache"),
            (_redistribute, "clear_redistribute_planner_cache"),
        ):
            getattr(module, name, lambda: None)()  # as far as this torch has them


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
        self._mesh = self._over(self._axes)  # where all ranks have just met (world.py)

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the part of the mesh along one or several axes."""
        return self._mesh[axes]

    def get_group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one along the axis alone."""
        return self._mesh.get_group(axis)

    def get_local_rank(self, axis: str) -> int:
        """Return this rank's place along the axis."""
        return self._mesh.get_local_rank(axis)

    def group_of(self, axis: str) -> dist.ProcessGroup:
        """Return `get_group` of an axis, of the mesh of experts where the axis is one of theirs."""
        return self.get_group(axis) if axis in self._axes else self.experts.get_group(axis)

    @cached_property
    def context(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequences. Every rank asks for it, as for all that follow."""
        axes = {"outer": self.layout.pp * self.layout.dp_replicate * self.layout.dp_shard, "cp": self.layout.cp}
        return self._of({**axes, "tp": self.layout.tp}, ("cp",))

    @cached_property
    def data(self) -> dist.ProcessGroup:
        """The ranks that read different rows of one batch, in the order of the rows."""
        assert self.layout.cp == 1, "ranks that share sequences read the same rows"
        assert self.layout.pp == 1, "a stage that has no use for them would not ask, and NCCL would wait for its ranks"
        return self._of(self._axes, DATA_MESH_AXES)

    @cached_property
    def data_axis(self) -> DeviceMesh:
        """The mesh of one axis of these ranks: `data`."""
        return DeviceMesh.from_group(self.data, self._device, mesh_dim_names=("data",))

    @cached_property
    def copy(self) -> dist.ProcessGroup:
        """The ranks that hold this rank's copy of the model."""
        return self._of(self._axes, ("pp", "fsdp", "tp"))

    @cached_property
    def experts(self) -> DeviceMesh:
        """The mesh (pp, dp_replicate, expert_shard, ep, tp), in which `fsdp` is split in two.

        Neighbours of `fsdp` form an `ep` group: they exchange the most.
        """
        split = {"expert_shard": self._axes["fsdp"] // self.layout.ep, "ep": self.layout.ep}
        outer = {axis: self._axes[axis] for axis in ("pp", "dp_replicate")}
        axes = {**outer, **split, "tp": self._axes["tp"]}
        self._groups.meet(*(own_part(axes, (axis,), dist.get_rank()) for axis in axes))
        return self._over(axes)

    def _of(self, axes: dict[str, int], along: Sequence[str]) -> dist.ProcessGroup:
        part = own_part(axes, along, dist.get_rank())
        self._groups.meet(part)
        return self._groups.of(part)

    def _over(self, axes: dict[str, int]) -> DeviceMesh:
        ranks = torch.arange(math.prod(axes.values())).view(tuple(axes.values()))
        groups = [self._groups.of(own_part(axes, (axis,), dist.get_rank())) for axis in axes]
        return DeviceMesh.from_group(groups, self._device, ranks, mesh_dim_names=tuple(axes))


def own_part(axes: dict[str, int], along: Sequence[str], rank: int) -> MemberRanks:
    """Return the ranks that differ from `rank` along some of the axes alone, in the order of those axes.

    `axes` has the degree of each, the innermost last.
    """
    strides = {axis: math.prod(list(axes.values())[number + 1 :]) for number, axis in enumerate(axes)}
    first = rank - sum(rank // strides[axis] % axes[axis] * strides[axis] for axis in along)
    steps = [range(0, axes[axis] * strides[axis], strides[axis]) for axis in along]
    return tuple(first + sum(places) for places in itertools.product(*steps))


@contextlib.contextmanager
def _connected_on_demand(on_demand: bool) -> Iterator[None]:
    """Have groups of gloo's that are made in the block connect two ranks when these send each other something."""
    before = os.environ.get(ON_DEMAND)
    if on_demand:
        os.environ[ON_DEMAND] = "1"
    try:
        yield
    finally:
        if on_demand:
            os.environ.pop(ON_DEMAND)
            os.environ |= {ON_DEMAND: before} if before is not None else {}


def _connect(group: dist.ProcessGroup) -> None:
    """Have the ranks that saves bring together connect now: what they tell each other goes to ranks 2^k away.

    Of 16,384 ranks each has some 30 connections then. Later the store in which they find each other may be gone.
    """
    ranks, rank = group.size(), group.rank()
    for away in (2**power for power in range((ranks - 1).bit_length())):
        moves = [
            dist.P2POp(dist.isend, torch.zeros(1), group=group, group_peer=(rank + away) % ranks),
            dist.P2POp(dist.irecv, torch.empty(1), group=group, group_peer=(rank - away) % ranks),
        ]
        for work in dist.batch_isend_irecv(moves):
            work.wait()
