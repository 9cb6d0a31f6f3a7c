"""Ranks that Slurm's srun started: https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES."""

from __future__ import annotations

import re
import signal

from paceline.errors import ConfigError
from paceline.launch.launcher import Environ, Launcher, Ranks3


def _ranks(environ: Environ) -> Ranks3 | None:
    """Return the ranks of a task of a step.

    A shell that `srun --pty` opened is outside: its step is one task, and what is typed there starts its own ranks.
    """
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ or _is_terminal(environ):
        return None
    return int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_LOCALID"])


def _is_terminal(environ: Environ) -> bool:
    """Return whether this is the terminal of `srun --pty`. A further srun with several tasks inherits the variable."""
    return "SLURM_PTY_PORT" in environ and environ["SLURM_STEP_NUM_TASKS"] == "1"


def _ranks_on_node(environ: Environ) -> int | None:
    # Slurm writes "4(x2),3": four tasks on each of two nodes, three on the next.
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return int(re.split(r"[(,]", tasks)[0]) if tasks else None


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


SLURM = Launcher(
    ranks=_ranks,
    ranks_on_node=_ranks_on_node,
    rendezvous=_rendezvous,
    node=lambda environ: int(environ["SLURM_NODEID"]) if "SLURM_NODEID" in environ else None,
    ends_with=(signal.SIGTERM, signal.SIGUSR1),  # the latter where `--signal=USR1@SECONDS` asks for it
    prefixes=("SLURM_", "PMI_", "PMIX_", "OMPI_"),  # MPI libraries read their place from the last three
)
