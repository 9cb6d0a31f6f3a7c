"""Slurm as it is: what its tasks are told, and a whole job where Slurm is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import (
    ending,
    environment,
    is_running,
    records_of,
    run_patiently,
    steps_of,
    wait_for_step,
    wait_until,
    write_spec,
)

from paceline.errors import ConfigError
from paceline.launch.here import peer_here, place_here
from paceline.launch.slurm import SLURM, last_host
from paceline.session.nodes import launched
from paceline.supervise.nodes import interface
from paceline.supervise.parent import name_process
from paceline.supervise.told.place import Place

# As slurmstepd 22.05 has set them for the second task of `srun -N2 --ntasks-per-node=1`.
TASK = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "pn[1-2]", "SLURM_JOB_ID": "7"}  # fmt: skip
FIRST = {**TASK, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
NOWHERE = "a-host-that-nobody-knows.invalid"


@pytest.mark.parametrize("node, here", [(0, 3), (1, 3), (2, 1), (3, 2)])
def test_tasks_of_a_node_are_its_own(node: int, here: int) -> None:
    told = {**TASK, "SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1,2", "SLURM_NODEID": str(node)}
    assert SLURM.ranks_on_node(told) == here


def test_a_step_of_one_task_has_a_machine_of_its_own() -> None:
    """It trains on what the machine has, as without srun; so does a batch script whose submitter was in such a step."""
    alone = {**FIRST, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NODELIST": "pn1"}
    assert place_here(alone) is None
    assert place_here({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) is None
    assert place_here(FIRST) == Place(0, 2, 0, 1, "tcp://pn1:20007")


@pytest.mark.parametrize(
    ("nodes", "last"),
    [("pn[1-2]", "pn2"), ("gpu[03-07,9],login1", "login1"), ("a[7,9-12]", "a12"), ("a[7,9]", "a9"), ("n1", "n1"),
     ("n1,n2", "n2"), ("r[1-2]n[01-16]", "r2n16"), ("r[1-2]-ib", "r2-ib"), ("", "")],
)  # fmt: skip
def test_last_host_of_a_node_list(nodes: str, last: str) -> None:
    assert last_host(nodes) == last
    assert peer_here({"SLURM_STEP_NODELIST": nodes}) == last


def reached(monkeypatch: pytest.MonkeyPatch, towards: dict[str, str], here: list[str]) -> str:
    """Return where rank 0 is reached whose own name leads to its loopback, as Debian has it."""
    monkeypatch.setattr(launched, "_known", lambda host: ["127.0.1.1"])
    monkeypatch.setattr(launched, "address_towards", lambda host: towards.get(host, ""))
    monkeypatch.setattr(launched, "addresses_here", lambda: here)
    place = place_here(FIRST)
    assert place is not None
    return launched._reached(FIRST, place)


def test_rank_0_is_reached_where_another_machine_of_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster without a way out, and on one whose way out is another network than the one between nodes."""
    towards = {"pn2": "10.77.0.1", launched.FAR_AWAY: "192.168.0.7"}
    assert reached(monkeypatch, towards, ["127.0.0.1", "192.168.0.7", "10.77.0.1"]) == "10.77.0.1"
    assert reached(monkeypatch, {"pn2": "127.0.0.1", launched.FAR_AWAY: "10.1.1.1"}, []) == "10.1.1.1"
    assert reached(monkeypatch, {}, ["127.0.0.1", "10.77.0.1"]) == "10.77.0.1", "the network is unreachable"
    with pytest.raises(ConfigError, match="no address that other machines reach") as caught:
        reached(monkeypatch, {}, ["127.0.0.1"])
    assert "--rendezvous" in caught.value.try_


