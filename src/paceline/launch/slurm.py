"""Ranks that Slurm's srun started: https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES."""

from __future__ import annotations

import re

from paceline.errors import ConfigError
from paceline.launch.launcher import Environ, Launcher, Ranks3, number_of


def _ranks(environ: Environ) -> Ranks3 | None:
    """Return the ranks of a task of a step.

    A step of one task is outside: it has a machine of its own, on which it starts its own ranks. The shell of
    `srun --pty` is one, and a batch script may have inherited such a step's variables from whoever submitted it.
    """
    rank, size = number_of(environ, "SLURM_PROCID"), number_of(environ, "SLURM_STEP_NUM_TASKS")
    return None if rank is None or size is None or size == 1 else (rank, size, number_of(environ, "SLURM_LOCALID"))


def _ranks_on_node(environ: Environ) -> int | None:
    """Return how many tasks this node has: Slurm writes "4(x2),3", four on each of two nodes and three on the next."""
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(int(times or 1))
    ]
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[min(node, len(counts) - 1)] if counts else None


def _rendezvous(environ: Environ) -> str:
    if "SLURM_STEP_NODELIST" not in environ:
        return ""
    # One port per job, from the range that is neither privileged nor ephemeral.
    port = 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 10000
    return f"tcp://{first_host(environ['SLURM_STEP_NODELIST'])}:{port}"


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


def last_host(nodes: str) -> str:
    """Return the last host name of a Slurm node list: "login1" of "node[03-07,9],login1", "n4" of "n[1-4]"."""
    last = re.search(r"(?:[^\[\],\s]|\[[^\[\]]*\])+$", nodes)
    return re.sub(r"\[(?:[^\]]*[,-])?([^\],-]+)\]", r"\1", last.group()) if last else ""


SLURM = Launcher(
    ranks=_ranks,
    ranks_on_node=_ranks_on_node,
    rendezvous=_rendezvous,
    node=lambda environ: int(environ["SLURM_NODEID"]) if "SLURM_NODEID" in environ else None,
    peer=lambda environ: last_host(environ.get("SLURM_STEP_NODELIST", "")),
    prefixes=("SLURM_", "PMI_", "PMIX_", "OMPI_"),  # MPI libraries read their place from the last three
)
