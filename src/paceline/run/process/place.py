"""This process's place among its peers, as torchrun, srun or our own supervisor put it into the environment.

Reading these variables needs no torch; nothing else in the package takes orders from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import ConfigError


def ranks_from_environment(environ: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Return (rank, world size, local rank) as torchrun or srun put them there, or None outside of both.

    A shell that `srun --pty` opened is outside: its step is one task, and what is typed there starts its own ranks.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", environ["RANK"]))
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ and not _is_terminal(environ):
        return int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_LOCALID"])
    return None


def _is_terminal(environ: Mapping[str, str]) -> bool:
    """Return whether this is the terminal of `srun --pty`. A further srun with several tasks inherits the variable."""
    return "SLURM_PTY_PORT" in environ and environ["SLURM_STEP_NUM_TASKS"] == "1"


# What a launcher tells a process of its place; MPI libraries read theirs from variables of these beginnings.
PLACE_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
                   "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
PLACE_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PACELINE_", "PMI_", "PMIX_", "OMPI_")


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without this process's place, for processes that make a world of their own."""
    return {
        name: value
        for name, value in environ.items()
        if name not in PLACE_VARIABLES and not name.startswith(PLACE_PREFIXES)
    }


def device_index(local_rank: int, visible: int) -> int:
    """Return which of the devices that a process sees it computes on, of `visible` many.

    Slurm and Kubernetes may show every task a device of its own, which is then number 0 whatever the local rank.
    Raises ConfigError where several are visible and there are more ranks than devices.
    """
    if visible == 1:
        return 0
    if local_rank < visible:
        return local_rank
    raise ConfigError(
        f"local rank {local_rank} has no device",
        f"{visible} are visible on this node (CUDA_VISIBLE_DEVICES counts), and every rank needs one of its own",
        f"at most {visible} ranks a node, or one visible device for each task",
    )


def ranks_per_node(environ: Mapping[str, str], world_size: int) -> int:
    """Return how many of the ranks share this machine."""
    if "LOCAL_WORLD_SIZE" in environ:
        return int(environ["LOCAL_WORLD_SIZE"])
    # Slurm writes "4(x2),3": four tasks on each of two nodes, three on the next.
    return int(re.split(r"[(,]", environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))[0])


def first_host(nodes: str) -> str:
    """Return the first host name of a Slurm node list: "rack1node03" of "rack[1-2]node[03-07,9],login1"."""
    first = re.match(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", nodes)
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group()) if first else ""
    whole = first is None or nodes[first.end() :][:1] in ("", ",")  # nothing but a comma may end a name
    if not name or not whole or "[" in name:
        raise ConfigError(
            f"'{nodes}' is not a Slurm node list",
            "its first host name cannot be read",
            "set MASTER_ADDR and MASTER_PORT",
        )
    return name


def rendezvous_from(environ: Mapping[str, str]) -> str:
    """Return an init_method URL from what torchrun or srun provide."""
    if "PACELINE_RENDEZVOUS" in environ:
        return environ["PACELINE_RENDEZVOUS"]
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return "env://"
    if "SLURM_STEP_NODELIST" in environ:
        first = first_host(environ["SLURM_STEP_NODELIST"])
        # One port per job, from the range that is neither privileged nor ephemeral.
        return f"tcp://{first}:{20000 + int(environ.get('SLURM_JOB_ID', '0')) % 10000}"
    raise ConfigError(
        "the processes cannot find each other",
        "neither MASTER_ADDR and MASTER_PORT nor Slurm's variables are set",
        "start with `paceline train`, torchrun or srun",
    )
