"""Ranks that torchrun started, or anything else that speaks torch's variables, as Ray Train does."""

from __future__ import annotations

from paceline.launch.launcher import Environ, Launcher, Ranks3, number_of
from paceline.supervise.told.place import KEPT_STORE

NODE_NUMBERS = ("GROUP_RANK", "NODE_RANK")  # torchrun's, and Ray Train's (2.60, ray/train/torch/config.py)


def ranks_of(environ: Environ) -> Ranks3 | None:
    """Return what torch's own variables say of a process's ranks."""
    rank, size = number_of(environ, "RANK"), number_of(environ, "WORLD_SIZE")
    return None if rank is None or size is None else (rank, size, number_of(environ, "LOCAL_RANK"))


def _ranks_on_node(environ: Environ) -> int | None:
    return number_of(environ, "LOCAL_WORLD_SIZE")


def _rendezvous(environ: Environ) -> str:
    """Return where ranks meet: in the store of torchrun's agent under a prefix of each restart, where it keeps one.

    Torch itself takes that store as it is, and ranks that were started again read the addresses of those before
    (torch 2.13, `_create_c10d_store`: "We create a new TCPStore for every retry", which its agent does not).
    """
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        return ""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "env://"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{KEPT_STORE}{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}/paceline-{attempt}"


TORCHRUN = Launcher(
    ranks=ranks_of,
    ranks_on_node=_ranks_on_node,
    rendezvous=_rendezvous,
    node=lambda environ: next((told for name in NODE_NUMBERS if (told := number_of(environ, name)) is not None), None),
    peer=lambda environ: "",
    variables=(
        "RANK", "LOCAL_RANK", *NODE_NUMBERS, "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    ),
    prefixes=("TORCHELASTIC_",),
)  # fmt: skip
