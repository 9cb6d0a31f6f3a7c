"""Faults of the network: what a node sends is lost, or goes slowly, by the system's traffic control (Linux, `tc`).

What is lost on its way to some nodes alone is so by routes that lead nowhere (`ip route`).
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from paceline.errors import ConfigError
from paceline.spec.survive.faults import FaultSpec

Disturbing = tuple[list[str], list[str]]  # the words of a command, and of the one that takes back what it did

LOOPBACK = "lo"
NOTHING = ["pfifo", "limit", "0"]  # a queue that takes no packet


def disturb(fault: FaultSpec, told: str) -> None:
    """Cut this rank's node off, or from some nodes (`cut`), or make its network slow (`slow_network`), for its seconds.

    Raises ConfigError where this process may not, or where other programs of the machine would be struck as well.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", LOOPBACK)
    because = _why_not(fault, interface)
    if because:
        raise ConfigError(
            f"{told} and cannot be", because, "run the nodes as root, each in a network namespace of its own (ip netns)"
        )
    commands = [_towards(address) for address in fault.towards] or [_all_that_is_sent(fault, interface)]
    for words, _ in commands:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ConfigError(
                f"{told} and cannot be", f"{words[0]} says: {done.stderr.strip()}", "run the nodes as root"
            )
    if fault.seconds:
        # In a session of its own: the network must come back whatever the fault does to this rank.
        mend = "; ".join([f"sleep {fault.seconds}", *(shlex.join(words) for _, words in commands)])
        subprocess.Popen(["sh", "-c", mend], start_new_session=True, close_fds=True)


def _all_that_is_sent(fault: FaultSpec, interface: str) -> Disturbing:
    slow = ["tbf", "rate", f"{fault.bandwidth}bps", "burst", "16k", "latency", "2s"]  # tc's "bps" are bytes
    how = NOTHING if fault.kind == "cut" else slow
    return (
        ["tc", "qdisc", "replace", "dev", interface, "root", *how],
        ["tc", "qdisc", "del", "dev", interface, "root"],
    )


def _towards(address: str) -> Disturbing:
    one = ["blackhole", f"{address}/{ipaddress.ip_address(address).max_prefixlen}"]
    family = f"-{ipaddress.ip_address(address).version}"
    return ["ip", family, "route", "replace", *one], ["ip", family, "route", "del", *one]


def _why_not(fault: FaultSpec, interface: str) -> str:
    tool = "ip" if fault.towards else "tc"
    if shutil.which(tool) is None:
        return f"there is no `{tool}` on this machine"
    if os.geteuid() != 0:
        return "only root may change what the network does"
    is_shared = any(ipaddress.ip_address(each).is_loopback for each in fault.towards) or not fault.towards
    if is_shared and interface == LOOPBACK and not _has_own_network():
        return f"the ranks meet over {LOOPBACK}, which all programs of this machine share"
    return ""


def _has_own_network() -> bool:
    """Return whether this process is in another network namespace than the machine's first process."""
    try:
        return Path("/proc/self/ns/net").readlink() != Path("/proc/1/ns/net").readlink()
    except OSError:
        return False
