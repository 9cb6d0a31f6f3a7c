"""Writes docs/reference/catalog.md from the catalog: catalog.toml, carbon.toml and power.toml.

`python docs/scripts/write_catalog.py` writes it; a test compares it with what the catalog says now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from paceline.cluster.catalog.carbon import read_regions
from paceline.cluster.catalog.file import PRECISIONS, Catalog, load_catalog
from paceline.cluster.catalog.power import power_model
from paceline.cluster.override import FIGURES

PAGE = Path(__file__).parents[1] / "reference" / "catalog.md"
NOTE = "<!-- Written by docs/scripts/write_catalog.py from the catalog; edit that instead. -->"

HEAD = """
What is published of accelerators, of the systems they come in, of prices and of electricity. `cluster.device` takes an
accelerator's name, `cluster.node` a node type's. A dash is unknown: what nobody prints is never guessed. Everything can
be replaced: [money, energy and carbon](../guide/plan/money-energy-carbon.md) tells how. What no document was read for
is named as assumed beside its source: it is tagged so in every plan, and intervals are wider where a forecast rests on
such a rate. Google's TPUs are there for planning and for holding forecasts against published runs; nothing here runs
on them.
"""
ACCELERATORS = """
## Accelerators

Dense peak rates in TFLOP/s; memory in GB, its bandwidth in GB/s, power in W.
"""
NODES = """
## Node types

Rates per device and in one direction, GB/s; the network is an even share of the node's adapters. The first node type of
an accelerator is what stands where `cluster.node` is empty.
"""
PRICES = """
## List prices

US dollars per device and hour, without commitment, as read on the date.
"""
POWER = """
## Power

Watts per device at the node's meter, with the device's share of the node, are

    TDP x (host share + waiting share + (1 - waiting share) x busy)

with a host share of {model.host_share:.3f} and a waiting share of {model.waiting_share:.3f}, fitted on {model.samples}
configurations ({model.source}). The interval is a factor of {model.ratio80:.2f} (80 %) and {model.ratio95:.2f} (95 %)
both ways.
"""
CARBON = """
## Carbon intensity

Grams of CO2 equivalent per kWh, averages of a year. Source: {source}.
"""
FIGURE = """
## Single figures

`[cluster.figures]` takes {names}; `peak_flops` is a table by precision.
"""


def catalog_page() -> str:
    """Return the reference page of the catalog."""
    catalog, model, regions = load_catalog(), power_model(), list(read_regions().values())
    intensities = [[f"`{one.code}`", one.name, f"{one.g_per_kwh:g}", f"{one.year}"] for one in regions]
    parts = [
        *(NOTE, "", "# Catalog", HEAD.rstrip()),
        *(ACCELERATORS, *_accelerators(catalog)),
        *(NODES, *_nodes(catalog)),
        *(PRICES, *_prices(catalog)),
        POWER.rstrip().format(model=model),
        CARBON.format(source=regions[0].source),
        *_table(["`cluster.region`", "name", "g/kWh", "year"], (2, 3), intensities),
        FIGURE.rstrip().format(names=", ".join(f"`{name}`" for name in FIGURES)),
    ]
    return "\n".join(parts) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: Sequence[str], numbers: Sequence[int], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---:" if index in numbers else "---" for index in range(len(head))]
    return [_row(head), f"|{'|'.join(rule)}|", *(_row(row) for row in rows)]


def _number(value: float | None, scale: float = 1.0) -> str:
    return "–" if value is None else f"{value / scale:,.5g}"


def _assumed(names: Sequence[str]) -> str:
    return f" **Assumed: {', '.join(name.replace('peak_flops.', '') for name in names)}**" if names else ""


def _accelerators(catalog: Catalog) -> list[str]:
    head = ["name", "accelerator", *PRECISIONS, "memory", "bandwidth", "power", "node types", "source"]
    rows = [
        [
            f"`{entry.name}`",
            entry.title,
            *(_number(entry.peak_flops.get(precision), 1e12) for precision in PRECISIONS),
            _number(entry.memory_bytes, 1e9),
            _number(entry.memory_bytes_per_second, 1e9),
            _number(entry.watts) + (f" ({entry.watts_note})" if entry.watts_note else ""),
            ", ".join(f"`{name}`" for name in entry.nodes),
            entry.source + _assumed(entry.assumed),
        ]
        for entry in catalog.accelerators.values()
    ]
    return _table(head, range(2, 11), rows)


def _nodes(catalog: Catalog) -> list[str]:
    head = ["name", "system", "devices", "fabric", "rate", "network", "rails", "source"]
    rows = [
        [
            f"`{node.name}`",
            node.title,
            f"{node.devices:,}",
            node.fabric,
            _number(node.fabric_bytes_per_second, 1e9),
            _number(node.network_bytes_per_second, 1e9),
            f"{node.rails or '–'}",
            node.source + _assumed(node.assumed),
        ]
        for node in catalog.nodes.values()
    ]
    return _table(head, (2, 4, 5, 6), rows)


def _prices(catalog: Catalog) -> list[str]:
    head = ["accelerator", "class", "spot", "price", "offer", "date", "source"]
    rows = [
        [
            f"`{price.accelerator}`",
            price.price_class,
            "yes" if price.spot else "",
            f"{price.usd_per_device_hour:.2f}",
            price.what,
            price.date,
            price.source,
        ]
        for price in sorted(catalog.prices, key=lambda one: (one.accelerator, one.spot, one.price_class))
    ]
    return _table(head, (3,), rows)


def main() -> None:
    """Write the page."""
    PAGE.write_text(catalog_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
