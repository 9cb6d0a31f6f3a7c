"""Which cores of its machine a rank computes on: an even part, near its device where the machine has several nodes.

A GPU hangs on one of a machine's memory nodes (NUMA), and a rank whose threads and pages are on another one sends
everything over the link between them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.units import plural

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
THREADS_VARIABLE, TORCHRUN = "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"


def split_cores(
    allowed: Sequence[int], nodes: Sequence[Sequence[int]], places: Sequence[int | None], rank: int
) -> list[int]:
    """Return the cores of the machine's rank number `rank`, in rising order; at least one, no one else's if it can be.

    `allowed` are the cores that all ranks may use together, `nodes` those of each memory node, `places` the node of
    each rank's device, None where it is not known. Ranks of one node share its cores evenly, ranks without one are
    spread over the nodes in order.
    """
    usable = [sorted(set(node) & set(allowed)) for node in nodes]
    usable = [node for node in usable if node] or [sorted(set(allowed))]
    numbers = {at: index for index, at in enumerate(at for at, node in enumerate(nodes) if set(node) & set(allowed))}
    ranks = len(places)
    homes = [
        at * len(usable) // ranks if place is None else numbers.get(place, at * len(usable) // ranks)
        for at, place in enumerate(places)
    ]
    cores, peers = usable[homes[rank]], [other for other in range(ranks) if homes[other] == homes[rank]]
    share = peers.index(rank)
    part = cores[share * len(cores) // len(peers) : (share + 1) * len(cores) // len(peers)]
    return part or [cores[share % len(cores)]]


def memory_nodes(folder: Path = NODES) -> list[list[int]]:
    """Return the cores of each memory node of this machine by its number; one entry where the system tells of none."""
    found = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        found[int(path.parent.name.removeprefix("node"))] = parse_cores(path.read_text())
    every = sorted(core for cores in found.values() for core in cores)
    return [found.get(number, []) for number in range(max(found) + 1)] if every else [list(range(os.cpu_count() or 1))]


def parse_cores(text: str) -> list[int]:
    """Return the numbers in a list of the kernel's: "0-3,8" is 0, 1, 2, 3, 8."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def node_of_device(address: str, folder: Path = PCI_DEVICES) -> int | None:
    """Return the memory node of a PCI device such as "0000:3b:00.0", None where the machine does not say."""
    path = folder / address.lower() / "numa_node"
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


def threads_not_heeded(threads: int, environ: Mapping[str, str]) -> str:
    """Return what is to be said of OMP_NUM_THREADS where it asks for other than the threads of a CPU device.

    Empty where it does not, and under torchrun, which sets it to 1 for all of its processes whatever anybody wants.
    """
    asked = environ.get(THREADS_VARIABLE, "").strip()
    if asked in ("", str(threads)) or TORCHRUN in environ:
        return ""
    return (
        f"{THREADS_VARIABLE} = {asked} is not heeded: each device computes on {plural(threads, 'thread')}, its share "
        "of the cores that this process may use; `taskset --cpu-list 0-3 paceline ...` says which these are"
    )


def is_bound(allowed: Sequence[int], online: int) -> bool:
    """Return whether somebody has given this process a part of the machine's cores already: srun, taskset, a cpuset."""
    return len(allowed) < online


def bind_process(cores: Sequence[int]) -> None:
    """Let this process, with all threads that it has, run on these cores alone."""
    tasks = Path("/proc/self/task")
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # a thread that has ended meanwhile
            continue
    os.sched_setaffinity(0, cores)
