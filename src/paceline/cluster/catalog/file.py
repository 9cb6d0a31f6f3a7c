"""The catalog as it stands in a file: accelerators, node types and list prices, typed and checked.

`catalog.toml` beside this file is the published one; a file of the user's own adds to it or replaces entries.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.config import build, shape
from paceline.config.document import KeyPath, TomlDocument, packaged_toml, read_document
from paceline.config.fields import option
from paceline.config.values import literal, toml_key
from paceline.errors import ConfigError, suggestion

PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
PRICE_CLASSES = ("hyperscaler", "specialised")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class NodeType:
    """The devices that one fast fabric joins, and the adapters that lead out of it. One direction, bytes per second."""

    name: str = option("", "the key of its table")
    title: str = option("", "its name for people")
    devices: int = option(0, "devices that the fabric joins", minimum=1)
    devices_per_host: int = option(0, "devices of one host, where the fabric joins several hosts; 0: one", minimum=0)
    fabric: str = option("", "what joins them")
    fabric_bytes_per_second: float = option(0.0, "per device, one direction", above=0.0)
    fabric_groups: dict[str, float] = option(
        factory=dict, doc="the same inside groups of fewer devices, by their number, where links form a mesh"
    )
    adapters: int = option(0, "network adapters; 0: no standard network", minimum=0)
    adapter_bytes_per_second: float = option(0.0, "per adapter, one direction", minimum=0.0)
    rails: int = option(0, "separate planes that the adapters lead into; 0: unknown", minimum=0)
    assumed: tuple[str, ...] = option((), "figures that no document was read for: of NODE_FIGURES")
    source: str = option("", "where the figures are printed")

    def joined(self, devices: int, devices_per_node: int) -> int:
        """Return how many of so many devices the fabric joins, where it joins several nodes of so many; else 0.

        Jobs take equal parts of fabrics, as many nodes as go into one: of 512 devices on racks of 72, 64 each.
        """
        if not self.devices_per_host or devices_per_node >= self.devices:
            return 0
        most = min(devices, self.devices)
        equal = [size for size in range(devices_per_node, most + 1, devices_per_node) if devices % size == 0]
        return max(equal) if equal and 2 * max(equal) > most else most

    def nodes_of(self, devices: int) -> int:
        """Return the devices of a node: all that the fabric joins, or a host's where so many devices fill no fabrics.

        Example: 144 of 72 to a rack are two nodes; 128 are 32 hosts of four, of which the fabric joins 64.
        """
        return self.devices_per_host if self.devices_per_host and devices % min(devices, self.devices) else self.devices

    @property
    def network_bytes_per_second(self) -> float | None:
        """A device's even share of the node's adapters; None where there is no standard network."""
        return self.adapters * self.adapter_bytes_per_second / self.devices if self.adapters else None


@dataclass(frozen=True)
class ListPrice:
    """What a provider asks for a device and hour, without commitment."""

    accelerator: str = option("", "a name of the catalog")
    price_class: str = option("", "kind of provider", choices=PRICE_CLASSES)
    spot: bool = option(False, "whether the provider may take the device back")
    usd_per_device_hour: float = option(0.0, "US dollars", above=0.0)
    what: str = option("", "provider and offer")
    date: str = option("", "when it was read, YYYY-MM-DD")
    source: str = option("", "where it was read")

    @property
    def text(self) -> str:
        """The offer in words, with its date and where it was read."""
        return f"{self.what}{', spot' if self.spot else ''}, {self.date} ({self.source})"


@dataclass(frozen=True)
class Accelerator:
    """One accelerator of the catalog, in SI units; None where the manufacturer prints nothing."""

    name: str = option("", "the key of its table")
    title: str = option("", "its name for people")
    match: tuple[str, ...] = option((), "names that a driver reports")
    memory_bytes: float = option(0.0, "memory", above=0.0)
    memory_bytes_per_second: float = option(0.0, "bandwidth of that memory", above=0.0)
    peak_flops: dict[str, float] = option(factory=dict, doc="dense peak rate by precision, FLOP/s")
    watts: float | None = option(None, "thermal design power", above=0.0)
    watts_note: str = option("", "what `watts` is, where it is not the thermal design power")
    nodes: tuple[str, ...] = option((), "node types it comes in, its standard system first")
    sustained_share: float | None = option(
        None,
        "part of a peak that wide products sustain; else as fitted for its generation",
        above=0.0,
        maximum=1.0,
    )
    best_product: float | None = option(
        None,
        "part of a peak that its best product reached, where somebody measured it: no product sustains more",
        above=0.0,
        maximum=1.0,
    )
    runtime_bytes: float | None = option(None, "held before any tensor; else a CUDA context's", minimum=0.0)
    assumed: tuple[str, ...] = option((), "figures that no document was read for: of FIGURES, or peak_flops.bf16")
    source: str = option("", "where the figures are printed")
    node_types: tuple[NodeType, ...] = option((), "the node types themselves")

    @property
    def node(self) -> NodeType:
        """The standard system."""
        return self.node_types[0]

    @property
    def devices_per_node(self) -> int:
        """Devices of the standard system's fabric."""
        return self.node.devices


