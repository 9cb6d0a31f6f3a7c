"""Faults of the network: what a node sends is lost, or goes slowly, by the system's traffic control (Linux, `tc`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from paceline.errors import ConfigError
from paceline.spec.survive.faults import FaultSpec

LOOPBACK = "lo"
NOTHING = ["pfifo", "limit", "0"]  # a queue that takes no packet


def disturb(fault: FaultSpec, told: str) -> None:
    """Cut this rank's node off (`cut`), or make its network slow (`slow_network`), for a fault's seconds.

    Raises ConfigError where this process may not, or where other programs of the machine would be struck as well.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    because = _why_not(interface)
    if because:
        raise ConfigError(
            f"{told} and cannot be", because, "run the nodes as root, each in a network namespace of its own (ip netns)"
        )
    slow = ["tbf", "rate", f"{fault.bandwidth}bps", "burst", "16k", "latency", "2s"]  # tc's "bps" are bytes
    how = NOTHING if fault.kind == "cut" else slow
    words = ["tc", "qdisc", "replace", "dev", interface, "root", *how]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{told} and cannot be", f"tc says: {done.stderr.strip()}", "run the nodes as root")
    if fault.seconds:
        # In a session of its own: the network must come back whatever the fault does to this rank.
        mend = f"sleep {fault.seconds}; tc qdisc del dev {interface} root"
        subprocess.Popen(["sh", "-c", mend], start_new_session=True, close_fds=True)


def _why_not(interface: str) -> str:
    if shutil.which("tc") is None:
        return "there is no `tc` on this machine"
    if os.geteuid() != 0:
        return "only root may change what the network does"
    if interface == LOOPBACK and not _has_own_network():
        return f"the ranks meet over {LOOPBACK}, which all programs of this machine share"
    return ""


def _has_own_network() -> bool:
    """Return whether this process is in another network namespace than the machine's first process."""
    try:
        return Path("/proc/self/ns/net").readlink() != Path("/proc/1/ns/net").readlink()
    except OSError:
        return False
