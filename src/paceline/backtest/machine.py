"""The cluster that a table's row ran on, from the names and rates that tables print, over the catalog's figures."""

from __future__ import annotations

import dataclasses
import math
import re

from paceline.cluster.catalog.devices import read_catalog
from paceline.cluster.catalog.file import Accelerator
from paceline.cluster.resolve import resolve_cluster
from paceline.spec.cluster import Cluster, ClusterSpec, Figure, Link

PCIE4_BYTES_PER_SECOND = 32e9  # one direction of 16 lanes
RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([GT])([bB])(?:ps|it/s|/s)")
SOCKETS = re.compile(r"\btcp\b|\bsockets?\b(?! direct)")
# What a device gets through them, whatever its adapter is sold as: bus bandwidth of an all-reduce between two nodes of
# one H200 over Ethernet, as a public project measured it (docs/scripts/accuracy/rounds/blind_rows_9.csv).
SOCKET_BYTES_PER_SECOND = 2.35e9
PER_DEVICE = re.compile(r"(/|per )\s*(gpu|device|chip|accelerator)")
NOISE = ("nvidia", "amd", "google", "gpu", "instinct", "tesla", "geforce", "rtx", "blackwell", "oam", "intel",
         "hbm2", "hbm2e", "hbm3", "hbm3e", "dgx", "hgx", "hpu", "cloud", "chip", "chips", "gpus", "core")  # fmt: skip
POWER = re.compile(r"\d{3,4}w")  # a limit of power behind a name, of which the catalog has one
PACKAGES = ("sxm", "pcie", "nvl")


class Machines:
    """Clusters by what a row says of its machine. Reads the catalog once and resolves each machine once."""

    def __init__(self) -> None:
        self.catalog = read_catalog()
        self._clusters: dict[tuple[object, ...], Cluster] = {}

    def entry(self, accelerator: str) -> tuple[Accelerator | None, str]:
        """Return the catalog's entry for an accelerator as a table names it, and what was assumed (or why none)."""
        if not accelerator:
            return None, "no accelerator stated"
        # What stands in parentheses is mostly a remark; where the rest names no chip, it is the name.
        outside, whole = re.sub(r"\(.*?\)", " ", accelerator), re.sub(r"[()]", " ", accelerator)
        found = self._found(_words(outside)) or self._found(_words(whole)) or self._of_node(accelerator.lower())
        if not found:
            return None, f"accelerator {accelerator} is not in the catalog"
        # The module for servers is what tables mean where they name the chip alone; the larger memory is the later one.
        rare = ("pcie", "nvl", "hbm2e")
        best = max(found, key=lambda entry: (not any(kind in entry.name for kind in rare), entry.memory_bytes))
        sure = len(found) == 1 or best.name == accelerator.lower()
        if (stated := _stated_gigabytes(_words(whole))) and not _has(best, stated):
            return best, f"accelerator {accelerator} taken as {best.name}, of {best.memory_bytes / 1e9:.0f} GB"
        return best, "" if sure else f"accelerator {accelerator} taken as {best.name}"

    def _of_node(self, text: str) -> list[Accelerator]:
        """Return the entries that come in a node that text names, such as p4d.24xlarge or a2-highgpu-8g."""
        found = {name: entry for entry in self.catalog.values() for name in entry.nodes if _begins(text, name)}
        longest = max(found, key=len, default="")
        inside = [entry for entry in self.catalog.values() if longest and longest in entry.nodes]
        return [min(inside, key=lambda entry: entry.memory_bytes)] if inside else []  # the plain name is the smaller's

    def _found(self, words: list[str]) -> list[Accelerator]:
        """Return the entries that words may name, those of the memory that is among the words where there are any."""
        memory = _stated_gigabytes(words)
        chip = [word for word in words if not re.fullmatch(r"\d+gi?b", word)]
        found = [entry for entry in self.catalog.values() if _same_chip(chip, entry)]
        stated = [package for package in PACKAGES if any(word.startswith(package) for word in words)]
        packed = [entry for entry in found if any(package in entry.title.lower() for package in stated)] or found
        fitting = [entry for entry in packed if memory and _has(entry, memory)]
        return fitting or packed

    def cluster(
        self, accelerator: str, devices: int, devices_per_node: int | None = None, inside: str = "", between: str = ""
    ) -> tuple[Cluster | None, list[str]]:
        """Return the cluster and what was assumed of it; None with the reason where the catalog lacks the accelerator.

        `inside` and `between` are what a table prints of the links: a rate between nodes replaces the catalog's.
        """
        entry, mark = self.entry(accelerator)
        if entry is None:
            return None, [mark]
        marks = [mark] if mark else []
        per_node = min(devices, devices_per_node or entry.devices_per_node)
        if devices % per_node:
            per_node = math.gcd(devices, per_node)
            marks.append(f"nodes of {per_node} devices")
        key = (entry.name, devices, per_node, inside, between)
        if key not in self._clusters:
            spec = ClusterSpec(device=entry.name, devices=devices, devices_per_node=per_node)
            cluster, _ = resolve_cluster(spec)
            self._clusters[key] = _with_links(cluster, inside, between)
        if devices > per_node and rate_of(between, per_node) is None:
            marks.append("network: the catalog's standard system")
        return self._clusters[key], marks