@dataclass(frozen=True)
class Catalog:
    """Accelerators by name, node types by name, and list prices."""

    accelerators: dict[str, Accelerator]
    nodes: dict[str, NodeType]
    prices: tuple[ListPrice, ...]


REQUIRED = {
    "accelerators": ("title", "memory_bytes", "memory_bytes_per_second", "peak_flops", "nodes", "source"),
    "nodes": ("title", "devices", "fabric", "fabric_bytes_per_second", "source"),
    "prices": ("accelerator", "class", "usd_per_device_hour", "what", "date", "source"),
}
# What `assumed` may name: figures that were written down from memory, or chosen. peak_flops is that of every precision.
FIGURES = ("memory_bytes", "memory_bytes_per_second", "peak_flops", "sustained_share", "watts")
NODE_FIGURES = ("fabric_bytes_per_second", "adapter_bytes_per_second")
RENAMED = {"class": "price_class"}  # `class` is no name in Python
INTERNAL = ("name", "node_types")


def load_catalog(added: str = "") -> Catalog:
    """Return the published catalog with the entries of the file `added` in it; an entry of the same name is replaced.

    Raises ConfigError, with the file and line, for what is not readable, not known, missing or out of range.
    """
    if not added:
        return _published()
    return _joined(_published(), read_document(added))


@functools.cache
def _published() -> Catalog:
    values = packaged_toml("paceline.cluster.catalog", "catalog.toml")
    return _joined(Catalog({}, {}, ()), TomlDocument("catalog.toml", values, {}))  # lines are for users' files


def _joined(known: Catalog, document: TomlDocument) -> Catalog:
    """Return the known catalog with a document's entries; prices of accelerators that it prices are replaced."""
    for key in document.values:
        if key not in REQUIRED:
            raise ConfigError(f"{document.where((key,))}: unknown key '{key}'", "a catalog has no such table",
                              suggestion(key, REQUIRED))  # fmt: skip
    nodes = dict(known.nodes)
    for name, values in _tables(document, "nodes"):
        nodes[name] = _typed(NodeType, "nodes", values, document, ("nodes", name), name=name)
        _check_assumed(nodes[name].assumed, NODE_FIGURES, document, ("nodes", name))
        _check_groups(nodes[name], document)
    accelerators = dict(known.accelerators)
    for name, values in _tables(document, "accelerators"):
        entry = _typed(Accelerator, "accelerators", values, document, ("accelerators", name), name=name)
        accelerators[name] = _completed(entry, nodes, document)
    prices = _prices(document, accelerators)
    named = {price.accelerator for price in prices}
    kept = tuple(price for price in known.prices if price.accelerator not in named)
    return Catalog(accelerators, nodes, (*kept, *prices))


def _tables(document: TomlDocument, kind: str) -> list[tuple[str, object]]:
    tables = document.values.get(kind, {})
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{document.where((kind,))}: {kind} is not a table", f"it holds [{kind}.NAME] tables",
                          f"[{kind}.my-name]")  # fmt: skip
    return list(tables.items())


@functools.cache
def _table_of(cls: type) -> shape.ShapedTable:
    return shape.table_of(cls)


def _typed(cls: type, kind: str, values: object, document: TomlDocument, prefix: KeyPath, **given: Any) -> Any:
    """Return the dataclass of one table's values. Raises ConfigError with the place of what is wrong."""

    def where(key: KeyPath) -> str:
        return document.where((*prefix, *key)) if kind != "prices" else f"{document.name}: prices[{prefix[-1]}]"

    place = ".".join(toml_key(part) for part in prefix)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where(())}: {place} is not a table", "an entry has options", f"[{place}]")
    missing = [name for name in REQUIRED[kind] if name not in values]
    if missing:
        raise ConfigError(
            f"{where(())}: {place} lacks {', '.join(missing)}", "an entry states them", f"{missing[0]} = ..."
        )
    renamed = {python: name for name, python in RENAMED.items()}
    members = [renamed.get(name, name) for name in _table_of(cls).members if name not in INTERNAL]
    unknown = [name for name in values if name not in members]
    if unknown:
        raise ConfigError(f"{where((unknown[0],))}: unknown key '{unknown[0]}'", f"{place} has no such option",
                          suggestion(unknown[0], members))  # fmt: skip
    named: dict[str, object] = {RENAMED.get(str(name), str(name)): value for name, value in values.items()}
    made, _ = build.build(_table_of(cls), build.mapping_layer(_table_of(cls), named, where))
    return replace(made, **given)


