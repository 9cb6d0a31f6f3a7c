"""Ranks that `mpirun` or `mpiexec` started, of Open MPI or of a Hydra (MPICH, Intel MPI): none of it speaks MPI here.

Open MPI: docs.open-mpi.org, "Environment variables set for MPI applications". Hydra tells PMI_RANK and PMI_SIZE, and of
a machine MPI_LOCALRANKID and MPI_LOCALNRANKS; tasks of srun have the first two as well, and are Slurm's.
"""

from __future__ import annotations

import zlib

from paceline.launch.launcher import Environ, Launcher, Ranks3, number_of

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # any that tells one job of a machine from the next
LOOPBACK = "127.0.0.1"


def _names(environ: Environ) -> tuple[str, str, str, str] | None:
    """Return the variables of a rank, the ranks, a local rank and those of a machine, as far as all are told.

    A job of one process is outside: it has a machine of its own, on which it starts its own ranks.
    """
    found = next((names for names in (OPEN_MPI, HYDRA) if all(environ.get(name, "").strip() for name in names)), None)
    return found if found and number_of(environ, found[1]) != 1 else None


def _ranks(environ: Environ) -> Ranks3 | None:
    names = _names(environ)
    if names is None:
        return None
    rank, size, local_rank = (number_of(environ, name) for name in names[:3])
    assert rank is not None and size is not None, "all are told"
    return rank, size, local_rank


def _ranks_on_node(environ: Environ) -> int | None:
    names = _names(environ)
    return number_of(environ, names[3]) if names else None


def _rendezvous(environ: Environ) -> str:
    """Return where the ranks of one machine meet; "" where they are on several, of which nobody tells an address.

    One port per job, from the range that is neither privileged nor ephemeral, as Slurm's have it. Of a job without a
    name it is "" too: those of two jobs would meet each other.
    """
    names, job = _names(environ), next((environ[name] for name in JOBS if environ.get(name)), "")
    if names is None or not job or number_of(environ, names[1]) != number_of(environ, names[3]):
        return ""
    return f"tcp://{LOOPBACK}:{20000 + zlib.crc32(job.encode()) % 10000}"


MPI = Launcher(
    ranks=_ranks,
    ranks_on_node=_ranks_on_node,
    rendezvous=_rendezvous,
    node=lambda environ: None,
    peer=lambda environ: "",
    prefixes=("OMPI_", "PMI_", "PMIX_", "MPI_LOCAL"),
)
