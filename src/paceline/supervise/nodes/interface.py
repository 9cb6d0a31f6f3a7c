"""This machine's interfaces and addresses: ranks meet over the one that nodes meet over, whatever host names say."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from collections.abc import Iterator

DISCARD = 9  # a port of any host: https://www.rfc-editor.org/rfc/rfc863
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address, or "" where the system does not say."""
    return next((name for name, found in _interfaces() if found == address), "")


def addresses_here() -> list[str]:
    """Return the IPv4 addresses of this machine's interfaces, in their order; none where the system does not say."""
    return [address for _, address in _interfaces()]


def address_towards(host: str) -> str:
    """Return this machine's address on the way to another, "" where there is no way. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, DISCARD))
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield the name and the IPv4 address of each interface that has one."""
    if sys.platform != "linux":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no such address
                continue
            yield name, socket.inet_ntoa(found[20:24])