def _completed(entry: Accelerator, nodes: Mapping[str, NodeType], document: TomlDocument) -> Accelerator:
    """Return the entry with its node types. Raises ConfigError for names and rates that cannot be."""
    prefix = ("accelerators", entry.name)
    for precision, rate in entry.peak_flops.items():
        where = document.where((*prefix, "peak_flops"))
        if precision not in PRECISIONS:
            raise ConfigError(f"{where}: peak_flops.{precision} is not a precision",
                              f"rates stand under {', '.join(PRECISIONS)}",
                              suggestion(precision, PRECISIONS))  # fmt: skip
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
            raise ConfigError(
                f"{where}: peak_flops.{precision} = {literal(rate)}", "a rate is a positive number", "989e12"
            )
    unknown = [name for name in entry.nodes if name not in nodes]
    if unknown or not entry.nodes:
        name = unknown[0] if unknown else ""
        raise ConfigError(f"{document.where((*prefix, 'nodes'))}: there is no node type '{name}'",
                          f"{entry.name} comes in nodes of the catalog or of this file",
                          f"[nodes.{name or 'my-node'}], or {suggestion(name, nodes)}")  # fmt: skip
    rates = tuple(f"peak_flops.{precision}" for precision in entry.peak_flops)
    _check_assumed(entry.assumed, (*FIGURES, *rates), document, prefix)
    assumed = [each for name in entry.assumed for each in (rates if name == "peak_flops" else (name,))]
    return replace(entry, assumed=tuple(assumed), node_types=tuple(nodes[name] for name in entry.nodes))


def _check_assumed(assumed: tuple[str, ...], known: tuple[str, ...], document: TomlDocument, prefix: KeyPath) -> None:
    """Raise ConfigError for an assumed figure that the entry cannot have."""
    unknown = [name for name in assumed if name not in known]
    if unknown:
        raise ConfigError(f"{document.where((*prefix, 'assumed'))}: assumed names '{unknown[0]}'",
                          f"{'.'.join(map(toml_key, prefix))} has no such figure",
                          suggestion(unknown[0], known))  # fmt: skip


def _check_groups(node: NodeType, document: TomlDocument) -> None:
    """Raise ConfigError for a rate of a group that no devices of the node can form, and for a rate that is none."""
    for size, rate in node.fabric_groups.items():
        where = document.where(("nodes", node.name, "fabric_groups"))
        if not size.isdecimal() or not 1 < int(size) < node.devices:
            raise ConfigError(
                f"{where}: fabric_groups has a rate of '{size}' devices",
                f"groups are of 2 to {node.devices - 1} of the node's {node.devices} devices",
                "fabric_groups = { 2 = 25e9 }",
            )
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
            raise ConfigError(f"{where}: fabric_groups.{size} = {literal(rate)}", "a rate is a positive number", "25e9")


def _prices(document: TomlDocument, accelerators: Mapping[str, Accelerator]) -> tuple[ListPrice, ...]:
    rows = document.values.get("prices", [])
    if not isinstance(rows, list):
        raise ConfigError(f"{document.where(('prices',))}: prices is not a list", "prices are [[prices]] tables",
                          "[[prices]]")  # fmt: skip
    prices = []
    for index, values in enumerate(rows, start=1):
        price: ListPrice = _typed(ListPrice, "prices", values, document, ("prices", str(index)))
        if price.accelerator not in accelerators:
            raise ConfigError(f"{document.name}: prices[{index}] is of '{price.accelerator}'",
                              "no accelerator has that name", suggestion(price.accelerator, accelerators))  # fmt: skip
        if not DATE.fullmatch(price.date):
            raise ConfigError(f"{document.name}: prices[{index}] has the date '{price.date}'", "prices move monthly",
                              'date = "YYYY-MM-DD"')  # fmt: skip
        prices.append(price)
    return tuple(prices)
