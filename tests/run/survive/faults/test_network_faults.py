"""Faults of the network: what the system is told to do, and where it is not told anything."""

from __future__ import annotations

import subprocess
import sys

import pytest
from networks import networks
from runs import environment, wait_until

from paceline.errors import ConfigError
from paceline.run.survive.faults.network import disturb
from paceline.spec.survive.faults import FaultSpec, read_faults

DISTURB = """
import sys
from paceline.run.survive.faults.network import disturb
from paceline.spec.survive.faults import FaultSpec
disturb(FaultSpec(kind=sys.argv[1], step=1, seconds=sys.argv[2] + " s"), "fault 1")
"""


def test_what_all_programs_share_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("paceline.run.survive.faults.network._has_own_network", lambda: False)
    for towards in ((), ("127.0.0.1",)):
        with pytest.raises(ConfigError, match=r"fault 1 .* cannot be"):
            disturb(FaultSpec(kind="cut", step=1, towards=towards), "fault 1 (cut) was made on purpose")


@pytest.mark.parametrize(("kind", "seconds", "shown"), [("cut", 0.0, "limit 0p"), ("slow_network", 0.5, "rate 8Mbit")])
def test_a_nodes_packets_are_dropped_or_slowed_and_let_through_again(kind: str, seconds: float, shown: str) -> None:
    with networks(1) as net:
        here = ["ip", "netns", "exec", net.names[0]]

        def queue() -> str:
            return subprocess.run([*here, "tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True).stdout

        struck = [*here, sys.executable, "-c", DISTURB, kind, str(seconds)]
        subprocess.run(struck, check=True, env=environment(GLOO_SOCKET_IFNAME="eth0"))
        if seconds:
            wait_until(lambda: shown not in queue())
        else:
            assert shown in queue()
            net.mend(0)
            assert shown not in queue()


TOWARDS = """
import sys
from paceline.run.survive.faults.network import disturb
from paceline.spec.survive.faults import FaultSpec
disturb(FaultSpec(kind="cut", step=1, towards=(sys.argv[1],), seconds=sys.argv[2] + " s"), "fault 1")
"""


def test_a_node_is_cut_from_some_nodes_and_reaches_the_others() -> None:
    """Between two groups of nodes: each half goes on talking among itself."""
    with networks(3) as net:
        here = ["ip", "netns", "exec", net.names[0]]

        def reaches(address: str) -> bool:
            words = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=20)"
            said = subprocess.run([*here, sys.executable, "-S", "-c", words, address], capture_output=True, text=True)
            return "Connection refused" in said.stderr  # somebody is there, at whose port 9 nobody listens

        assert reaches(net.addresses[1]) and reaches(net.addresses[2])
        struck = [*here, sys.executable, "-c", TOWARDS, net.addresses[2], "0"]
        subprocess.run(struck, check=True, env=environment(GLOO_SOCKET_IFNAME="eth0"))
        assert reaches(net.addresses[1]) and not reaches(net.addresses[2])
        subprocess.run([*struck[:-1], "0.5"], check=True, env=environment(GLOO_SOCKET_IFNAME="eth0"))
        wait_until(lambda: reaches(net.addresses[2]))


def test_a_cut_towards_what_is_no_address_is_refused() -> None:
    for fault, because in (
        ({"kind": "cut", "step": 3, "towards": ["node7"]}, 'towards "node7"'),
        ({"kind": "slow_network", "step": 3, "towards": ["10.0.0.3"]}, "has addresses in `towards`"),
    ):
        with pytest.raises(ConfigError, match=because):
            read_faults([fault])
