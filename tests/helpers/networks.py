"""Nodes of a network for tests: a network namespace each, behind one bridge, where this machine lets us make them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Networks:
    """Network namespaces that reach each other: their names and addresses, node by node."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    @property
    def within(self) -> list[list[str]]:
        """The words before a command that put it on a node; each has a RAM disk of its own as well."""
        alone = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return [["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", alone, "sh"] for name in self.names]

    def mend(self, number: int) -> None:
        """Let a node's packets through again."""
        words = ["ip", "netns", "exec", self.names[number], "tc", "qdisc", "del", "dev", "eth0", "root"]
        subprocess.run(words, check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def networks(count: int) -> Iterator[Networks]:
    """Give so many nodes of one network; skip the test where this machine has none to give."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, ip and tc")
    mark, base = secrets.token_hex(2), f"10.{100 + secrets.randbelow(100)}.{secrets.randbelow(250)}"
    bridge, names = f"plb{mark}", tuple(f"pl{mark}-{number}" for number in range(count))
    addresses = tuple(f"{base}.{number + 1}" for number in range(count))
    try:
        try:
            _ip("link", "add", bridge, "type", "bridge")
            for number, name in enumerate(names):
                _ip("netns", "add", name)
                _ip("link", "add", f"plv{mark}{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("link", "set", f"plv{mark}{number}", "master", bridge, "up")
                _ip("-n", name, "addr", "add", f"{addresses[number]}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("link", "set", bridge, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', error)}")
        yield Networks(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
