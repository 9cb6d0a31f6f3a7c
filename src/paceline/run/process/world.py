"""World: the processes of a run and this one's place among them. Joined once, passed on; there are no globals."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.here.prepare import Switched, bind_rank, device_index, prepare_process, told_waiting
from paceline.errors import ConfigError
from paceline.run.memory.allocator import keep_freed_memory
from paceline.run.process.gathering import come_together, served_store, word_of_supervisor
from paceline.run.process.groups import COLLECTIVE_TIMEOUT, Groups, Mesh
from paceline.run.process.neighbours import Neighbours, ToldByRanks, told_alone
from paceline.run.process.sockets import noted, quiet_connections
from paceline.run.survive.listener import refuse_ended_groups
from paceline.spec.layout import Layout
from paceline.spec.run import RunSpec
from paceline.supervise.told.place import FILE, KEPT_STORE, SERVED_STORE, Place
from paceline.system.descriptors import make_room

GLOO_DRAIN_SECONDS = 0.1  # a worker thread needs microseconds; more covers a loaded machine


@dataclass(frozen=True)
class World:
    """This process's rank, the number of processes, the device it computes on, and the groups made so far."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    groups: Groups = field(default_factory=Groups, compare=False, repr=False)
    switched: tuple[Switched, ...] = field(default=(), compare=False, repr=False)  # in this process, for the journal

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes what is written once."""
        return self.rank == 0

    def add_up(self, vector: torch.Tensor) -> None:
        """Put the sum over all ranks in the place of a vector on this rank's device, which is waited for by nobody."""
        if self.size > 1:
            dist.all_reduce(vector)

    def take_largest(self, vector: torch.Tensor) -> None:
        """Put the largest values over all ranks in the place of a vector, which is waited for by nobody."""
        if self.size > 1:
            dist.all_reduce(vector, op=dist.ReduceOp.MAX)

    def take_first(self, tensor: torch.Tensor) -> None:
        """Put rank 0's values in the place of a tensor on this rank's device."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums over all ranks, in double precision; one collective."""
        if self.size == 1:
            return values
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(vector)
        return _told(vector)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest values over all ranks; one collective."""
        if self.size == 1:
            return values
        vector = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
        return _told(vector)

    def share(self, item: object, root: int = 0) -> Any:
        """Return one rank's picklable item on every rank."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=root, device=self.device)
        return box[0]

    def one_of_alike(self, content: bytes | None) -> int | None:
        """Return the lowest rank that has some content, where no two have different ones; None where two have.

        None as content is none; where nobody has any, it is rank 0. A maximum of three numbers, of which two hold 48
        bits of a digest: of contents that differ one pair in 2^48 is taken to be alike.
        """
        own = [-math.inf] * 3
        if content is not None:
            digest = float(int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big"))
            own = [digest, -digest, -float(self.rank)]
        most, least, first = self.maximum(own)
        if first == -math.inf:
            return 0
        return int(-first) if most == -least else None

    def union(self, names: Iterable[str]) -> list[str]:
        """Return the names that any rank has, sorted where all have the same; those are sent by nobody.

        Where ranks differ, the lowest rank with a name that is not known yet sends its names, and so on: as many turns
        as there are different sets, such as stages of a pipeline. Nothing that is sent grows with the ranks.
        """
        own = sorted(set(names))
        if self.one_of_alike("\0".join(own).encode()) is not None:
            return own
        known: dict[str, None] = {}
        while True:
            (first,) = self.maximum([-math.inf if known.keys() >= set(own) else -float(self.rank)])
            if first == -math.inf:
                return list(known)
            known.update(dict.fromkeys(self.share(own, int(-first))))

    def first_told(self, item: object) -> Any:
        """Return on every rank what the lowest rank has that has something; None where none has any."""
        if self.size == 1:
            return item or None
        (first,) = self.maximum([-float(self.rank) if item else -math.inf])
        return None if first == -math.inf else self.share(item, int(-first))

    def gather(self, item: object) -> list[Any]:
        """Return every rank's picklable item, in rank order, on every rank."""
        items: list[object] = [item]
        if self.size > 1:
            items = [None] * self.size
            dist.all_gather_object(items, item)
        return items

    def bring_to_first(self, item: object) -> list[Any] | None:
        """Return every rank's picklable item, in rank order, on rank 0; None on the others, which hold their own."""
        if self.size == 1:
            return [item]
        items: list[object] | None = [None] * self.size if self.is_first else None
        dist.gather_object(item, items, dst=0)
        return items

    def told_at(self, node: str, item: Mapping[str, int | str], others: Sequence[str] = ()) -> dict[str, ToldByRanks]:
        """Return what ranks on this rank's node have brought, and on `others`. Every rank calls it.

        What a rank sends and is sent grows with those nodes, and not with the world; but where the store in which they
        leave it was a launcher's that has died meanwhile, all are asked.
        """
        if self.size == 1:
            return told_alone(node, item, others)
        neighbours, found = Neighbours(self.share(uuid.uuid4().hex)), dict[str, ToldByRanks]()
        steps: tuple[Callable[[], None], ...] = (
            lambda: neighbours.tell(node, self.rank, item),
            lambda: found.update({name: neighbours.told(name) for name in (node, *others)}),
        )
        for step in steps:  # none begins the second one before all have done the first
            failed = 0.0
            try:
                step()
            except RuntimeError:  # torch's errors of a store
                failed = 1.0
            if self.maximum([failed])[0]:
                everywhere = self.gather((node, dict(item)))
                return {
                    name: [(rank, told) for rank, (at, told) in enumerate(everywhere) if at == name]
                    for name in (node, *others)
                }
        with contextlib.suppress(RuntimeError):  # the store has died just now, and what is in it
            neighbours.forget(list(found))
        return found

    def wait(self) -> None:
        """Return once every rank has arrived."""
        if self.size > 1:
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)


