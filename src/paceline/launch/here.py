"""This process's place among its peers, from whichever environment started it."""

from __future__ import annotations

import ipaddress

from paceline.errors import ConfigError
from paceline.launch.launcher import Environ, Launcher
from paceline.launch.local import LOCAL
from paceline.launch.mpi import MPI
from paceline.launch.slurm import SLURM
from paceline.launch.torchrun import TORCHRUN
from paceline.supervise.told.place import Place

# Who is asked, in order: the first that knows counts. Under Slurm `mpirun` starts its own helpers by srun.
LAUNCHERS: tuple[Launcher, ...] = (LOCAL, TORCHRUN, MPI, SLURM)


def place_here(environ: Environ) -> Place | None:
    """Return the place that a launcher gave this process, or None where nobody started it as one of several.

    Where neither a local rank nor the number of ranks of a machine is told, and ranks meet at another address than a
    loopback, each has a machine of its own: so the pods of a PyTorchJob of Kubernetes are told. Raises ConfigError for
    a place that cannot be read, or is none.
    """
    ranks = next((told for launcher in LAUNCHERS if (told := launcher.ranks(environ))), None)
    if ranks is None:
        return None
    rank, size, local_rank = ranks
    rendezvous = next((url for launcher in LAUNCHERS if size > 1 and (url := launcher.rendezvous(environ))), "")
    on_node = ranks_on_node_told(environ)
    if on_node is None:
        on_node = 1 if local_rank is None and _is_elsewhere(meeting_host(environ, rendezvous)) else size
    place = Place(rank, size, rank % max(1, on_node) if local_rank is None else local_rank, on_node, rendezvous)
    _check(place)
    return place


def ranks_on_node_told(environ: Environ) -> int | None:
    """Return how many ranks a launcher says that this machine has; None where none says so."""
    return next((count for launcher in LAUNCHERS if (count := launcher.ranks_on_node(environ))), None)


def meeting_host(environ: Environ, rendezvous: str) -> str:
    """Return the host at which a launcher has ranks meet, "" where it tells none."""
    return environ.get("MASTER_ADDR") or rendezvous.partition("://")[2].rpartition(":")[0]


def are_all_here(environ: Environ, place: Place) -> bool:
    """Return whether all ranks are on this machine, as a launcher tells, or the address at which they meet."""
    is_told = ranks_on_node_told(environ) is not None or not _is_elsewhere(meeting_host(environ, place.rendezvous))
    return is_told and place.world_size <= place.ranks_on_node


def _is_elsewhere(host: str) -> bool:
    """Return whether other machines may reach a host by this name: whether it is none of a loopback."""
    try:
        return not ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.partition(".")[0] not in ("", "localhost", "ip6-localhost")


def _check(place: Place) -> None:
    """Raise ConfigError for a place that there is not: its process would be waited for, or would wait, for ever."""
    if not (0 <= place.rank < place.world_size and place.local_rank >= 0 and place.ranks_on_node > 0):
        raise ConfigError(
            f"rank {place.rank} of {place.world_size}, local rank {place.local_rank} of {place.ranks_on_node}, "
            "is no place among processes",
            "both are counted from 0: RANK, WORLD_SIZE and LOCAL_RANK, or Slurm's variables, tell them",
            "look at what the launcher sets, or unset it to start on this machine alone",
        )


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
