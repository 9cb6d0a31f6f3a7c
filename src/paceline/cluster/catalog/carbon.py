"""Carbon intensity of electricity by region: a static table with years and their source; unknown without a region."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from paceline.config.document import packaged_toml
from paceline.errors import ConfigError, suggestion
from paceline.spec.cluster import Figure


@dataclass(frozen=True)
class CarbonRegion:
    """A region's average carbon intensity in a year, in grams of CO2 equivalent per kWh."""

    code: str
    name: str
    g_per_kwh: float
    year: int
    source: str


@functools.cache
def read_regions() -> dict[str, CarbonRegion]:
    """Return the regions by their ISO 3166 code."""
    values = packaged_toml("paceline.cluster.catalog", "carbon.toml")
    return {code: CarbonRegion(code=code, source=values["source"], **row) for code, row in values["regions"].items()}


def carbon_of(code: str) -> Figure:
    """Return the carbon intensity of a region, unknown for no region. Raises ConfigError for one without a figure."""
    if not code:
        return Figure(math.nan, "unknown", "set cluster.region, or cluster.carbon_g_per_kwh")
    regions = read_regions()
    region = regions.get(code.upper())
    if region is None:
        names = {known.name.lower(): known.code for known in regions.values()}
        near = names.get(code.lower())
        raise ConfigError(
            f"cluster.region = '{code}' has no carbon intensity here",
            "regions are countries by their ISO 3166 code of two letters, or EU",
            f"'{near}'" if near else f"{suggestion(code.upper(), regions)}; or state cluster.carbon_g_per_kwh",
        )
    return Figure(region.g_per_kwh, "published", f"average of {region.name} in {region.year}: {region.source}")