def _words(text: str) -> list[str]:
    apart = re.sub(r"\b(tpu|rtx|gaudi)(?=v?\d)", r"\1 ", text.lower())
    apart = re.sub(r"v5 ?lite(pod)?", "v5e", apart)
    apart = re.sub(r"^(v\d[a-z]*)-\d+$", r"tpu \1", apart)  # a slice by its size: v5p-128
    apart = re.sub(r"^\s*\d+\s*x\s*", "", apart)  # 8xH100
    apart = re.sub(r"\b(\d+)g\b", r"\1gb", apart)
    return [word for word in re.split(r"[^a-z0-9.]+", apart) if word]


def _stated_gigabytes(words: list[str]) -> int:
    """Return the memory among the words of a name, 0 where there is none."""
    return next((int(match[1]) for word in words if (match := re.fullmatch(r"(\d+)gi?b", word))), 0)


def _has(entry: Accelerator, gigabytes: int) -> bool:
    """Return whether an entry has so many GB, or GiB called so."""
    return 0.95 < entry.memory_bytes / 1e9 / gigabytes < 1.09


def _begins(text: str, node: str) -> bool:
    """Return whether a text is a node's name or begins with it, as sizes of cloud machines stand behind it."""
    plain, name = (re.sub(r"[^a-z0-9]", "-", word) for word in (text, node))
    return plain == name or plain.startswith(f"{name}-")


def _same_chip(chip: list[str], entry: Accelerator) -> bool:
    """Return whether every word of a name, makers and packages aside, is a word of the entry's name or title."""
    known = {*entry.name.split("-"), *_words(entry.title)}
    noise = [word for word in chip if word in NOISE or word.startswith(PACKAGES) or POWER.fullmatch(word)]
    wanted = [word for word in chip if word not in noise]
    return bool(wanted) and all(word in known for word in wanted)


def rate_of(text: str, devices_per_node: int) -> float | None:
    """Return a device's bytes per second between nodes, as a text such as "8x200Gbps HDR IB/node" states; else None.

    A rate is that of a node's adapters together unless the text says that it is a device's: "400Gbps RDMA/GPU".
    """
    match = RATE.search(text)
    if match is None:
        return None
    shared = 1 if PER_DEVICE.search(text.lower()) else devices_per_node
    count, number, prefix, unit = match.groups()
    rate = int(count or 1) * float(number) * {"G": 1e9, "T": 1e12}[prefix] / (8 if unit == "b" else 1)
    return rate / shared or None


def over_sockets(text: str) -> bool:
    """Return whether a text says that collectives between nodes go through the kernel's sockets."""
    return SOCKETS.search(text.lower()) is not None


def _with_links(cluster: Cluster, inside: str, between: str) -> Cluster:
    near, far = cluster.links[0], cluster.links[-1]
    if "pcie" in inside.lower() and near.bytes_per_second.value > PCIE4_BYTES_PER_SECOND:
        near = _with_rate(near, PCIE4_BYTES_PER_SECOND, inside)
    rate = rate_of(between, cluster.devices_per_node)
    if rate is not None:
        far = _with_rate(far, rate, between)
    if over_sockets(between) and far.bytes_per_second.value > SOCKET_BYTES_PER_SECOND:
        far = _with_rate(far, SOCKET_BYTES_PER_SECOND, f"{between}: as measured elsewhere")
    return dataclasses.replace(cluster, links=(near, *cluster.links[1:-1], far))


def _with_rate(link: Link, bytes_per_second: float, note: str) -> Link:
    """Return a link at a rate that a text states: what an adapter is sold as, unless the text says it was measured."""
    source = "measured" if "measured" in note.lower() else "published"
    return dataclasses.replace(link, bytes_per_second=Figure(bytes_per_second, source, note), groups=())
