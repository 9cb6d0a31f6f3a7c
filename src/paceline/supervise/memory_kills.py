"""What the kernel tells of processes that it killed for want of memory (Linux, control groups of version 2)."""

from __future__ import annotations

from pathlib import Path

from paceline.units import plural

ROOT = Path("/sys/fs/cgroup")
USUAL = "out of memory is the usual reason for SIGKILL"


def own_group() -> Path:
    """Return the folder of this process's control group. Raises OSError where the system has none."""
    own = Path("/proc/self/cgroup").read_text().partition("0::")[2].split("\n")[0]
    return ROOT / own.lstrip("/")


def memory_kills() -> int | None:
    """Return how many processes of this one's control group the kernel has killed for memory; None where unknown."""
    try:
        lines = (own_group() / "memory.events").read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def why_killed(before: int | None) -> str:
    """Return why a process may have got SIGKILL, given the count before it did: as a fact only where that is known."""
    now = memory_kills()
    if before is None or now is None:
        return USUAL
    if now > before:
        killed = plural(now - before, "process")
        return f"out of memory: the kernel has killed {killed} of this run's control group for it"
    return f"{USUAL}, but the kernel has counted no such kill in this run's control group: somebody may have sent it"
