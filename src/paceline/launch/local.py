"""Ranks on this machine, started by Paceline's own supervisor (supervise/supervisor.py)."""

from __future__ import annotations

from paceline.launch.launcher import Environ, Launcher, Ranks3, number_of
from paceline.launch.torchrun import ranks_of
from paceline.supervise.told.place import RENDEZVOUS


def _ranks(environ: Environ) -> Ranks3 | None:
    return ranks_of(environ) if RENDEZVOUS in environ else None


def _ranks_on_node(environ: Environ) -> int | None:
    found = _ranks(environ)
    return (number_of(environ, "LOCAL_WORLD_SIZE") or found[1]) if found else None  # all, where nothing else is said


LOCAL = Launcher(
    ranks=_ranks,
    ranks_on_node=_ranks_on_node,
    rendezvous=lambda environ: environ.get(RENDEZVOUS, ""),
    node=lambda environ: None,
    peer=lambda environ: "",
    prefixes=("PACELINE_",),
)
