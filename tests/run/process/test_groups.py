"""A rank makes the groups that it is in, as many as a layout has axes, and no host group beside NCCL."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from paceline.checkpoint.ranks import Ranks
from paceline.errors import ConfigError
from paceline.foreign_errors import is_of_gloo
from paceline.run.process import gathering, groups, sockets
from paceline.run.process.groups import abort_groups, own_part
from paceline.run.process.world import build_mesh, join_next, join_world
from paceline.run.survive.survivor import is_lost_peer
from paceline.spec.layout import Layout
from paceline.spec.run import RunSpec
from paceline.spec.survive.checkpoints import CheckpointsSpec
from paceline.supervise.control import ABORT_NAME, CONTROL_VARIABLE
from paceline.supervise.supervisor import ERROR_FOLDER
from paceline.supervise.told.place import KEPT_STORE, SERVED_STORE, Place
from paceline.system.descriptors import make_room

AXES = {"pp": 2, "dp_replicate": 3, "fsdp": 4, "tp": 2}


def test_the_part_of_a_rank_is_that_of_a_grid() -> None:
    grid = torch.arange(48).view(2, 3, 4, 2)
    for along in (("tp",), ("pp",), ("dp_replicate", "fsdp"), ("fsdp", "pp"), tuple(AXES)):
        numbers = [list(AXES).index(axis) for axis in along]
        others = [number for number in range(4) if number not in numbers]
        sizes = [AXES[axis] for axis in along]
        parts = grid.permute(others + numbers).reshape(-1, *sizes).flatten(1).tolist()
        for part, rank in itertools.chain.from_iterable(
            zip(itertools.repeat(part), part, strict=False) for part in parts
        ):
            assert own_part(AXES, along, rank) == tuple(part), (along, rank)


def made(layout: Layout) -> int:
    """Return how many groups of a layout's axes this rank asks torch for."""
    world, calls, new_group = join_world("cpu", threads=1), [0], dist.new_group

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return new_group(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        mesh = build_mesh(layout, world)
    assert mesh is not None
    for axis in ("pp", "dp_replicate", "fsdp", "tp"):
        found = torch.tensor([float(world.rank)])
        dist.all_reduce(found, group=mesh.get_group(axis))
        assert int(found) == sum(dist.get_process_group_ranks(mesh.get_group(axis)))
    return calls[0]


def test_a_rank_makes_no_more_groups_in_a_larger_world() -> None:
    assert run_ranks(made, 4, Layout(dp_shard=2, tp=2)) == [3] * 4, "of both axes, and itself alone for the others"
    assert run_ranks(made, 8, Layout(dp_shard=4, tp=2)) == [3] * 8


def unequal() -> str:
    dist.new_group([0], use_local_synchronization=True)  # one that rank 1 is not in
    with pytest.raises(ConfigError) as caught:
        build_mesh(Layout(tp=2), join_world("cpu", threads=1))
    return caught.value.what


def test_ranks_with_unequal_groups_of_their_own_are_told_instead_of_hanging() -> None:
    assert run_ranks(unequal, 2) == ["ranks come to the plan with different numbers of process groups"] * 2


def test_nccl_has_no_gloo_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo would connect every rank to every other when it is made, a descriptor each."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: asked.append((backend, options)))
    world = join_world("cuda", place=Place(3, 16384, 1, 8, "tcp://n1:20000"))
    assert (world.rank, world.size, world.device) == (3, 16384, torch.device("cuda", 1))
    ((backend, options),) = asked
    assert backend == "nccl" and options["init_method"] == "tcp://n1:20000" and options["world_size"] == 16384


def connections_of_saves(most: int) -> tuple[int, float, bool]:
    """Return how many connections the group of saves has made, a sum over it, and whether the environment stays."""
    world, before = join_world("cpu", threads=1), dict(os.environ)
    had = len(sockets._connections())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "MESHED", most)
        group = world.groups.beside(timedelta(seconds=60))
    made = len(sockets._connections()) - had
    found = torch.ones(1)
    dist.all_reduce(found, group=group)
    told = Ranks(group, False).total([2**40])[0] / 2**40
    assert len(sockets._OPENED & sockets._connections()) >= made, "those that are shut with the world"
    world.wait()
    return made, found.item() + told, before == dict(os.environ)


