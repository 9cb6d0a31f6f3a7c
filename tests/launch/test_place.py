"""How a process finds its place under torchrun and under srun."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from nodes import PORTS, free_port
from runs import ending, environment, steps_of, write_spec
from started.popen import Warm

from paceline.cluster.here.prepare import device_index
from paceline.errors import ConfigError
from paceline.launch.here import are_all_here, node_here, place_here, without_place
from paceline.launch.slurm import first_host
from paceline.run.process.world import World, join_world
from paceline.session import begin
from paceline.session.begin import devices_left, on_machines
from paceline.supervise.told.place import Place

LOCAL = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "PACELINE_RENDEZVOUS": "file:///x"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a",
            "MASTER_PORT": "1"}  # fmt: skip
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "12345"}  # fmt: skip


def test_places() -> None:
    assert place_here(LOCAL) == Place(1, 3, 1, 3, "file:///x")
    assert place_here(TORCHRUN) == Place(5, 8, 1, 4, "env://")
    assert place_here(SRUN) == Place(3, 6, 0, 3, "tcp://n1:22345")
    assert place_here({}) is None
    assert place_here({"SLURM_PROCID": "0"}) is None, "a batch script is not a step"
    assert place_here({"RANK": "0", "WORLD_SIZE": "2"}) == Place(0, 2, 0, 2), "torch's variables, set by something"


def test_whoever_is_asked_first_counts() -> None:
    """Ranks of our own, started inside a step of Slurm's, are theirs; torchrun inside of srun likewise."""
    assert place_here({**SRUN, **LOCAL}) == Place(1, 3, 1, 3, "file:///x")
    assert place_here({**SRUN, **TORCHRUN}) == Place(5, 8, 1, 4, "env://")
    assert place_here({**SRUN, "RANK": "1", "WORLD_SIZE": "6"}) == Place(1, 6, 1, 3, "tcp://n1:22345")


def test_workers_of_ray_train_are_ranks_of_torch() -> None:
    """Their variables are those of torchrun but for the machine's number (Ray 2.60, ray/train/torch/config.py)."""
    worker = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1",
              "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "4711"}  # fmt: skip
    place = place_here(worker)
    assert place == Place(2, 3, 0, 1, "env://")
    assert node_here(worker, place) == 1, "two workers on the first machine, one on the second"
    assert without_place(worker) == {}


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-n1-77@1"}  # fmt: skip
HERE = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MASTER = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({**OPEN_MPI, **MASTER}, Place(3, 4, 1, 2, "env://")),
        ({**HYDRA, **MASTER}, Place(3, 4, 1, 2, "env://")),
        (HERE, Place(3, 4, 3, 4, "tcp://127.0.0.1:20961")),
        ({**HERE, "PMIX_NAMESPACE": "prterun-n1-78@1"}, Place(3, 4, 3, 4, "tcp://127.0.0.1:20060")),
        (OPEN_MPI, Place(3, 4, 1, 2, "")),  # on two machines, and nobody says where to meet: refused in words
        ({**HYDRA, "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}, Place(3, 4, 3, 4, "")),  # the job has no name
        ({**SRUN, **OPEN_MPI, "SLURM_STEP_NODELIST": "n[1-2]"}, Place(3, 4, 1, 2, "tcp://n1:22345")),  # its helpers'
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "6"}, Place(3, 6, 0, 3, "tcp://n1:22345")),  # srun --mpi=pmi2
        ({**OPEN_MPI, **TORCHRUN}, Place(5, 8, 1, 4, "env://")),
        ({**HERE, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),  # one process: all is its own
    ],
)  # fmt: skip
def test_ranks_of_mpirun(told: dict[str, str], place: Place | None) -> None:
    """Each of them took itself for the whole run: one trained on all devices, and the others found it in use."""
    assert place_here(told) == place
    assert without_place(told) == {}


def test_ranks_that_nobody_tells_where_to_meet_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="cannot find each other") as refused:
        join_world("cpu", place=place_here(OPEN_MPI))
    assert "-x MASTER_ADDR=" in refused.value.try_


@pytest.mark.parametrize(("here", "others", "counted"), [(8, 8, 8), (8, 4, 1), (16, 16, 16)])
def test_ranks_of_machines_are_counted_where_no_launcher_tells(
    monkeypatch: pytest.MonkeyPatch, here: int, others: int, counted: int
) -> None:
    """Some clouds set LOCAL_RANK alone: two machines of eight were priced as one of sixteen."""
    asked = list[str]()

    def told_at(machine: str, item: object) -> dict[str, list[int]]:
        asked.append(machine)
        return {machine: [0] * here}

    known = SimpleNamespace(size=16, told_at=told_at, maximum=lambda own: [max(here, others), -min(here, others)])
    told = {**POD, "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    place = place_here(told)
    assert place is not None and place.ranks_on_node == 16
    assert on_machines(cast(World, known), place) == dataclasses.replace(place, ranks_on_node=counted)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert on_machines(cast(World, known), place) == place and len(asked) == 1, "as it was told"


def test_one_process_on_a_machine_of_several_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begin, "visible_gpus", lambda: [None] * 8)
    alone, among = Place(0, 1, 0, 1, ""), Place(0, 2, 0, 1, "")
    assert "one of 8 GPUs" in devices_left("cuda", alone)
    assert devices_left("cpu", alone) == devices_left("cuda", among) == ""


POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


