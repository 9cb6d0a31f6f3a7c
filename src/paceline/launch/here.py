"""This process's place among its peers, from whichever environment started it."""

from __future__ import annotations

from paceline.launch.launcher import Environ, Launcher
from paceline.launch.local import LOCAL
from paceline.launch.slurm import SLURM
from paceline.launch.torchrun import TORCHRUN
from paceline.supervise.told.place import Place

LAUNCHERS: tuple[Launcher, ...] = (LOCAL, TORCHRUN, SLURM)  # who is asked, in order: the first that knows counts


def place_here(environ: Environ) -> Place | None:
    """Return the place that a launcher gave this process, or None where nobody started it as one of several.

    Raises ConfigError for a place that cannot be read.
    """
    ranks = next((told for launcher in LAUNCHERS if (told := launcher.ranks(environ))), None)
    if ranks is None:
        return None
    rank, size, local_rank = ranks
    on_node = next((count for launcher in LAUNCHERS if (count := launcher.ranks_on_node(environ))), size)
    rendezvous = next((url for launcher in LAUNCHERS if size > 1 and (url := launcher.rendezvous(environ))), "")
    return Place(rank, size, local_rank, on_node, rendezvous)


def node_here(environ: Environ, place: Place) -> int:
    """Return the number of the machine that this process runs on, as its launcher counts machines."""
    told = next((number for launcher in LAUNCHERS if (number := launcher.node(environ)) is not None), None)
    return place.rank // max(1, place.ranks_on_node) if told is None else told


def peer_here(environ: Environ) -> str:
    """Return the name of a machine of the run that is not the first one, "" where its launcher tells none."""
    return next((name for launcher in LAUNCHERS if (name := launcher.peer(environ))), "")


def without_place(environ: Environ) -> dict[str, str]:
    """Return the environment without this process's place, for processes that make a world of their own."""
    variables = {name for launcher in LAUNCHERS for name in launcher.variables}
    prefixes = tuple(prefix for launcher in LAUNCHERS for prefix in launcher.prefixes)
    return {name: value for name, value in environ.items() if name not in variables and not name.startswith(prefixes)}