def asks_for_saves_alone() -> bool:
    """Return whether the group of saves is refused as a collective is, where a peer has died before it came."""
    world = join_world("cpu", threads=1)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        world.groups.beside(timedelta(seconds=60))
    return is_of_gloo(raised.value)


def test_a_rank_that_dies_before_the_first_save_is_seen_by_those_who_come_to_it() -> None:
    """They waited for the address of the dead one until they were ended by force: 38 to 66 s of a recovery."""
    assert run_ranks(asks_for_saves_alone, 3, may_die=[1]) == [True, None, True]


def asks_for_a_further_group() -> bool:
    """Return whether a group that a plan wants later is refused as a collective is, where a peer has died before."""
    mesh = build_mesh(Layout(dp_shard=2, cp=2), world := join_world("cpu", threads=1))
    assert mesh is not None
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        mesh.context  # noqa: B018
    return is_of_gloo(raised.value)


def test_a_rank_that_dies_before_a_further_group_of_the_plan_is_seen_by_all() -> None:
    assert run_ranks(asks_for_a_further_group, 4, may_die=[3]) == [True, True, True, None]


class Asked(groups.Groups):
    """Notes which groups a rank asks for, in order, and makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[int, ...]] = []

    def of(self, part: tuple[int, ...]) -> Any:
        """Note the part."""
        self.parts.append(part)

    def meet(self, *parts: tuple[int, ...]) -> None:
        """Meet nobody."""


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2, dp_shard=4, ep=2), Layout(dp_replicate=2, dp_shard=2, cp=2, tp=2),
     Layout(pp=2, dp_shard=2, cp=2, ep=2), Layout(pp=3, dp_replicate=2, tp=2)],
    ids=str,
)  # fmt: skip
def test_all_ranks_ask_for_groups_at_one_moment(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL splits the world's communicator for them, and waits for each rank of it: no two ranks may differ in that."""
    monkeypatch.setattr(groups.DeviceMesh, "from_group", lambda *_, **__: None)
    asked = []
    for rank in range(layout.devices):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        mesh = groups.Mesh(layout, "cpu", made := Asked())
        _ = mesh.context, mesh.copy, mesh.experts
        if layout.cp == layout.pp == 1:
            _ = mesh.data
        asked.append(made.parts)
    for parts in zip(*asked, strict=True):
        assert sorted(rank for part in set(parts) for rank in part) == list(range(layout.devices))
        assert all(rank in part for rank, part in enumerate(parts))


def test_no_stage_asks_for_the_ranks_with_other_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups.DeviceMesh, "from_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(AssertionError, match="NCCL would wait"):
        _ = groups.Mesh(Layout(dp_shard=2, pp=2), "cpu", Asked()).data


def joins_a_world_that_never_forms(folder: Path, rendezvous: str) -> bool:
    """Return whether a survivor is told of a lost peer, where that one dies before it has come to the next world."""
    world = join_world("cpu", threads=1)
    if world.rank == 1:
        return True
    abort_groups()
    os.environ.update({ERROR_FOLDER: str(folder), CONTROL_VARIABLE: "control"})
    threading.Timer(0.3, (folder / ABORT_NAME).touch).start()
    with pytest.raises(dist.DistError) as raised:
        join_next(world, Place(0, 2, 0, 2, rendezvous))
    return is_lost_peer(raised.value) and not dist.is_initialized()


