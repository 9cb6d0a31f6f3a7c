"""Ranks that torchrun started, or anything else that speaks torch's variables."""

from __future__ import annotations

import signal

from paceline.launch.launcher import Environ, Launcher, Ranks3


def ranks_of(environ: Environ) -> Ranks3 | None:
    """Return what torch's own variables say of a process's ranks."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", environ["RANK"]))


def _ranks_on_node(environ: Environ) -> int | None:
    return int(environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in environ else None


TORCHRUN = Launcher(
    ranks=ranks_of,
    ranks_on_node=_ranks_on_node,
    rendezvous=lambda environ: "env://" if "MASTER_ADDR" in environ and "MASTER_PORT" in environ else "",
    ends_with=(signal.SIGTERM,),
    variables=(
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    ),
    prefixes=("TORCHELASTIC_",),
)  # fmt: skip
