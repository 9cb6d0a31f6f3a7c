"""The network interface that has an address: ranks are told to meet over it, not over what their host name leads to."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address, or "" where the system does not say."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""