@pytest.mark.parametrize("where", ["file", "store"])
def test_a_rank_that_dies_before_it_comes_to_the_next_world_holds_up_nobody(tmp_path: Path, where: str) -> None:
    """Survivors waited for its address until they were ended by force after a grace of 15 s, and lost their state."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = f"file://{tmp_path}/next" if where == "file" else f"{SERVED_STORE}127.0.0.1:{port}/2"
    assert all(run_ranks(joins_a_world_that_never_forms, 2, tmp_path, rendezvous))


def test_who_comes_to_a_store_that_nobody_serves_hears_the_word(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threading.Timer(0.3, (tmp_path / ABORT_NAME).touch).start()
    with pytest.raises(dist.DistError):
        gathering.served_store("127.0.0.1", port, tmp_path / ABORT_NAME, groups.COLLECTIVE_TIMEOUT)


def test_who_served_a_store_and_has_gone_is_not_connected_to_until_the_time_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was lost after it had answered: ranks were ended by force after 17 s, and a recovery took 25."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = iter([True, False])
    with monkeypatch.context() as patch:
        patch.setattr(gathering, "CONNECT_SECONDS", 0.05)
        patch.setattr(gathering, "_answers", lambda host, at: next(answers))
        with pytest.raises(dist.DistError) as raised:
            gathering.served_store("127.0.0.1", port, tmp_path / ABORT_NAME, groups.COLLECTIVE_TIMEOUT)
    assert is_lost_peer(raised.value) and next(answers, None) is None
    served = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = gathering.served_store("127.0.0.1", served.port, tmp_path / ABORT_NAME, groups.COLLECTIVE_TIMEOUT)
    assert client.timeout == groups.COLLECTIVE_TIMEOUT
    client.set("known", "to both")
    assert served.get("known") == b"to both"


def test_a_rank_that_hangs_before_it_comes_is_waited_for_as_long_as_in_a_collective(tmp_path: Path) -> None:
    """Its peers looked into the store for ever; no supervisor says a word as long as nobody has ended."""
    store, soon = dist.FileStore(str(tmp_path / "store"), 2), timedelta(seconds=0.05)
    with pytest.raises(dist.DistError, match="has not come within 50 ms") as raised:
        gathering.come_together(store, 2, tmp_path / ABORT_NAME, soon)
    assert is_lost_peer(raised.value)
    gathering.come_together(store, 2, tmp_path / ABORT_NAME, soon)  # the second one comes
    with socket.socket() as closed, pytest.raises(dist.DistError, match="50 ms"):
        closed.bind(("127.0.0.1", 0))
        gathering.served_store("127.0.0.1", closed.getsockname()[1], tmp_path / ABORT_NAME, soon)


def test_a_large_world_connects_for_saves_those_that_talk_to_each_other() -> None:
    """Of nine ranks a rank talks to those 1, 2, 4 and 8 away, in both directions round a ring: 6 of 8 others."""
    meshed, on_demand = run_ranks(connections_of_saves, 9, 256), run_ranks(connections_of_saves, 9, 8)
    assert {each[1:] for each in (*meshed, *on_demand)} == {(18.0, True)}
    assert min(each[0] for each in meshed) >= 8
    assert max(each[0] for each in on_demand) < min(each[0] for each in meshed)


def test_a_process_may_open_what_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        make_room(1000)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1256)
        make_room(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1256), "never less"
        make_room(2 * hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard, "what the system lets it"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def kept_by_a_launcher(asynchronous: str, rendezvous: str) -> str:
    """Return what this rank says when it asks for the group of saves after the store where ranks meet has gone."""
    place = Place(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), rendezvous)
    run = RunSpec(checkpoints=CheckpointsSpec(asynchronous=asynchronous))
    world = join_world("cpu", 1, place, run)

    def gone(*args: Any, **options: Any) -> Any:
        raise RuntimeError("the store is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", gone)
        try:
            group = world.groups.beside(timedelta(seconds=60))
        except RuntimeError as error:
            return str(error)
    found = torch.ones(1)
    dist.all_reduce(found, group=group)
    return f"{found.item():g} ranks"


def test_saves_ask_nothing_of_the_store_of_a_launcher_which_may_be_killed() -> None:
    """The save that a launcher's death asks for would be the first to need it: ranks ended with an error then."""
    assert run_ranks(kept_by_a_launcher, 2, "auto", f"{KEPT_STORE}n1:20000/x") == ["2 ranks"] * 2
    assert run_ranks(kept_by_a_launcher, 2, "off", f"{KEPT_STORE}n1:20000/x") == ["2 ranks"] * 2
    assert run_ranks(kept_by_a_launcher, 2, "auto", "env://") == ["the store is gone"] * 2, "it lives as long as rank 0"