def _told(vector: torch.Tensor) -> list[float]:
    """Return what all ranks have made of a vector; raise where the collective may have been ended before its time."""
    numbers: list[float] = vector.tolist()
    refuse_ended_groups()
    return numbers


def join_world(device_kind: str, threads: int = 0, place: Place | None = None, run: RunSpec | None = None) -> World:
    """Join the processes of a place; without one, those of the process group that there is, or be a world of one.

    `threads` is the number of compute threads of a CPU rank (0 leaves torch's choice). `run` says what else this
    process is to set.
    """
    if place is None and dist.is_initialized():
        place = Place(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    rank, size, local_rank = (place.rank, place.world_size, place.local_rank) if place else (0, 1, 0)
    switched = prepare_process(run, device_kind, supervised=word_of_supervisor() is not None) if run else []
    if threads:
        torch.set_num_threads(threads)
    if device_kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("the plan asks for CUDA devices", "torch sees none on this machine", "cluster.device=cpu")
        device = torch.device("cuda", device_index(local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        switched += bind_rank(run, local_rank, place.ranks_on_node if place else 1) if run else []
    else:
        device = torch.device("cpu")
        switched += told_waiting(torch.get_num_threads()) if run else []
        keep_freed_memory()
    if place and size > 1 and not dist.is_initialized():
        if not place.rendezvous:
            raise ConfigError(
                "the processes cannot find each other",
                "neither MASTER_ADDR and MASTER_PORT nor Slurm's variables are set",
                "start with `paceline train`, torchrun or srun; of mpirun on several machines tell each process both, "
                "as by `-x MASTER_ADDR=HOST -x MASTER_PORT=29500`",
            )
        _meet(place, device)
        atexit.register(_leave_at_exit)
    groups = Groups()
    if run and size > 1 and place and place.rendezvous.startswith(KEPT_STORE):
        # Now: a group is met through the store, and that of a launcher that dies is gone before what it asks for,
        # the last checkpoint, is saved. A save that training waits for is made in a thread, with that group too.
        groups.beside(timedelta(seconds=run.checkpoints.hanging_after))
    return World(rank, size, local_rank, device, groups, switched=tuple(switched))


def join_next(world: World, place: Place) -> World:
    """Join the next world from a process that was in one before, whose groups are aborted; its device stays its own."""
    if place.world_size > 1:
        _meet(place, world.device)
    quiet_connections()
    return World(place.rank, place.world_size, world.local_rank, world.device, switched=world.switched)


def _meet(place: Place, device: torch.device) -> None:
    """Make the process group of a world."""
    # No gloo beside NCCL: it connects every rank to every other, a descriptor each, and nothing here needs it.
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "gloo" or place.rank == 0:  # who has a connection to each rank
        make_room(2 * place.world_size)
    store, word = _store(place), word_of_supervisor()
    if store is not None and word is not None:
        come_together(store, place.world_size, word, COLLECTIVE_TIMEOUT)
    with noted(backend):
        dist.init_process_group(
            backend,
            init_method=None if store else place.rendezvous,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )


def _store(place: Place) -> dist.Store | None:
    """Return the store of a rendezvous that names one; None for others.

    Each generation of a run has a prefix, or a file, of its own: who is left of an older one meets nobody of a newer
    one.
    """
    if place.rendezvous.startswith(FILE):
        return dist.FileStore(place.rendezvous.removeprefix(FILE), place.world_size)
    kind = next((kind for kind in (SERVED_STORE, KEPT_STORE) if place.rendezvous.startswith(kind)), None)
    if kind is None:
        return None
    address, _, prefix = place.rendezvous.removeprefix(kind).partition("/")
    host, _, port = address.rpartition(":")
    serves, word = kind == SERVED_STORE and place.rank == 0, word_of_supervisor()
    if not serves and word is not None:
        return dist.PrefixStore(prefix, served_store(host, int(port), word, COLLECTIVE_TIMEOUT))
    store = dist.TCPStore(host, int(port), None, serves, timeout=COLLECTIVE_TIMEOUT, wait_for_workers=False)
    return dist.PrefixStore(prefix, store)


def leave_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_at_exit() -> None:
    """Leave the process group while the interpreter is whole."""
    leave_world()
    drain()


def drain() -> None:
    """Wait a moment, so that no thread of gloo needs the interpreter after its end.

    After a collective returns, gloo's worker thread still drops its reference to the tensors, for which it needs the
    interpreter's lock. A thread that asks for the lock of an interpreter that is being torn down is ended by force,
    and the process aborts with "terminate called without an active exception" (pytorch#190489). Destroying the group
    is not enough: a device mesh keeps it alive. So this thread sleeps a moment, which hands the lock over.
    """
    time.sleep(GLOO_DRAIN_SECONDS)


def build_mesh(layout: Layout, world: World) -> Mesh | None:
    """Return the mesh of a layout, or None for a world of one. A layout that comes back finds the mesh it had."""
    if layout.devices != world.size:
        raise ConfigError(
            f"the plan needs {layout.devices} processes and {world.size} are running",
            f"layout {layout}",
            f"start {layout.devices} processes, or leave the layout to the planner",
        )
    if world.size == 1:
        return None
    if not world.groups.has_mesh(layout, world.device.type):
        made = float(len(dist.distributed_c10d._world.pg_names))  # of which torch makes the names of local groups
        if world.maximum([made, -made]) != [made, -made]:
            raise ConfigError(
                "ranks come to the plan with different numbers of process groups",
                f"this one is in {made:.0f}, and torch names a group by how many there are: its ranks would not meet",
                "make groups of some ranks alone after the run, or an equal number on every rank before it",
            )
    return world.groups.mesh(layout, world.device.type)
