"""This process's place among its peers, as torchrun, srun or our own supervisor put it into the environment.

Reading these variables needs no torch; nothing else in the package takes orders from the environment.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import ConfigError


def ranks_from_environment(environ: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Return (rank, world size, local rank) as torchrun or srun put them there, or None outside of both."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", environ["RANK"]))
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_LOCALID"])
    return None


def rendezvous_from(environ: Mapping[str, str]) -> str:
    """Return an init_method URL from what torchrun or srun provide."""
    if "PACELINE_RENDEZVOUS" in environ:
        return environ["PACELINE_RENDEZVOUS"]
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return "env://"
    if "SLURM_STEP_NODELIST" in environ:
        first = environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
        # One port per job, from the range that is neither privileged nor ephemeral.
        return f"tcp://{first}:{20000 + int(environ.get('SLURM_JOB_ID', '0')) % 10000}"
    raise ConfigError(
        "the processes cannot find each other",
        "neither MASTER_ADDR and MASTER_PORT nor Slurm's variables are set",
        "start with `paceline train`, torchrun or srun",
    )
