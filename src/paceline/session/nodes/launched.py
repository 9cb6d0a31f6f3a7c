"""Runs whose processes torchrun or srun started: a process supervises the ranks that it was started for.

A process for each device is then a node of one device: its rank is a process of its own, which is started again, or
goes on in another world, while what the launcher started stays. So a launcher's bindings hold (cores, devices), and it
ends nothing as long as we go on. With `run.nodes.count` as many as there are processes, each has a whole machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.cluster.groups import group_specs
from paceline.errors import ConfigError, RunInUse
from paceline.launch.here import are_all_here, meeting_host, node_here, peer_here
from paceline.launch.launcher import Environ
from paceline.launch.mpi import LOOPBACK
from paceline.lock import take
from paceline.patience import Patience
from paceline.session.nodes.attendance import LOOK_SECONDS, Seat
from paceline.spec.arguments import run_directory
from paceline.spec.load import Spec
from paceline.spec.survive.nodes import PORT
from paceline.supervise.nodes.interface import address_towards, addresses_here
from paceline.supervise.parent import NODE_VARIABLE
from paceline.supervise.supervisor import is_supervised
from paceline.supervise.told.place import Place

FAR_AWAY = "192.0.2.1"  # of a network that is for documents alone: nothing is sent there


def is_attended(spec: Spec, place: Place) -> bool:
    """Return whether a process that a launcher started supervises a rank, or a node, instead of being a rank."""
    if is_supervised() or place.world_size == 1 or not place.rendezvous:
        return False
    return spec.run.recovery.supervise and spec.run.recovery.may_go_on and not _has_groups()


def as_node(spec: Spec, place: Place, environ: Environ) -> tuple[Spec, Seat]:
    """Return the spec of this process as a node of the run, and what the ranks of such a node are told.

    Raises ConfigError where the spec asks for another number of nodes, or of devices, than there are processes, and
    RunInUse on rank 0 where another run has the directory.
    """
    if place.rank == 0:
        _wait_for(run_directory(spec), spec.run.nodes.lost_after)
    nodes = spec.run.nodes
    if nodes.count not in (1, place.world_size):
        raise ConfigError(
            f"run.nodes.count = {nodes.count}, and {place.world_size} processes were started",
            "a process that a launcher has started is a node, or a device",
            f"--nodes {place.world_size} with a process on each node, or leave out --nodes",
        )
    where = nodes.rendezvous or f"{_bracketed(_reached(environ, place))}:{PORT}"
    own = dataclasses.replace(nodes, count=place.world_size, node=place.rank, rendezvous=where)
    if nodes.count == place.world_size:
        return dataclasses.replace(spec, run=dataclasses.replace(spec.run, nodes=own)), Seat()
    own = dataclasses.replace(own, devices=1)
    seat = Seat(
        {
            NODE_VARIABLE: str(node_here(environ, place)),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.ranks_on_node),
        },
        place.ranks_on_node,
    )
    return dataclasses.replace(for_peers(spec, place), run=dataclasses.replace(spec.run, nodes=own)), seat


def for_peers(spec: Spec, place: Place) -> Spec:
    """Return the spec on as many devices as there are processes."""
    devices = place.world_size
    if spec.cluster.groups:
        stated = sum(own.devices for own in group_specs(spec.cluster).values())
        if stated != devices:
            raise ConfigError(
                f"the groups of cluster.groups have {stated} devices",
                f"{devices} processes were started",
                f"start {stated} processes, those of the first group first",
            )
        return spec
    if spec.cluster.devices not in (0, devices):
        raise ConfigError(
            f"cluster.devices = {spec.cluster.devices}",
            f"{devices} processes were started",
            f"start {spec.cluster.devices} processes, or leave cluster.devices unset",
        )
    there = dataclasses.replace(spec.cluster, devices=devices, devices_per_node=place.ranks_on_node)
    return dataclasses.replace(spec, cluster=there)


def _wait_for(run_dir: Path, seconds: float) -> None:
    """Return when the run's directory is free: what a launcher has ended and starts again may take a moment to go."""
    patience = Patience(seconds)
    while True:
        try:
            take(run_dir).release()
            return
        except RunInUse:
            if patience.is_over:
                raise
        time.sleep(LOOK_SECONDS)


def _has_groups() -> bool:
    """Return whether this process has a process group already, which a script has made: it is a rank of that."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _reached(environ: Mapping[str, str], place: Place) -> str:
    """Return the address at which the processes of other machines reach rank 0's, as far as this process can tell.

    A host's own name often leads to its loopback on the host itself, to an address in front of it (of a service, of a
    gateway), or nowhere yet, as that of a pod which is not said to be ready. Then the way to another machine of the run
    tells, or the way out, or where neither is there (a cluster that has no way out) the first interface that is no
    loopback. Only rank 0 is asked: others read where to meet. Raises ConfigError where there is no such address.
    """
    host = meeting_host(environ, place.rendezvous)
    if place.rank != 0:
        return host
    if are_all_here(environ, place):
        return LOOPBACK
    found = list[str]()
    with contextlib.suppress(ConfigError):
        found += [address for address in _known(host) if not _is_loopback(address) and _may_be_own(address)]
    towards = peer_here(environ)
    found += [own for far in (towards, FAR_AWAY) if far and (own := address_towards(far)) and not _is_loopback(own)]
    found += [address for address in addresses_here() if not _is_loopback(address)]
    if not found and place.world_size <= place.ranks_on_node:  # nobody tells of another machine
        return LOOPBACK
    if not found:
        raise ConfigError(
            f"this machine has no address that other machines reach: '{host}' leads to its loopback, or nowhere",
            f"{place.world_size} processes were started, {place.ranks_on_node} of them here",
            "--rendezvous HOST:PORT with an address of the machine of rank 0",
        )
    return found[0]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _may_be_own(address: str) -> bool:
    """Return whether an address is one of this machine's, or nothing tells: those of IPv6 are not listed."""
    own = addresses_here()
    return ":" in address or not own or address in own


def _known(host: str) -> list[str]:
    try:
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        raise ConfigError(f"'{host}', where ranks are to meet, is not known here", str(error)) from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