@pytest.mark.parametrize(
    ("known", "here", "address"),
    [
        (["10.0.0.5"], ["127.0.0.1", "10.0.0.5"], "10.0.0.5"),  # a pod's name leads to the pod
        (["10.96.0.9"], ["127.0.0.1", "10.0.0.5"], "10.0.0.5"),  # to a service in front of it, where nobody can listen
        (None, ["127.0.0.1", "10.0.0.5"], "10.0.0.5"),  # nowhere yet: the pod is not ready
        (["fd00::5"], ["10.0.0.5"], "fd00::5"),
    ],
)
def test_rank_0_in_a_pod_is_reached_by_the_others(
    monkeypatch: pytest.MonkeyPatch, known: list[str] | None, here: list[str], address: str
) -> None:
    """A PyTorchJob tells its pods nothing of machines: rank 0 was at its loopback, where no other pod finds it."""

    def found(host: str) -> list[str]:
        if known is None:
            raise ConfigError(f"'{host}' is not known here", "no such name")
        return known

    monkeypatch.setattr(launched, "_known", found)
    monkeypatch.setattr(launched, "address_towards", lambda host: "")
    monkeypatch.setattr(launched, "addresses_here", lambda: here)
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    # As Azure's jobs of a process for each GPU have it: a local rank, and not how many.
    for told in (pod, {**pod, "WORLD_SIZE": "16", "LOCAL_RANK": "0", "NODE_RANK": "0"}):
        place = place_here(told)
        assert place is not None
        assert launched._reached(told, place) == address
    alone = {**pod, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place = place_here(alone)
    assert place is not None and launched._reached(alone, place) == "127.0.0.1", "torchrun on one machine"


def test_addresses_of_this_machine() -> None:
    assert "127.0.0.1" in interface.addresses_here() and interface.interface_of("127.0.0.1") == "lo"
    assert interface.address_towards("127.0.0.1") == "127.0.0.1"
    assert interface.address_towards(NOWHERE) == "", "an error of the network is no way, not an end of the run"


def test_a_name_of_a_process_is_no_trap_for_whoever_ends_it() -> None:
    """Slurm's proctrack/linuxproc takes /proc/PID/stat apart at blanks, and passes over what it cannot read."""
    before = Path("/proc/self/comm").read_text().strip()
    try:
        name_process(f"rank-{10**9}-paceline")
        fields = Path("/proc/self/stat").read_text().split()
        assert fields[1].startswith("(rank-") and fields[1].endswith(")") and fields[2] in "RSD"
        assert int(fields[3]) == os.getppid()
        with pytest.raises(AssertionError):
            name_process("rank 0 paceline")
    finally:
        Path("/proc/self/comm").write_text(before)


def test_hosts_are_known_or_refused() -> None:
    assert launched._known("127.0.0.1") == ["127.0.0.1"]
    with pytest.raises(ConfigError, match="is not known here"):
        launched._known(NOWHERE)
    assert socket.gethostname()


ORPHAN = """
import os, signal, subprocess, sys, time
code = (
    "import os, signal, sys; from paceline.supervise.parent import end_with_step;"
    "end_with_step({'SLURM_TASK_PID': str(os.getpid() if sys.argv[1] == 'task' else os.getppid())});"
    "print(os.getpid(), flush=True); signal.pause()"
)
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
task = subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], text=True, **quiet)
print(task.stdout.readline().strip(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("what", "ends"), [("task", True), ("child of a task", False)])
def test_a_task_ends_with_the_slurmstepd_that_started_it(what: str, ends: bool) -> None:
    """Its job could not end it any more: seen under Slurm 22.05, where it trained on after `scancel`."""
    ended = run_patiently([sys.executable, "-c", ORPHAN, what])
    task = int(ended.stdout)
    try:
        if ends:
            wait_until(lambda: not is_running(task))
        assert is_running(task) is not ends
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(task, signal.SIGKILL)


def has_slurm() -> bool:
    """Return whether a Slurm takes jobs here."""
    if not all(map(shutil.which, ("srun", "sinfo", "squeue", "scancel"))):
        return False
    nodes = subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True, check=False)
    return any(state in nodes.stdout for state in ("idle", "mixed"))


@pytest.mark.skipif(not has_slurm(), reason="no Slurm takes jobs here (sinfo): srun is tried by its variables alone")
def test_a_step_of_a_real_slurm_is_stopped_by_its_signal_and_goes_on(tmp_path: Path) -> None:
    """USR1, as `--signal=USR1@120` sends it, saves and ends with 75; the same srun goes on to the end."""
    spec, job = write_spec(tmp_path, tmp_path / "run", 0, steps=60), f"paceline-{tmp_path.name}"
    words = ["srun", f"--job-name={job}", "--ntasks=2", sys.executable, "-m", "paceline", "train", str(spec)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
    ) as step:
        wait_for_step(tmp_path / "run", 3, step)
        subprocess.run(["scancel", "--signal=USR1", f"--name={job}"], check=True)
        said, _ = ending(step, 120)
    assert step.returncode == 75, said
    saved = records_of(tmp_path / "run", "run_ended")[-1]["step"]
    again = run_patiently(words, env=environment())
    assert again.returncode == 0, again.stderr
    assert records_of(tmp_path / "run", "run_started")[-1]["step"] == saved
    assert [step["step"] for step in steps_of(tmp_path / "run")] == list(range(1, 61))