@pytest.mark.parametrize(
    ("told", "place", "node", "here"),
    [
        (POD, Place(1, 2, 0, 1, "env://"), 1, False),  # a PyTorchJob's pod: alone on what it sees
        ({**POD, "RANK": "0"}, Place(0, 2, 0, 1, "env://"), 0, False),
        ({**POD, "MASTER_ADDR": "localhost"}, Place(1, 2, 1, 2, "env://"), 0, True),  # by hand, on one machine
        ({**POD, "MASTER_ADDR": "127.0.0.1"}, Place(1, 2, 1, 2, "env://"), 0, True),
        ({**POD, "MASTER_ADDR": "::1", "LOCAL_RANK": ""}, Place(1, 2, 1, 2, "env://"), 0, True),
        ({**POD, "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "NODE_RANK": "1"},  # nothing says how many: all
         Place(9, 16, 1, 16, "env://"), 1, False),
        ({**POD, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(1, 2, 1, 2, "env://"), 0, True),
        ({**SRUN, "RANK": "4", "WORLD_SIZE": "6"}, Place(4, 6, 1, 3, "tcp://n1:22345"), 1, False),
        ({"RANK": "", "WORLD_SIZE": ""}, None, 0, False),  # a template's, not filled in
    ],
)  # fmt: skip
def test_what_is_not_told_of_machines(told: dict[str, str], place: Place | None, node: int, here: bool) -> None:
    assert place_here(told) == place
    if place is not None:
        assert (node_here(told, place), are_all_here(told, place)) == (node, here)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({**POD, "RANK": "two"}, "RANK = 'two' is no number"),
        ({**SRUN, "SLURM_LOCALID": "0x"}, "SLURM_LOCALID = '0x' is no number"),
        ({**POD, "RANK": "2"}, "rank 2 of 2"),  # counted from 1: it would be waited for
        ({**POD, "RANK": "-1"}, "rank -1 of 2"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "local rank -1 of 4"),
    ],
)
def test_what_is_no_place_is_refused(told: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        place_here(told)


def test_processes_of_their_own_see_nothing_of_a_place() -> None:
    kept = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    assert without_place({**kept, **LOCAL, **TORCHRUN, **SRUN, "PMI_RANK": "3", "TORCHELASTIC_RUN_ID": "x"}) == kept


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [
        (0, 8, 0),
        (7, 8, 7),
        (3, 1, 0),  # srun --gpus-per-task=1, or a pod for each rank: each sees its own device alone
        (0, 1, 0),
        (1, 1, 0),  # two ranks on a machine's only GPU
    ],
)
def test_a_rank_takes_the_device_that_it_sees(local_rank: int, visible: int, index: int) -> None:
    assert device_index(local_rank, visible) == index


@pytest.mark.parametrize(("local_rank", "visible"), [(2, 2), (4, 3)])
def test_more_ranks_than_devices_are_refused(local_rank: int, visible: int) -> None:
    with pytest.raises(ConfigError, match=f"local rank {local_rank} has no device") as caught:
        device_index(local_rank, visible)
    assert f"{visible} are visible" in caught.value.because


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-07,9],login1", "gpu03"), ("n1", "n1"), ("n1,n2", "n1"), ("a[7,9-12]", "a7"), ("r[1-2]-ib,x", "r1-ib")],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("rack[01-02]node[003-104,200]-ib,login", "rack01node003-ib"),
        ("[3,5-7]n[08]", "3n08"),
        ("c[1,3][5-6]", "c15"),
    ],
)
def test_first_host_of_several_groups(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",n1", "n[1-2", "n[]", "n1]", "n[-3]", "n[[1]]"])
def test_what_is_no_node_list(nodes: str) -> None:
    with pytest.raises(ConfigError, match="is not a Slurm node list"):
        first_host(nodes)


def test_a_terminal_of_srun_is_no_rank() -> None:
    """`srun --pty bash` sets what a step of one task has, and the port of its terminal; later sruns inherit that."""
    terminal = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_PTY_PORT": "41233"}
    assert place_here(terminal) is None
    assert place_here({**terminal, **SRUN}) == place_here(SRUN)
    by_hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert place_here({**terminal, **by_hand}) == Place(1, 2, 1, 2)


def test_processes_that_nobody_tells_where_to_meet_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot find each other"):
        join_world("cpu", place=Place(0, 2, 0, 2))
    assert join_world("cpu", place=place_here({"RANK": "0", "WORLD_SIZE": "1"})).size == 1


SRUN_TASK = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
MPI_RANK = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("shared", "job", "numbers"),
    [
        pytest.param(SRUN_TASK, "SLURM_JOB_ID", ("SLURM_PROCID", "SLURM_LOCALID"), id="srun"),
        pytest.param(
            MPI_RANK, "PMIX_NAMESPACE", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"), id="mpirun",
            marks=pytest.mark.deep,
        ),
    ],
)  # fmt: skip
def test_a_launcher_starts_a_run(tmp_path: Path, shared: dict[str, str], job: str, numbers: tuple[str, ...]) -> None:
    """Two processes with the variables that the launcher sets train one run together."""
    spec = write_spec(tmp_path, tmp_path / "run", devices=2, plan="dp_shard = 2", steps=3)
    told = {**shared, job: str(free_port() - PORTS.start), "GLOO_SOCKET_IFNAME": "lo"}  # where its ranks meet
    ranks = [
        Warm(
            [sys.executable, "-m", "paceline", "train", str(spec)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment(**told, **dict.fromkeys(numbers, str(rank))),
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        _, stderr = ending(process, 90)
        assert process.returncode == 0, stderr
    assert [record["step"] for record in steps_of(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run" / "report.html").exists()
